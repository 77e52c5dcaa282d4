"""DistServe's arithmetic: which option, how many servers, and how much a GPU that is."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.cluster.placement import Option, best, limit, pair, placed

PREFILL = [Option("P1", 1, 0.5, 2.0), Option("P2", 2, 5.6, 4.0), Option("P4", 4, 10.0, 8.0)]
DECODE = [Option("D1", 1, 4.7, 2.0), Option("D2", 2, 9.0, 4.0), Option("none", 1, 0.0, 2.0)]


def test_a_rate_by_hand() -> None:
    """10/s: two servers of 5.6/s on two GPUs, and three of 4.7/s on one."""
    found = placed(10.0, PREFILL, DECODE)
    assert found is not None
    told = [(share.option.name, share.servers, share.gpus) for share in found.shares]
    assert told == [("P2", 2, 4), ("D1", 3, 3)]
    assert (found.gpus, found.per_gpu, found.euros_per_hour) == (7, 10 / 7, 2 * 4.0 + 3 * 2.0)
    assert limit(PREFILL, DECODE) == pytest.approx(1 / (1 / 2.8 + 1 / 4.7))


def test_a_pair_is_as_fast_as_its_slower_half() -> None:
    """Of P2 with D1 4.7/s on three GPUs, of P4 with D2 9/s on six, of P2 with D2 5.6/s on four."""
    found = pair(PREFILL, DECODE)
    assert found is not None
    assert [share.option.name for share in found.shares] == ["P2", "D1"]
    assert found.per_gpu == pytest.approx(4.7 / 3)
    found = pair(PREFILL, DECODE, gpus=2)
    assert found is not None
    assert ([share.option.name for share in found.shares], found.rate) == (["P1", "D1"], 0.5)


def test_where_nothing_meets_the_objective_nothing_is_placed() -> None:
    none = [Option("none", 1, 0.0)]
    assert best(none) is None
    assert best([]) is None
    assert placed(1.0, PREFILL, none) is None
    assert pair(PREFILL, none) is None
    assert pair(PREFILL, DECODE, gpus=1) is None
    assert limit(PREFILL, none) == limit([]) == 0.0


def test_of_equals_the_smaller_is_taken_and_a_price_that_is_missing_is_missed() -> None:
    options = [Option("two", 2, 4.0, 3.0), Option("one", 1, 2.0)]
    assert best(options) is options[1]
    found = placed(3.0, options)
    assert found is not None
    assert (found.gpus, found.euros_per_hour) == (2, None)


@given(
    rate=st.floats(0.01, 1000),
    goodput=st.floats(0.01, 100),
    gpus=st.integers(1, 8),
)
def test_servers_sustain_the_rate_and_one_less_does_not(
    rate: float, goodput: float, gpus: int
) -> None:
    found = placed(rate, [Option("any", gpus, goodput)])
    assert found is not None
    (share,) = found.shares
    assert share.servers * goodput >= rate * (1 - 1e-6)
    assert share.servers == 1 or (share.servers - 1) * goodput < rate
    assert share.servers in (ceil(rate / goodput), ceil(rate / goodput) - 1, 1)
    assert found.per_gpu <= limit([share.option]) * (1 + 1e-6)

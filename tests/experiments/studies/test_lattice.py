"""The search over numbers of replicas, against trying all of them."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.experiments.studies.lattice import Counts, Lattice

MOST = 9


def searched(
    prices: list[float],
    short: set[Counts],
    long: set[Counts],
    most: int = MOST,
    limit: float = inf,
) -> tuple[Lattice, list[tuple[Counts, bool]]]:
    """A search to its end, where runs meet the objective with what is in these sets; and what it
    has asked."""
    lattice = Lattice(prices, most)
    asked: list[tuple[Counts, bool]] = []
    while True:
        if (counts := lattice.next_short(limit)) is not None:
            round_ = [(counts, False)]
        else:
            round_ = [(counts, True) for counts in lattice.next_long(limit)]
        if not round_:
            return lattice, asked
        for counts, is_long in round_:
            assert (counts, is_long) not in asked
            asked.append((counts, is_long))
            lattice.tell(counts, counts in (long if is_long else short), is_long)


def above(corners: list[Counts], most: int = MOST) -> set[Counts]:
    """All counts that are in each kind at least as many as one of the corners."""
    every = product(range(1, most + 1), repeat=len(corners[0]) if corners else 1)
    return {
        counts
        for counts in every
        if any(all(a >= b for a, b in zip(counts, one, strict=True)) for one in corners)
    }


def test_one_kind_takes_doubling_and_halving() -> None:
    enough = above([(21,)], most=64)
    lattice, asked = searched([2.0], enough, enough, most=64)
    assert lattice.best == (21,)
    assert [counts for (counts,), long in asked if not long][:6] == [1, 2, 4, 8, 16, 32]
    assert [counts for (counts,), long in asked if long] == [21, 20]
    assert len(asked) <= 6 + 4 + 2


counts_of = st.tuples(st.integers(1, MOST), st.integers(1, MOST))


@given(
    st.lists(counts_of, min_size=0, max_size=4),
    st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)),
)
def test_the_cheapest_is_found_if_there_is_one(
    corners: list[Counts], prices: tuple[float, float]
) -> None:
    enough = above(corners)
    lattice, _ = searched(list(prices), enough, enough)
    if not corners:
        assert lattice.best is None
        assert lattice.bound == inf
        return
    assert lattice.best in enough
    least = min(a * prices[0] + b * prices[1] for a, b in enough)
    assert lattice.bound == pytest.approx(least)


@given(
    st.sets(counts_of, max_size=60),
    st.sets(counts_of, max_size=60),
    st.floats(1, 20),
)
def test_nothing_is_returned_that_long_runs_miss_whatever_chance_does(
    short: set[Counts], long: set[Counts], limit: float
) -> None:
    lattice, asked = searched([1.0, 1.3], short, long, limit=limit)
    assert lattice.best is None or lattice.best in long
    if lattice.best is not None:  # and its neighbours were tried
        a, b = lattice.best
        for less in ((a - 1, b), (a, b - 1)):
            if min(less) > 0:
                assert (less, True) in asked and less not in long


def test_what_roles_take_alone_is_where_both_begin() -> None:
    lattice = Lattice([1.0, 1.0], MOST)
    lattice.take(0, 2)
    lattice.take(1, 3)
    assert lattice.next_short(inf) == (2, 3)
    assert lattice.bound == 5
    lattice.take(1, None)
    assert lattice.bound == inf
    assert lattice.next_short(inf) is None

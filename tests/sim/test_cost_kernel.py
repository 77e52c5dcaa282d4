"""Attention over small blocks: off by default, else by the formula."""

import pytest

from pagedsim.core import ConfigError
from pagedsim.sim.cost import Roofline
from pagedsim.sim.cost.roofline import slowdown
from tests.sim.shapes import plan, replica, shipped

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def test_a_quarter_of_overhead_at_sixteen_is_four_tokens_a_block() -> None:
    assert slowdown(16, 4.0) == 1.25
    assert slowdown(1, 4.0) == 5.0
    assert slowdown(256, 4.0) == pytest.approx(1.0156, abs=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_no_slowdown_by_default(size: int) -> None:
    large = Roofline(replica("opt-13b", "a100-40gb", block_size=256))
    small = Roofline(replica("opt-13b", "a100-40gb", block_size=size))
    assert small.decode_seconds(10, 5000) == large.decode_seconds(10, 5000)


def test_only_what_decodes_read_takes_longer() -> None:
    where = replica("opt-13b", "a100-40gb", block_size=8)
    plain, paged = Roofline(where), Roofline(where, block_tokens=4.0)
    read = plain.decode_seconds(10, 5000) - plain.decode_seconds(10, 0)
    assert paged.decode_seconds(10, 0) == plain.decode_seconds(10, 0)
    assert paged.decode_seconds(10, 5000) == pytest.approx(plain.decode_seconds(10, 0) + 1.5 * read)
    assert paged.step_seconds(plan(1000)) == plain.step_seconds(plan(1000))
    assert paged.recompute_seconds(1000) == plain.recompute_seconds(1000)
    told = {term.name: term for term in paged.explain(plan(decodes=10, context=5000)).terms}
    assert told["KV"].bound == "bandwidth"
    assert told["KV"].seconds == pytest.approx(1.5 * read)


def test_a_fit_holds_for_the_blocks_that_were_fitted() -> None:
    def cost(size: int) -> float:
        made = shipped("cost", "distserve-opt-13b-tp1")(
            replica=replica("opt-13b", "a100-80gb", block_size=size),
            block_tokens=4.0,
            fitted_block_size=16,
        )
        return 1e3 * float(made.decode_seconds(10, 5000))

    assert cost(16) == pytest.approx(23.48 + 10 * 0.0607 + 5000 * 5.93e-4)
    assert cost(1) == pytest.approx(23.48 + 10 * 0.0607 + 5000 * 5.93e-4 * 5 / 1.25)
    assert cost(256) < cost(16)


def test_a_fit_must_say_which_blocks_it_is_of() -> None:
    with pytest.raises(ConfigError, match=r"^cost\.block_tokens=4\.0: needs cost\.fitted_block"):
        shipped("cost", "distserve-opt-13b-tp1")(
            replica=replica("opt-13b", "a100-80gb"), block_tokens=4.0
        )

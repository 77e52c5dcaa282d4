"""What is worked out on paper: the published examples, and what follows from the cost model."""

from dataclasses import replace

import pytest

from pagedsim.sim.cost import Roofline
from pagedsim.sim.cost.base import step
from pagedsim.sim.estimate import bound_of, changes, estimate, timed, with_cache, without_cache
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.replica import Replica
from tests.sim.shapes import MODELS, hardware, model, replica
from tests.sim.test_worked_examples import SEVEN_BILLION, ideal


def test_prefill_and_decode_of_seven_billion_on_a10() -> None:
    cost = ideal(SEVEN_BILLION)
    prefill, decode = estimate(cost, step(350)), estimate(cost, step(decodes=1, context=1))
    (weights, *_) = prefill.products
    assert round(1e3 * weights.seconds) == 39
    assert weights.bound == "compute"
    assert bound_of(prefill.breakdown) == ("compute", "matrix products")
    (weights, *_) = decode.products
    assert round(1e3 * weights.seconds) == 23
    assert weights.bound == "bandwidth"
    assert decode.breakdown.mbu(hardware("a10")) == pytest.approx(1.0)
    assert round(decode.tokens_per_s) == 43


def test_14_gb_in_14_ms_at_2_tb_a_second_use_half_of_the_bandwidth() -> None:
    gpu = Hardware("two", memory_gib=80, bandwidth_gb_s=2000, fp16_tflops=312, pcie_gb_s=32)
    where = Replica(SEVEN_BILLION.model, gpu)
    told = estimate(ideal(where, bandwidth_efficiency=0.5), step(decodes=1, context=0)).breakdown
    assert 1e3 * told.seconds == pytest.approx(14)
    assert told.mbu(gpu) == pytest.approx(0.5)


def test_a_product_of_7168_squared_crosses_the_roofline_at_188() -> None:
    """376 TFLOP/s over 2 TB/s: so many FLOP a byte, and with 16 bits so many rows."""
    gpu = Hardware("fast", memory_gib=80, bandwidth_gb_s=2000, fp16_tflops=376, pcie_gb_s=32)
    cost = ideal(Replica(replace(model("llama-2-7b"), params=7168**2), gpu))

    def bound(rows: int) -> str:
        return timed(cost, step(decodes=rows, context=0))[0].bound

    assert (bound(32), bound(4096)) == ("bandwidth", "compute")
    assert changes(bound, 4096) == [(1, "bandwidth"), (188, "compute")]


@pytest.mark.parametrize("name", MODELS)
def test_products_alone_take_what_the_terms_of_the_step_do(name: str) -> None:
    """The step overlaps computing and reading of all products with weights; each alone less."""
    gpus = 8 if name == "deepseek-v3" else 1
    cost = Roofline(replica(name, "h200", tensor_parallel=gpus))
    for plan in (step(1000), step(decodes=16, context=16_000)):
        found = [one for one in timed(cost, plan) if not one.product.attention]
        computing, reading = (sum(getattr(one, key) for one in found) for key in WAYS)
        terms = {term.name: term.seconds for term in cost.explain(plan).terms}
        longest = terms.get("matrix products", terms.get("weights"))
        assert longest == pytest.approx(max(computing, reading))


WAYS = ("computing", "reading")


def test_decodes_read_longer_from_small_blocks() -> None:
    where = replica("llama-3.1-8b", "h100")
    plan = step(decodes=4, context=4000)
    plain, paged = (timed(Roofline(where, block_tokens=n), plan) for n in (0.0, 4.0))
    for before, after in zip(plain, paged, strict=True):
        longer = 1.25 if before.product.attention else 1.0
        assert after.reading == pytest.approx(longer * before.reading)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (lambda n: n > 20, [(1, False), (21, True)]),
        (lambda n: n > 1, [(1, False), (2, True)]),
        (lambda n: n >= 100, [(1, False), (100, True)]),
        (lambda n: min(n // 30, 2), [(1, 0), (30, 1), (60, 2)]),
        (lambda _: "same", [(1, "same")]),
    ],
)
def test_changes_are_found_where_they_are(sizes: object, expected: list[object]) -> None:
    assert callable(sizes)
    assert changes(sizes, 100) == expected


def test_one_size_changes_nothing() -> None:
    assert changes(lambda size: size, 1) == [(1, 1)]


def test_changes_are_those_that_a_walk_over_all_sizes_finds() -> None:
    cost = Roofline(replica("deepseek-v3", "h200", tensor_parallel=8))

    def bound(size: int) -> object:
        return bound_of(cost.explain(step(size)))

    walked = [(n, bound(n)) for n in range(1, 2049) if n == 1 or bound(n) != bound(n - 1)]
    assert changes(bound, 2048) == walked
    assert len(walked) == 3  # all-reduce, weights, products


def test_a_kv_cache_saves_all_but_the_last_token_of_each_prefill() -> None:
    cost = ideal(SEVEN_BILLION)
    kept, again = (way(cost, 100, 4, False) for way in (with_cache, without_cache))
    pair = 4 * 32 * 32 * 128
    assert kept.flop == 2 * 7e9 * (100 + 3) + pair * (100 * 101 // 2 + 101 + 102 + 103)
    lengths = (100, 101, 102, 103)
    assert again.flop == sum(2 * 7e9 * n + pair * n * (n + 1) // 2 for n in lengths)
    assert kept.seconds == pytest.approx(
        cost.recompute_seconds(100) + sum(cost.decode_seconds(1, n) for n in (101, 102, 103))
    )
    assert again.seconds == pytest.approx(sum(map(cost.recompute_seconds, lengths)))

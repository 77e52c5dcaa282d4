"""Examples that can be worked out on paper, estimates of steps, and the products of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedsim.core import StepPlan
from pagedsim.experiments.studies.estimate_arithmetic import (
    Product,
    bound_of,
    changes,
    generations,
    products,
    timed,
)
from pagedsim.sim.capacity import capacity, cpu_blocks
from pagedsim.sim.cost import CostModel, Decodes, Roofline
from pagedsim.sim.cost.base import step
from pagedsim.sim.hardware import GIB, Hardware
from pagedsim.sim.replica import Replica
from tests.sim.shapes import hardware, ideal, model, parameters, plan, replica

SEVEN_BILLION = Replica(replace(model("llama-2-7b"), params=7e9), hardware("a10"))


def test_prefill_of_350_tokens_on_a10_takes_39_ms_and_computes() -> None:
    cost = ideal(SEVEN_BILLION)
    assert timed(cost, step(350))[0]["bound"] == "compute"
    explained = cost.explain(plan(350))
    assert bound_of(explained) == ("compute", "matrix products")
    assert explained.bound == "compute"
    seconds = {term.name: term.seconds for term in explained.terms}["matrix products"]
    assert seconds == pytest.approx(350 * 2 * 7e9 / 125e12)
    assert round(1e3 * seconds) == 39
    # Attention adds 350 × 351 / 2 pairs to the products.
    attention = 4 * 32 * 32 * 128 * (350 * 351 / 2) / 125e12
    assert cost.recompute_seconds(350) == pytest.approx(0.0392 + attention, rel=1e-12)


def test_a_decode_step_on_a10_takes_23_ms_and_reads() -> None:
    cost = ideal(SEVEN_BILLION)
    assert cost.decode_seconds(1, 0) == pytest.approx(14e9 / 600e9)
    assert round(1e3 * cost.decode_seconds(1, 350)) == 24  # with 350 tokens of context
    assert round(1e3 * cost.decode_seconds(1, 1)) == 23
    explained = cost.explain(plan(decodes=1, context=1))
    assert str(explained) == "decode: 23.3 ms, bandwidth-bound (weights 100 %)"
    assert explained.mbu(SEVEN_BILLION.hardware) == pytest.approx(1.0)
    assert timed(cost, step(decodes=1, context=1))[0]["bound"] == "bandwidth"
    explained = ideal(SEVEN_BILLION, host_step_ms=0.25).explain(plan(decodes=1, context=800))
    assert str(explained) == "decode: 24.3 ms, bandwidth-bound (weights 96 %, KV 3 %, host 1 %)"


def test_kv_memory_is_utilisation_of_total_less_weights_and_activations() -> None:
    where = replica("llama-2-7b", "a100-80gb")
    found = capacity(where, gpu_memory_utilization=0.9, reserved_gib=1.0)
    active = sum(found.activations.values())
    left = 0.9 * 79.25 * GIB - 2 * parameters(where.model) - active - GIB
    assert found.kv_bytes == pytest.approx(left)
    assert found.blocks == left // (512 * 1024 * 16)
    assert cpu_blocks(where, 4.0) == 4 * GIB // (512 * 1024 * 16)


@pytest.mark.parametrize(
    ("name", "params", "gpu", "bus", "swap", "recompute"),
    [
        ("llama-3.1-8b", 8.03e9, "h200", 50 / 64, 5.4, 33),
        ("llama-3.1-8b", 8.03e9, "a100-80gb", 25 / 32, 10.7, 105),
        ("opt-13b", 13e9, "a100-80gb", 25 / 32, 67, 171),
    ],
)
def test_swapping_a_thousand_tokens_against_recomputing_them(
    name: str, params: float, gpu: str, bus: float, swap: float, recompute: float
) -> None:
    """At half of the FLOP rate and 50 or 25 GB/s; the printed numbers leave attention out."""
    free = replace(hardware(gpu), pcie_copy_us=0.0)
    where = Replica(replace(model(name), params=params), free)
    cost = ideal(where, compute_efficiency=0.5, bus_efficiency=bus)
    prices = cost.prices()
    assert 1e3 * prices.swap_seconds(1024 // 16) == pytest.approx(swap, rel=0.01)
    assert 1e3 * prices.recompute_seconds(1024) == pytest.approx(recompute, rel=0.03)


# -- estimates -------------------------------------------------------------------------------------


def test_a_product_of_7168_squared_crosses_the_roofline_at_188() -> None:
    """376 TFLOP/s over 2 TB/s: so many FLOP a byte, and with 16 bits so many rows."""
    gpu = Hardware("fast", memory_gib=80, bandwidth_gb_s=2000, fp16_tflops=376, pcie_gb_s=32)
    cost = ideal(Replica(replace(model("llama-2-7b"), params=7168**2), gpu))

    def bound(rows: int) -> str:
        return str(timed(cost, step(decodes=rows, context=0))[0]["bound"])

    assert (bound(32), bound(4096)) == ("bandwidth", "compute")
    assert changes(bound, 4096) == [(1, "bandwidth"), (188, "compute")]


def test_a_kv_cache_saves_all_but_the_last_token_of_each_prefill() -> None:
    cost = ideal(SEVEN_BILLION)
    kept, again = generations(cost, 100, 4).values()
    pair = 4 * 32 * 32 * 128
    assert kept["flop"] == 2 * 7e9 * (100 + 3) + pair * (100 * 101 // 2 + 101 + 102 + 103)
    lengths = (100, 101, 102, 103)
    assert again["flop"] == sum(2 * 7e9 * n + pair * n * (n + 1) // 2 for n in lengths)
    assert kept["seconds"] == pytest.approx(
        cost.recompute_seconds(100) + sum(cost.decode_seconds(1, n) for n in (101, 102, 103))
    )
    assert again["seconds"] == pytest.approx(sum(map(cost.recompute_seconds, lengths)))


# -- products of a step ----------------------------------------------------------------------------


def by_name(where: Replica, plan: StepPlan) -> dict[str, Product]:
    return {one.name: one for one in products(where, plan)}


def test_a_decode_of_llama_2_7b_product_by_product() -> None:
    """2 M K N FLOP each, and the weights once: 4096 × 12288, 4096 × 4096, and the MLP."""
    found = by_name(replica("llama-2-7b", "a10"), step(decodes=16, context=16 * 1000))
    shapes = {name: (one.rows, one.inputs, one.outputs, one.times) for name, one in found.items()}
    assert shapes == {
        "QKV": (16, 4096, 3 * 4096, 32),
        "output": (16, 4096, 4096, 32),
        "up": (16, 4096, 2 * 11008, 32),
        "down": (16, 11008, 4096, 32),
        "LM head": (16, 4096, 32000, 1),
        "scores": (1, 128, 1000, 32 * 32 * 16),
        "values": (1, 1000, 128, 32 * 32 * 16),
    }
    for name, one in found.items():
        assert one.inputs is not None
        assert one.outputs is not None
        assert one.flop == 2 * one.rows * one.inputs * one.outputs * one.times, name
    assert found["QKV"].bytes == 2 * 4096 * 3 * 4096 * 32
    assert found["scores"].bytes + found["values"].bytes == 16 * 1000 * 512 * 1024


# -- decodes alone ---------------------------------------------------------------------------------


def both() -> tuple[CostModel, CostModel]:
    whole = Roofline(replica("llama-2-7b", "a100-80gb"))
    return whole, Decodes(whole)


def test_prompts_take_no_time_and_decodes_their_own() -> None:
    whole, alone = both()
    decode = step(decodes=8, context=8000)
    assert alone.step_seconds(step(500)) == alone.step_seconds(StepPlan(0, 0.0)) == 0.0
    assert alone.step_seconds(decode) == whole.step_seconds(decode) > 0
    mixed = step(500, decodes=8, context=8000)
    assert alone.step_seconds(mixed) == whole.step_seconds(decode) < whole.step_seconds(mixed)
    assert mixed.prefill_tokens == 500  # asking changes nothing
    assert alone.decode_seconds(8, 8000) == whole.decode_seconds(8, 8000)
    assert alone.explain(mixed) == whole.explain(decode)
    assert alone.work(mixed) == whole.work(decode)


def test_recomputation_is_free_and_swapping_is_not() -> None:
    whole, alone = both()
    assert alone.recompute_seconds(500) == 0.0 < whole.recompute_seconds(500)
    assert alone.swap_seconds(9) == whole.swap_seconds(9) > 0
    assert alone.server_seconds == 0.0
    assert alone.by_totals is whole.by_totals
    assert alone.notices == ["prompts take no time, as if they came computed", *whole.notices]

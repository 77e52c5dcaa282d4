"""The roofline: what binds which step, what more work and more GPUs change, its table of terms."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.core import StepPlan
from pagedsim.experiments.studies.estimate_arithmetic import bound_of, products
from pagedsim.sim.cost import CostModel, Roofline
from pagedsim.sim.cost.roofline import PASS_US, layer_us, slowdown
from pagedsim.sim.cost.work import step_work
from pagedsim.sim.hardware import FAMILIES, family_of
from pagedsim.sim.huggingface import read_shape
from pagedsim.sim.replica import Replica
from pagedsim.sim.stack import Stack
from tests.sim.shapes import (
    HARDWARE,
    MODELS,
    PUBLISHED,
    hardware,
    model,
    plan,
    replica,
    shipped,
)

GPT_OSS = PUBLISHED["gpt-oss-120b"][1] | {
    "_name_or_path": "gpt-oss-120b",
    "quantization_config": {"quant_method": "mxfp4"},
}
COSTS: dict[str, CostModel] = {
    "llama": Roofline(replica("llama-3.1-8b", "h100")),
    "in four": Roofline(replica("llama-2-70b", "a100-80gb", tensor_parallel=4)),
    "gpt-oss": Roofline(Replica(read_shape(GPT_OSS), hardware("h100"))),
    "4 stages of 2": Roofline(
        replica("llama-2-70b", "h100", tensor_parallel=2, pipeline_parallel=4)
    ),
    "uneven": Roofline(replica("llama-2-7b", "h100", pipeline_parallel=3)),
    "launched": Roofline(
        replica("llama-2-7b", "h100", pipeline_parallel=2), stack=Stack(launch_us=200.0)
    ),
    "experts": Roofline(replica("mixtral-8x7b", "h100", pipeline_parallel=2, expert_parallel=4)),
    "experts, shared": Roofline(
        replica("mixtral-8x7b", "h100", tensor_parallel=2, expert_parallel=2)
    ),
    "deepseek": Roofline(replica("deepseek-v3", "h200", expert_parallel=8), expert_skew=1.5),
    "two nodes": Roofline(
        replica("deepseek-v3", "h200", tensor_parallel=2, pipeline_parallel=2, expert_parallel=16)
    ),
    "distserve": shipped("cost", "distserve-opt-13b-tp1")(
        replica=replica("opt-13b", "a100-80gb", pipeline_parallel=4)
    ),
}
SEQUENCES = st.integers(min_value=0, max_value=4096)
LENGTHS = st.integers(min_value=1, max_value=4096)
CHUNKS = st.lists(st.tuples(st.integers(0, 8192), LENGTHS), max_size=8)
ANY = pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
FEW = settings(max_examples=settings().max_examples // 2)


@ANY
@FEW
@given(chunks=CHUNKS, sequences=SEQUENCES, length=LENGTHS, ahead=st.booleans())
def test_answers_agree(
    cost: CostModel, chunks: list[tuple[int, int]], sequences: int, length: int, ahead: bool
) -> None:
    """Of decodes bit for bit."""
    context = sequences * length
    decodes = plan(decodes=sequences, context=context)
    assert cost.step_seconds(decodes) == cost.decode_seconds(sequences, context)
    step = plan(*chunks, decodes=sequences, context=context)
    step._ahead = ahead
    explained = cost.explain(step)
    assert explained.seconds == pytest.approx(cost.step_seconds(step), rel=1e-9)
    if explained.terms:
        assert "\n" not in str(explained)
    recompute = cost.step_seconds(plan(length))
    assert cost.recompute_seconds(length) == pytest.approx(recompute)
    assert cost.recompute_seconds(0) == 0.0
    where: Replica = cost.replica
    if isinstance(cost, Roofline) and where.gpus == 1:
        # No step is faster than what the kernels reach of the data sheet.
        family = family_of(where.hardware.family)
        assert explained.mfu(where.hardware) <= family.compute + 1e-9
        assert explained.mbu(where.hardware) <= max(family.bandwidth, family.cache) + 1e-9
    work, found = step_work(where, step), products(where, step)
    assert sum(one.flop for one in found) == pytest.approx(work.flop, rel=1e-12)
    assert sum(one.bytes for one in found) == pytest.approx(work.bytes, rel=1e-12)


@ANY
def test_more_work_never_takes_less_time(cost: CostModel) -> None:
    def grow(steps: list[StepPlan]) -> None:
        found = [cost.step_seconds(step) for step in steps]
        assert found == sorted(found)

    sizes = (1, 2, 3, 4, 5, 7, 8, 9, 16, 63, 64, 65, 200, 201, 2000)
    grow([plan(decodes=n, context=100 * n) for n in sizes])
    grow([plan(n) for n in sizes])
    grow([plan(500, decodes=n, context=100 * n) for n in (0, *sizes)])
    grow([plan(*([100] * n)) for n in range(1, 20)])
    grow([plan(decodes=64, context=6400), plan(1, decodes=64, context=6400)])


def terms(cost: Roofline, **totals: Any) -> dict[str, float]:
    found = cost.explain(plan(*totals.pop("chunks", ()), **totals))
    return {term.name: term.seconds for term in found.terms}


def test_an_all_reduce_follows_the_formula_of_a_ring() -> None:
    where = replica("llama-2-70b", "a100-80gb", tensor_parallel=4)
    cost = Roofline(where, interconnect_efficiency=1.0)
    vector = 8192 * 2  # bytes of one token's hidden state
    each = 2 * (4 - 1) / 4 * 100 * vector / 300e9 + 5e-6
    assert terms(cost, decodes=100, context=100)["all-reduce"] == pytest.approx(2 * 80 * each)


def test_experts_and_latent_attention_are_more_kernels() -> None:
    """Counted by hand: products in 8 bits of 7 µs and in 16 of 4, and passes."""
    dense = 4 * 7 + 4 * PASS_US
    assert layer_us(model("llama-3.1-70b"), 7, 4) == pytest.approx(dense)
    assert layer_us(model("qwen3-235b-a22b"), 7, 4) == pytest.approx(dense + 4 + 3 * PASS_US)
    deepseek = dense + 7 + 2 * 4 + PASS_US + 58 / 61 * (4 + 3 * PASS_US)
    assert layer_us(model("deepseek-v3"), 7, 4) == pytest.approx(deepseek)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_takes_no_less_than_its_launches(ahead: bool) -> None:
    where = replica("llama-2-70b", "a100-80gb", tensor_parallel=8)
    captured = Roofline(where, stack=Stack(launch_us=0.0, latencies=0.0))
    eager = Roofline(where, stack=Stack(launch_us=200.0, latencies=0.0))
    steps = (plan(decodes=1, context=500), plan(8, decodes=2, context=900), plan(8192))
    for step, sequences in zip(steps, (1, 3, 1), strict=True):
        step._ahead = ahead
        told = eager.explain(step)
        assert told.seconds == pytest.approx(eager.step_seconds(step), rel=1e-12)
        device = sum(one.seconds for one in captured.explain(step).terms if one.bound != "host")
        host = 0.0 if ahead else sum(one.seconds for one in told.terms if one.bound == "host")
        launches = 80 * 200e-6 * FAMILIES["ampere"].launch
        if ahead:  # the host launches, and then does what else it has to do
            work = 1e-3 * Stack().host_step_ms + 1e-6 * Stack().host_request_us * sequences
            assert eager.step_seconds(step) == pytest.approx(max(device, launches + work))
        else:
            assert eager.step_seconds(step) == pytest.approx(max(device, launches) + host)
    assert eager.explain(plan(decodes=1, context=500)).bound in ("launch", "bandwidth")


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_with_prompts_take_no_less_than_launching_their_layers(ahead: bool) -> None:
    """Of DeepSeek-V3, three layers are dense; steps of decodes alone are captured. Experts alone
    are no reason to take longer."""
    where = replica("deepseek-v3", "b200", tensor_parallel=8)
    captured = Roofline(where, stack=Stack())
    eager = Roofline(where, stack=Stack(prompt_launch_us=400.0, latent_launch_us=2500.0))
    launches = 3 * 400e-6 + 58 * 2500e-6
    for step in (plan(100), plan(100, decodes=8, context=900)):
        step._ahead = ahead
        host = 1e-3 * Stack().host_step_ms + 1e-6 * Stack().host_request_us * (
            1 + step.decode_count
        )
        assert eager.step_seconds(step) == pytest.approx(launches + host)
        assert eager.explain(step).seconds == pytest.approx(launches + host)
        assert bound_of(eager.explain(step)) == ("launch", "launches")
    long, decodes = plan(50_000), plan(decodes=8, context=900)
    for step in (long, decodes):
        assert eager.step_seconds(step) == captured.step_seconds(step)
    alone = plan(100)
    assert eager.recompute_seconds(100) == pytest.approx(eager.step_seconds(alone), rel=1e-12)
    qwen = Roofline(replica("qwen3-235b-a22b", "b200"), stack=Stack(latent_launch_us=2500.0))
    assert "launches" not in {term.name for term in qwen.explain(alone).terms}


def test_a_gpu_without_fitted_constants_has_a_notice() -> None:
    assert not Roofline(replica("llama-3.1-8b", "h100")).notices
    where = replica("llama-3.1-8b", "t4")
    (notice,) = Roofline(where).notices
    assert "no constants are fitted to the family of hardware=t4" in notice
    assert not Roofline(where, compute_efficiency=0.5, bandwidth_efficiency=0.8).notices


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_8_bits_of_keys_and_values_take_half_the_bytes(share: float) -> None:
    """Where bytes are what is waited for, kernels reach a `share` of the rate, and no FLOP is
    fewer."""
    whole, half = (
        Roofline(
            replica("llama-2-7b", "a100-80gb", kv_cache_dtype=name), stack=Stack(fp8_cache=share)
        )
        for name in ("auto", "fp8")
    )
    base = whole.decode_seconds(8, 0)
    assert half.decode_seconds(8, 0) == base
    assert half.decode_seconds(8, 40_000) - base == pytest.approx(
        (whole.decode_seconds(8, 40_000) - base) / 2 / share
    )
    assert half.recompute_seconds(4096) == pytest.approx(whole.recompute_seconds(4096), rel=0.02)
    copies = 100 * whole.replica.hardware.pcie_copy_us * 1e-6
    moved = whole.swap_seconds(100) - copies
    assert half.swap_seconds(100) == pytest.approx(copies + moved / 2)
    step = plan(decodes=8, context=40_000)
    assert half.work(step).flop == whole.work(step).flop
    assert half.work(step).bytes < whole.work(step).bytes


@pytest.mark.parametrize(
    ("name", "gpu"), [*product(MODELS, ["h100"]), *product(["llama-3.1-8b"], HARDWARE)]
)
def test_every_shipped_model_and_every_shipped_gpu(name: str, gpu: str) -> None:
    cost = shipped("cost", "roofline")(replica=replica(name, gpu))
    assert 0 < cost.decode_seconds(1, 1) < cost.decode_seconds(64, 64 * 1000) < 10
    assert cost.recompute_seconds(100) == cost.step_seconds(plan(100)) > 0
    plain = Roofline(replica(name, gpu))
    assert (plain.terms, plain.swap_seconds(7)) == (cost.terms, cost.swap_seconds(7))


# -- attention over small blocks -------------------------------------------------------------------


def test_only_what_decodes_read_takes_longer_from_small_blocks() -> None:
    """By default, nothing."""
    assert [slowdown(size, 4.0) for size in (1, 16, 64)] == [5.0, 1.25, 1.0625]
    sizes = [replica("opt-13b", "a100-40gb", block_size=size) for size in (1, 16, 256)]
    assert len({Roofline(one).decode_seconds(10, 5000) for one in sizes}) == 1
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


# -- the table of terms ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stack",
    [Stack(), Stack(launch_us=200.0, latencies=0.0), Stack(prompt_launch_us=450.0)],
)
def test_many_steps_at_once_take_as_long_as_each(stack: Stack) -> None:
    cost = Roofline(replica("mixtral-8x7b", "a100-80gb", tensor_parallel=2), stack=stack)
    steps = [
        plan(100, (50, 20), decodes=30, context=9000),
        plan(8192),
        plan(decodes=1, context=1),
        plan(decodes=256, context=500_000),
    ]
    rows = [
        (
            *(one.prefill_tokens + one.decode_count, len(one.chunks) + one.decode_count),
            *(one.prefill_pairs, one.prefill_context - one.prefill_tokens, one.decode_context, 1),
        )
        for one in steps
    ]
    found = cost.seconds_of(np.array(rows, dtype=float)).tolist()
    assert found == pytest.approx([cost.step_seconds(one) for one in steps], rel=1e-12)

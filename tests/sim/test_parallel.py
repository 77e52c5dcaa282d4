"""Pipelines and experts dealt to GPUs: memory, step times, bubbles, and the busiest GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.server import ServerSpec
from pagedsim.sim.capacity import capacity, cpu_blocks
from pagedsim.sim.cost import Roofline
from pagedsim.sim.cost.base import Breakdown
from pagedsim.sim.cost.roofline import ALL_TO_ALL_INSIDE, ALL_TO_ALL_US
from pagedsim.sim.cost.terms import Busiest
from pagedsim.sim.model import MoE
from pagedsim.sim.stack import Stack
from tests.sim.shapes import ideal, model, plan, replica, shipped

LLAMA_70B = replica("llama-2-70b", "h100", tensor_parallel=2, pipeline_parallel=4)


def seconds(told: Breakdown, name: str) -> float:
    return next((term.seconds for term in told.terms if term.name == name), 0.0)


def test_each_stage_keeps_its_layers_and_the_ends_theirs() -> None:
    whole, half = (replica("llama-2-7b", "a100-80gb", pipeline_parallel=n) for n in (1, 2))
    model = whole.model
    end = 32_000 * 4096 * 2  # the embeddings on the first GPU, as much of an LM head on the other
    assert half.weight_bytes == pytest.approx((model.weight_bytes - 2 * end) / 2 + end)
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    assert half.copies_per_block == whole.copies_per_block == 1
    assert capacity(half).blocks > 2 * capacity(whole).blocks
    assert cpu_blocks(half, 4.0) == 2 * cpu_blocks(whole, 4.0)
    assert (half.gpus, whole.gpus, LLAMA_70B.gpus) == (2, 1, 8)


def test_of_uneven_stages_the_largest_counts() -> None:
    where = replica("llama-2-7b", "a100-80gb", pipeline_parallel=3)
    assert [stage.layers for stage in where.stages] == [11, 11, 10]
    assert where.kv_bytes_per_token == pytest.approx(where.model.kv_bytes_per_token * 11 / 32)
    assert (
        replica("llama-2-7b", "a10", kv_layout="layer", pipeline_parallel=3).copies_per_block == 22
    )


@pytest.mark.parametrize("stages", [2, 8])
def test_a_prompt_fills_and_empties_the_pipeline(stages: int) -> None:
    """p + m - 1 turns of a stage, of which m are work; m is p here."""
    cost = ideal(replica("llama-2-7b", "h100", pipeline_parallel=stages))
    told = cost.explain(plan(4096))
    assert seconds(told, "bubbles") / told.seconds == pytest.approx((stages - 1) / (2 * stages - 1))
    model = cost.replica.model
    flop = 4096 * model.flop_per_token + model.flop_per_sample
    flop += model.prefill_pair_flop * 4096 * 4097 / 2
    hops = (stages - 1) * (4096 / stages * 4096 * 2 / 450e9 + 5e-6)
    turn = (flop / stages / cost.replica.hardware.flop_rate + hops) / stages
    assert told.seconds == pytest.approx((2 * stages - 1) * turn)


def test_hops_between_nodes_take_the_network() -> None:
    inside = replica("llama-2-70b", "h100", tensor_parallel=4, pipeline_parallel=2)
    beyond = replica("llama-2-70b", "h100", tensor_parallel=4, pipeline_parallel=5)
    alone = replica("llama-2-70b", "h100", tensor_parallel=8, pipeline_parallel=4)
    assert [where.hops for where in (inside, beyond, alone)] == [(1, 0), (2, 2), (0, 3)]
    assert [where.spans_nodes for where in (inside, beyond, alone)] == [False, True, True]
    told = ideal(beyond).explain(plan(decodes=5, context=500))
    each = 8192 * 2 / 4  # bytes that each of four GPUs sends of a token
    assert seconds(told, "to the next stage") == pytest.approx(2 * (each / 450e9 + 5e-6))
    outside = seconds(told, "to the next stage between nodes")
    assert outside == pytest.approx(2 * (each / 50e9 + 14e-6))


def test_launches_and_the_host_are_counted_once_for_each_round() -> None:
    stack = Stack(launch_us=200.0, latencies=0.0, host_step_ms=2.0, host_request_us=0.0)
    cost = Roofline(replica("tiny", "h100", pipeline_parallel=2), stack=stack)
    launching = cost.replica.model.layers * 200e-6
    for step, rounds in ((plan(decodes=2, context=20), 1.0), (plan(16), 1.5)):
        assert cost.step_seconds(step) == pytest.approx(rounds * launching + 2e-3)
        step._ahead = True
        assert cost.step_seconds(step) == pytest.approx(rounds * launching + 2e-3)


def test_a_published_fit_is_dealt_to_stages_as_in_its_authors_simulator() -> None:
    """A stage takes its part of a + b Σcontext + c batch, of a quarter of the batch."""
    made = shipped("cost", "distserve-opt-13b-tp1")
    four = made(replica=replica("opt-13b", "a100-80gb", pipeline_parallel=4))
    quarter = 23.48 + 10_000 * 5.93e-4 + 20 * 0.0607
    assert 1e3 * four.decode_seconds(80, 40_000) == pytest.approx(quarter)
    lone = 23.48 + 500 * 5.93e-4 + 0.0607
    assert 1e3 * four.decode_seconds(1, 500) == pytest.approx(lone)
    large = 20.21 + 25_000 * 4.91e-4 + 100 * 0.120  # from 95 in a micro-batch on
    assert 1e3 * four.decode_seconds(400, 100_000) == pytest.approx(large)
    assert any("each stage is taken to need its part" in line for line in four.notices)


# -- experts ---------------------------------------------------------------------------------------


DEEPSEEK = replica("deepseek-v3", "h200", expert_parallel=8)
EXPERT = 3 * 7168 * 2048  # weights, of a byte each
LAYERS = 58  # that have experts


def test_experts_are_dealt_and_all_else_stands_in_each_group() -> None:
    """8 GPUs with 32 experts each, and the rest of the model 8 times, or 4 times in halves."""
    whole = model("deepseek-v3")
    experts = LAYERS * 256 * EXPERT
    assert whole.expert_bytes == experts
    assert DEEPSEEK.weight_bytes == pytest.approx(whole.weight_bytes - experts * 7 / 8)
    halves = replica("deepseek-v3", "h200", tensor_parallel=2, expert_parallel=8)
    rest = (whole.weight_bytes - experts) / 2
    assert halves.weight_bytes == pytest.approx(rest + experts / 8)
    assert (DEEPSEEK.groups, halves.groups, DEEPSEEK.gpus, halves.gpus) == (8, 4, 8, 8)
    shared = replica("deepseek-v3", "h200", tensor_parallel=8, expert_parallel=8)
    assert shared.weight_bytes == pytest.approx(whole.weight_bytes / 8)
    assert shared.groups == 1


def test_limits_and_sizes_are_those_of_each_group_as_in_vllm() -> None:
    """128 sequences and 2,048 tokens of each of 4 groups, and of each of 2 micro-batches."""
    limits: dict[str, Any] = {"max_seqs": 128, "max_batched_tokens": 2048, "blocks": 1000}
    spec = ServerSpec(**limits, batching="unified", max_model_len=8192, cpu_blocks=10)
    for degrees, groups, batches in (
        ({}, 1, 1),
        ({"expert_parallel": 4}, 4, 4),
        ({"expert_parallel": 4, "tensor_parallel": 2}, 2, 2),
        ({"expert_parallel": 4, "pipeline_parallel": 2}, 4, 8),
        ({"pipeline_parallel": 2}, 1, 2),
    ):
        made = replace(spec, **cast(dict[str, Any], degrees)).scheduler()
        assert made.max_seqs == 128 * groups
        assert made.max_batched_tokens == 2048 * batches
        assert made.memory.total == 1000 * groups


@pytest.mark.parametrize(("experts", "chosen", "gpus"), [(256, 8, 8), (256, 8, 64), (8, 2, 2)])
@pytest.mark.parametrize(("tokens", "within"), [(8, 0.1), (128, 0.03)])
def test_the_busiest_is_as_busy_as_by_throwing_dice(
    experts: int, chosen: int, gpus: int, tokens: int, within: float
) -> None:
    dice = np.random.default_rng(experts + gpus + tokens)
    most, read = [], []
    for _ in range(400):
        drawn = dice.random((tokens, experts)).argsort(axis=1)[:, :chosen]
        per_expert = np.bincount(drawn.ravel(), minlength=experts).reshape(gpus, -1)
        most.append(per_expert.sum(axis=1).max())
        read.append((per_expert > 0).sum(axis=1).max() / (experts // gpus))
    found = Busiest(MoE(experts, chosen, 1), gpus, skew=1.0)
    assert found.routed(tokens) == pytest.approx(np.mean(most), rel=within)
    assert 1 - found.unchosen(tokens) == pytest.approx(np.mean(read), rel=within)


def test_a_decode_reads_all_but_experts_whole_and_its_own_experts_as_chosen() -> None:
    """Every GPU decodes one of eight sequences, and all eight choose among its 32 experts."""
    told = ideal(DEEPSEEK).explain(plan(decodes=8, context=8000))
    whole = DEEPSEEK.model
    rest = whole.read_bytes(8) - whole.expert_read_bytes(8)
    chosen = 32 * (1 - Busiest(MoE(256, 8, 1), 8, 1.0).unchosen(8))
    assert 32 * (1 - (1 - 8 / 256) ** 8) < chosen < 32
    read = rest + LAYERS * chosen * EXPERT
    assert seconds(told, "weights") == pytest.approx(read / 4.8e12)
    assert seconds(told, "decode attention") == pytest.approx(
        1000 * whole.decode_pair_flop / 989.4e12
    )


def test_each_choice_of_an_expert_elsewhere_travels_there_and_back() -> None:
    """7 of 8 experts are elsewhere; there in 8 bits, since products are, and back in 16."""
    told = ideal(DEEPSEEK).explain(plan(decodes=512, context=512))
    sent = 64 * 8 * 7 / 8 * 7168 * (1 + 2)
    assert seconds(told, "all-to-all") == pytest.approx(
        LAYERS * (sent / (450e9 * ALL_TO_ALL_INSIDE) + 2 * ALL_TO_ALL_US * 1e-6)
    )
    shared = ideal(replica("mixtral-8x7b", "h100", tensor_parallel=2, expert_parallel=2))
    told = shared.explain(plan(decodes=4, context=400))
    assert {"all-reduce"} == {term.name for term in told.terms if term.bound == "interconnect"}


# -- what is refused -------------------------------------------------------------------------------


def test_limits_of_groups_that_hold_no_prompt_are_refused() -> None:
    limits: dict[str, Any] = {"max_batched_tokens": 2048, "blocks": 1000, "expert_parallel": 4}
    with pytest.raises(ConfigError, match="max_batched_tokens=2048: must be at least"):
        ServerSpec(**limits, batching="prefill_first", max_model_len=4096).scheduler()
    with pytest.raises(ConfigError, match="max_model_len"):
        ServerSpec(**limits, batching="unified", max_model_len=16_001).scheduler()

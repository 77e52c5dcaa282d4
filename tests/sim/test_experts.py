"""Experts dealt to GPUs: memory, what travels, and the GPU for which all others wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.server import ServerSpec
from pagedsim.sim.capacity import activation_bytes, capacity, cpu_blocks
from pagedsim.sim.cost import Roofline
from pagedsim.sim.cost.base import Breakdown
from pagedsim.sim.cost.split import Busiest
from pagedsim.sim.hardware import GIB
from pagedsim.sim.model import MoE
from pagedsim.sim.replica import Replica
from tests.sim.shapes import ideal_stack, model, plan, replica

DEEPSEEK = replica("deepseek-v3", "h200", expert_parallel=8)
EXPERT = 3 * 7168 * 2048  # weights, of a byte each
LAYERS = 58  # that have experts


def ideal(where: Replica) -> Roofline:
    """At all of the data sheet's rates, and with software that takes no time."""
    return Roofline(where, stack=ideal_stack(), compute_efficiency=1.0, bandwidth_efficiency=1.0)


def seconds(told: Breakdown, name: str) -> float:
    return next((term.seconds for term in told.terms if term.name == name), 0.0)


# Memory


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


def test_blocks_are_those_of_one_group() -> None:
    found = capacity(DEEPSEEK, max_batched_tokens=2048, max_seqs=64)
    left = 0.9 * DEEPSEEK.hardware.memory_bytes - 0.5 * GIB - DEEPSEEK.weight_bytes
    left -= activation_bytes(DEEPSEEK.model, 1, 2048, 64)
    assert found.blocks == int(left // (576 * 2 * 61 * 16))
    assert cpu_blocks(DEEPSEEK, 4.0) == int(4 * GIB // (576 * 2 * 61 * 16))


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


def test_what_one_group_cannot_do_is_refused() -> None:
    limits: dict[str, Any] = {"max_batched_tokens": 2048, "blocks": 1000, "expert_parallel": 4}
    with pytest.raises(ConfigError, match="max_batched_tokens=2048: must be at least"):
        ServerSpec(**limits, batching="prefill_first", max_model_len=4096).scheduler()
    with pytest.raises(ConfigError, match="max_model_len"):
        ServerSpec(**limits, batching="unified", max_model_len=16_001).scheduler()


# The busiest GPU


@pytest.mark.parametrize(
    ("experts", "chosen", "gpus"), [(256, 8, 8), (256, 8, 64), (128, 8, 4), (8, 2, 8), (8, 2, 2)]
)
@pytest.mark.parametrize(("tokens", "within"), [(8, 0.1), (64, 0.03), (512, 0.03)])
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


def test_one_token_burdens_no_gpu_with_more_than_it_chooses() -> None:
    for gpus in (2, 4, 8):
        found = Busiest(MoE(8, 2, 1), gpus, skew=1.0)
        assert 1.0 <= found.routed(1) <= 2.0
    assert Busiest(MoE(256, 8, 1), 256, skew=1.0).routed(1) == 1.0


def test_skew_is_the_load_of_the_busiest_in_the_long_run() -> None:
    even, skewed = (Busiest(MoE(256, 8, 1), 8, skew=one) for one in (1.0, 1.5))
    assert even.routed(1e8) == pytest.approx(1e8, rel=1e-3)
    assert skewed.routed(1e8) == pytest.approx(1.5e8, rel=1e-3)
    assert Busiest(MoE(8, 2, 1), 8, skew=100.0).routed(10) == 10.0  # each token goes there once


def test_one_gpu_has_all_experts_and_no_chance() -> None:
    found = Busiest(MoE(8, 2, 1), 1, skew=1.0)
    assert found.routed(5) == 10.0
    assert found.unchosen(5) == pytest.approx(0.75**5)


# Times, by hand


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


def test_a_prompt_is_computed_by_its_group_and_its_experts_by_all() -> None:
    told = ideal(DEEPSEEK).explain(plan(4096))
    whole, rate = DEEPSEEK.model, 1978.9e12  # products in 8 bits
    expert = 2 * LAYERS * EXPERT
    routed = Busiest(MoE(256, 8, 1), 8, 1.0).routed(4096)
    assert routed == pytest.approx(4096, rel=0.03)
    flop = 4096 * (whole.flop_per_token - 8 * expert) + routed * expert
    head = whole.flop_per_sample / 989.4e12
    assert seconds(told, "matrix products") == pytest.approx(flop / rate + head)
    pairs = 4096 * 4097 / 2 * whole.prefill_pair_flop
    assert seconds(told, "attention") == pytest.approx(pairs / 989.4e12)
    eight = ideal(DEEPSEEK).explain(plan(*[4096] * 8))  # each group has one of its own
    assert seconds(eight, "attention") == pytest.approx(pairs / 989.4e12)


def test_each_choice_of_an_expert_elsewhere_travels_there_and_back() -> None:
    """7 of 8 experts are elsewhere; there in 8 bits, since products are, and back in 16."""
    told = ideal(DEEPSEEK).explain(plan(decodes=512, context=512))
    sent = 64 * 8 * 7 / 8 * 7168 * (1 + 2)
    assert seconds(told, "all-to-all") == pytest.approx(LAYERS * (sent / 450e9 + 2 * 18e-6))
    shared = ideal(replica("mixtral-8x7b", "h100", tensor_parallel=2, expert_parallel=2))
    told = shared.explain(plan(decodes=4, context=400))
    assert {"all-reduce"} == {term.name for term in told.terms if term.bound == "interconnect"}


# What is refused


@pytest.mark.parametrize(
    ("name", "settings", "line"),
    [
        (
            "llama-2-7b",
            {"expert_parallel": 2},
            "expert_parallel=2: must be 1, for model=llama-2-7b ",
        ),
        (
            "mixtral-8x7b",
            {"expert_parallel": 3},
            "expert_parallel=3: must divide the 8 experts of ",
        ),
        (
            "mixtral-8x7b",
            {"expert_parallel": 2, "tensor_parallel": 4},
            "expert_parallel=2: must be a multiple of tensor_parallel=4",
        ),
        ("mixtral-8x7b", {"expert_parallel": 0}, "expert_parallel=0: must be a whole number of at"),
    ],
)
def test_impossible_deals_are_refused(name: str, settings: dict[str, int], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        replica(name, "h200", **settings)


def test_experts_beyond_a_node_need_a_network() -> None:
    with pytest.raises(ConfigError, match=r"^hardware\.network_gb_s=null: hardware=l40s needs it"):
        replica("qwen3-30b-a3b", "l40s", expert_parallel=16)


@pytest.mark.parametrize("skew", [0.5, "much", float("nan")])
def test_an_impossible_skew_is_refused(skew: float) -> None:
    with pytest.raises(ConfigError, match=r"^cost\.expert_skew="):
        Roofline(DEEPSEEK, expert_skew=skew)

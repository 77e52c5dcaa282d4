"""One description of a server: what is made of it, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from pagedsim.core import ConfigError, Scheduler, Unified
from pagedsim.server import ServerSpec
from policies.ordering import Priority
from policies.preemption import Cheapest


class Free:
    """Prices of nothing."""

    def recompute_seconds(self, tokens: int) -> float:
        return 0.0

    def swap_seconds(self, blocks: int) -> float:
        return 0.0


class Louder(Scheduler):
    """One that does more."""


def test_every_setting_reaches_the_scheduler() -> None:
    scheduler = ServerSpec(
        policy="priority",
        preemption="swap",
        batching="unified",
        max_seqs=5,
        max_batched_tokens=7,
        max_model_len=11,
        async_scheduling=True,
        memory="prefix",
        block_size=4,
        blocks=64,
        cpu_blocks=8,
    ).scheduler(Louder)
    assert type(scheduler) is Louder
    assert isinstance(scheduler.policy, Priority)
    assert isinstance(scheduler.batching, Unified)
    assert scheduler.preemption.swaps
    assert (scheduler.max_seqs, scheduler.max_batched_tokens, scheduler.max_model_len) == (5, 7, 11)
    assert scheduler.async_scheduling
    memory = scheduler.memory
    assert (memory.total, memory.block_size, memory.cpu_total) == (64, 4, 8)
    assert type(memory).__name__ == "PrefixMemory"


def test_reserved_memory_is_told_the_greatest_length() -> None:
    memory = ServerSpec(memory="reserved_max", blocks=64, max_model_len=16).make_memory()
    assert memory.longest == 16


def test_two_schedulers_share_nothing() -> None:
    spec = ServerSpec(blocks=4)
    first, second = spec.scheduler(), spec.scheduler()
    assert first.memory is not second.memory
    assert first.policy is not second.policy


@pytest.mark.parametrize("preemption", ["cheapest", Cheapest, "policies.preemption.Cheapest"])
def test_prices_go_to_who_weighs_them(preemption: Any) -> None:
    spec, prices = ServerSpec(preemption=preemption, blocks=4, cpu_blocks=4), Free()
    assert spec.weighs_prices
    known = spec.priced(prices)
    assert not known.weighs_prices
    assert known.may_swap
    found = known.scheduler().preemption
    assert isinstance(found, Cheapest)
    assert found.prices is prices
    other = ServerSpec(preemption="swap", blocks=4)
    assert other.priced(prices) is other


def test_who_was_told_no_prices_is_not_made() -> None:
    with pytest.raises(ConfigError, match=r"^preemption: needs its prices first$"):
        ServerSpec(preemption=Cheapest, blocks=4, cpu_blocks=4).scheduler()


def test_swaps_are_for_memory_that_can() -> None:
    assert ServerSpec(preemption="swap").may_swap
    assert not ServerSpec(preemption="recompute").may_swap
    assert not ServerSpec(preemption="swap", memory="reserved_max").may_swap


def test_sizes_go_to_a_file_and_back() -> None:
    spec = ServerSpec(max_seqs=3, blocks=9, cpu_blocks=0, kv_cache_dtype="fp8", policy="priority")
    assert ServerSpec(policy="priority").of_sizes({**spec.sizes(), "device": "CPU"}) == spec


def test_a_step_of_unified_has_a_token_for_every_sequence() -> None:
    assert ServerSpec(batching="unified", max_seqs=8, max_batched_tokens=8).step_tokens(4) == 8
    assert ServerSpec(batching="unified", max_seqs=3000, blocks=4).step_tokens(4) == 3000


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"max_seqs": 0}, "max_seqs=0: must be a whole number of at least 1"),
        ({"max_batched_tokens": 0}, "max_batched_tokens=0: must be a whole number of at least 1"),
        (
            {"batching": "unified", "max_seqs": 8, "max_batched_tokens": 7},
            "max_batched_tokens=7: must be at least max_seqs=8, so that a step has a token for",
        ),
        ({"max_model_len": 1.5}, "max_model_len=1.5: must be a whole number"),
        ({"blocks": 0}, "blocks=0: must be a whole number of at least 1"),
        ({"cpu_blocks": -1}, "cpu_blocks=-1: must be a whole number of at least 0"),
        ({"block_size": "many"}, "block_size='many': must be a whole number"),
        ({"swap_space_gib": "4"}, "swap_space_gib='4': must be a number"),
        (
            {"gpu_memory_utilization": 1.1},
            "gpu_memory_utilization=1.1: must be a number above 0, at most 1",
        ),
        ({"async_scheduling": 1}, "async_scheduling=1: must be true or false"),
        ({"tensor_parallel": 0}, "tensor_parallel=0: must be a whole number of at least 1"),
        ({"kv_layout": "row"}, "unknown kv_layout 'row': choose from block, layer"),
        ({"quantization": "gptq"}, "unknown quantization 'gptq': choose from fp8, int8"),
        ({"kv_cache_dtype": "fp4"}, "unknown kv_cache_dtype 'fp4': did you mean 'fp8'? "),
    ],
)
def test_what_no_server_has(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServerSpec(**settings)
    assert str(error.value).startswith(line)

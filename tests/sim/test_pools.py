"""The pools of servers: what they logged, and their rules by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pagedsim.core import ConfigError
from pagedsim.fidelity.rows import Row, read_rows
from pagedsim.sim.capacity import capacity
from pagedsim.sim.hardware import GIB
from pagedsim.sim.pools import POOLS, room
from tests.experiments.fidelity.kv_pools import TABLE, tokens
from tests.sim.shapes import hardware, replica

ROWS = read_rows(TABLE, "table")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.place.rpartition(":")[2])
def test_pools_are_those_that_servers_logged(row: Row) -> None:
    within = 0.01 if row.text("fitted") else 0.1
    assert tokens(row) == pytest.approx(row.number("tokens"), rel=within)


def test_the_usual_error_of_rows_that_nothing_was_fitted_to_is_small() -> None:
    others = [row for row in ROWS if not row.text("fitted")]
    errors = sorted(abs(tokens(row) / row.number("tokens") - 1) for row in others)
    assert len(others) >= 10
    assert errors[len(errors) // 2] < 0.03


# -- by hand ---------------------------------------------------------------------------------------


def test_a_small_step_peaks_in_the_sampler_and_a_long_one_in_a_layer() -> None:
    """Llama-2-7B: hidden 4096, MLP 11008, vocabulary 32000."""
    where = replica("llama-2-7b", "h100")
    short = room(where, pool="vllm-0.19", max_batched_tokens=1000, max_seqs=1000)
    assert short.activations == pytest.approx(
        {"hidden states": 1.25 * 1000 * 4096 * 2, "logits": 3.7 * 1000 * 32000 * 4}
    )
    long = room(where, pool="vllm-0.19", max_batched_tokens=8192, max_seqs=16)
    assert long.activations == {
        "residual stream and norm": 4 * 8192 * 4096 * 2,
        "MLP": 3 * 8192 * 11008 * 2,
    }
    left = 0.9 * 79.11 * GIB - where.weight_bytes - sum(long.activations.values()) - 0.25 * GIB
    assert long.kv_bytes == pytest.approx(left)
    assert long.blocks == left // where.block_bytes


def test_experts_keep_their_workspace_while_tokens_are_sampled() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts of width 768, hidden 2048, vocabulary 151936; vLLM 0.19
    measured 2.68 GiB at 8,192 tokens and 1,024 sequences (llm-d-planner's accuracy_report.md)."""
    found = room(replica("qwen3-30b-a3b", "h100"), max_batched_tokens=8192, max_seqs=1024)
    assert found.activations["experts"] == 8192 * 8 * (2048 + 768) * 2
    assert sum(found.activations.values()) == pytest.approx(2.68 * GIB, rel=0.1)


@pytest.mark.parametrize(
    ("name", "ways", "seqs", "gib"),
    [
        ("llama-3.1-8b", 1, 1024, 0.84),
        ("qwen2-7b", 1, 1024, 0.81),
        ("llama-3.1-70b", 2, 1024, 1.82),
        ("llama-3.1-70b", 4, 1024, 1.70),
    ],
)
def test_graphs_take_what_vllm_estimated(name: str, ways: int, seqs: int, gib: float) -> None:
    """Estimates logged by vLLM 0.19 on H100, which it does not yet subtract."""
    where = replica(name, "h100", tensor_parallel=ways)
    with_graphs, without = (
        room(where, pool=pool, max_seqs=seqs).reserved for pool in ("vllm-0.33", "vllm-0.19")
    )
    assert (with_graphs - without) / GIB == pytest.approx(gib, rel=0.07)


def test_sglang_keeps_by_gpu_what_its_rule_of_thumb_says() -> None:
    """In MiB of an H100: 512 + 1.5 × 8192 + 2 × 256 + 8 × 58 + 128 = 13,904 of 79.11 × 1024."""
    where = replica("llama-3.1-8b", "h100")
    found = room(where, pool="sglang-0.5")
    assert found.share == round(1 - 13_904 / (79.11 * 1024), 3) == 0.828
    free = (79.11 - 0.65) * GIB
    assert found.kv_bytes == pytest.approx(0.828 * free - where.weight_bytes)
    assert not found.activations  # in what is kept
    four = room(replica("llama-3.1-70b", "h100", tensor_parallel=4), pool="sglang-0.5")
    assert four.share == round(1 - (13_904 + 2 * 256 + 3 * 128) / (79.11 * 1024), 3)
    small = room(replica("qwen3-0.6b", "rtx4090"), pool="sglang-0.5").share
    assert small == round(1 - (512 + 1.5 * 2048 + 2 * 24 + 8 * 42 + 128) / (23.516 * 1024), 3)


def test_tensorrt_llm_takes_a_share_of_what_is_left() -> None:
    where = replica("llama-2-7b", "h100")
    found = room(where, pool="trtllm-1", max_batched_tokens=8192, max_seqs=16)
    left = (79.11 - 0.65) * GIB - where.weight_bytes - sum(found.activations.values())
    assert found.kv_bytes == pytest.approx(0.9 * left)


def test_what_is_set_replaces_what_the_server_takes() -> None:
    where = replica("llama-2-7b", "h100")
    for pool in POOLS:
        half = room(where, pool=pool, gpu_memory_utilization=0.5)
        assert half.share == 0.5
        assert half.kv_bytes < room(where, pool=pool, gpu_memory_utilization=0.8).kv_bytes
        more = room(where, pool=pool, gpu_memory_utilization=0.5, reserved_gib=3.0)
        assert more.reserved == 3 * GIB
        assert more.kv_bytes < half.kv_bytes


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", POOLS)
def test_a_gpu_that_is_too_small_is_told_by_how_much(pool: str) -> None:
    where = replica("llama-2-70b", "h100")
    with pytest.raises(ConfigError) as caught:
        capacity(where, pool=pool)
    line = str(caught.value)
    assert "\n" not in line
    assert "of 79.11 GiB with gpu_memory_utilization=0." in line
    assert re.search("smallest tensor_parallel that fits is [24]$", line)
    alone = replace(where, hardware=replace(hardware("h100"), gpus_per_node=1))
    with pytest.raises(ConfigError, match=r"with 1 it takes GPUs of 1[3-9]\d GiB$"):
        capacity(alone, pool=pool)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^unknown pool 'vllm-0.20': "):
        room(replica("llama-2-7b", "h100"), pool="vllm-0.20")

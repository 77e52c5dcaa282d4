"""What fits on a replica's GPUs, part by part, and what is said where it does not."""

from __future__ import annotations

import re
from dataclasses import replace
from math import nan
from typing import Any

import pytest

from pagedsim.core import ConfigError
from pagedsim.experiments.studies.estimate_arithmetic import weights
from pagedsim.server import ServerSpec
from pagedsim.sim.capacity import capacity, cpu_blocks
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.replica import Replica
from tests.sim.shapes import hardware, model, replica


def test_tensor_parallelism_divides_weights_and_heads() -> None:
    one, two = (replica("llama-2-7b", "a100-40gb", tensor_parallel=n) for n in (1, 2))
    assert two.weight_bytes == one.weight_bytes / 2
    assert two.block_bytes == one.block_bytes / 2
    found = [capacity(where) for where in (one, two)]
    left = [each.kv_bytes + each.activation_bytes for each in found]
    assert left[1] - left[0] == pytest.approx(one.weight_bytes / 2)
    # Few heads of keys and values are kept more than once, a compressed vector by every GPU.
    shape, gpu = model("qwen3-8b"), hardware("h100")  # 8 of them
    wide = Replica(shape, replace(gpu, gpus_per_node=16), tensor_parallel=16)
    assert wide.kv_share == Replica(shape, gpu, tensor_parallel=8).kv_share == 1 / 8
    where = replica("deepseek-v3", "h200", tensor_parallel=8)
    assert where.kv_bytes_per_token == 576 * 2 * 61


def test_blocks_are_those_that_vllm_found_on_a_4090() -> None:
    """vLLM 0.19: Llama-3.1-8B, 2,048 tokens and 256 sequences a step, 0.9 of the memory."""
    where = replica("llama-3.1-8b", "rtx4090")
    assert capacity(where).blocks == pytest.approx(2588, rel=0.03)


def test_a_model_too_large_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError) as caught:
        capacity(replica("llama-2-70b", "a100-80gb"))
    assert str(caught.value) == (
        "model=llama-2-70b does not fit hardware=a100-80gb with tensor_parallel=1: a GPU would "
        "hold 128.5 GiB of weights and 1.0 GiB of activations and other, and offers "
        "0.9 × 79.25 = 71.3 GiB; "
        "the smallest tensor_parallel that fits is 2"
    )
    assert capacity(replica("llama-2-70b", "a100-80gb", tensor_parallel=2)).blocks > 0


@pytest.mark.parametrize("utilization", [0.5, 0.9])
@pytest.mark.parametrize(
    ("name", "gpu"), [("llama-2-70b", "a100-40gb"), ("opt-66b", "a10"), ("deepseek-v3", "h100")]
)
def test_the_advised_size_is_the_smallest_that_fits(
    name: str, gpu: str, utilization: float
) -> None:
    card = hardware(gpu)

    def fits(tensor_parallel: int, card: Hardware) -> bool:
        try:
            capacity(
                Replica(model(name), card, tensor_parallel=tensor_parallel),
                gpu_memory_utilization=utilization,
            )
        except ConfigError:
            return False
        return True

    with pytest.raises(ConfigError) as caught:
        capacity(replica(name, gpu), gpu_memory_utilization=utilization)
    if enough := re.search(r"smallest tensor_parallel that fits is (\d+)", str(caught.value)):
        gpus = int(enough[1])
        assert next(n for n in (1, 2, 4, 8) if fits(n, card)) == gpus
    else:
        found = re.search(r"up to 8 fits; with 8 it takes GPUs of (\d+) GiB", str(caught.value))
        assert found
        assert not any(fits(n, card) for n in (1, 2, 4, 8))
        assert fits(8, replace(card, memory_gib=int(found[1])))
        assert not fits(8, replace(card, memory_gib=int(found[1]) - 1))


# -- parts of memory -------------------------------------------------------------------------------


def test_weights_of_llama_2_7b_by_hand() -> None:
    assert weights(model("llama-2-7b")) == {
        "attention": 32 * 4 * 4096 * 4096 * 2,
        "MLP": 32 * 3 * 4096 * 11008 * 2,
        "norms": 65 * 4096 * 2,
        "embeddings": 32000 * 4096 * 2,
        "LM head": 32000 * 4096 * 2,
    }
    assert weights(replace(model("llama-2-7b"), params=7e9)) == {"all": 14e9}


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization=0.0: must be a number above 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5: must be a number above 0"),
        ({"reserved_gib": nan}, "reserved_gib=nan: must be a number of at least 0"),
        ({"max_batched_tokens": 0}, "max_batched_tokens=0: must be a whole number of at least 1"),
        ({"max_seqs": 0}, "max_seqs=0: must be a whole number of at least 1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        capacity(replica("tiny", "a10"), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel": 16}, "tensor_parallel=16: must be at most gpus_per_node=8"),
        ({"tensor_parallel": 3}, "tensor_parallel=3: .*cannot be split so; choose from 1, 2, 4, 8"),
        ({"block_size": 0}, "block_size=0: must be a whole number of at least 1"),
        ({"kv_layout": "page"}, "kv_layout 'page': choose from block, layer"),
        ({"kv_cache_dtype": "fp16"}, "kv_cache_dtype 'fp16': choose from auto, fp8, fp8_e4m3, "),
    ],
)
def test_impossible_replicas_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replica("llama-2-7b", "a100-80gb", **settings)


def test_other_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"swap_space_gib=-1\.0: must be a number of"):
        cpu_blocks(replica("llama-2-7b", "a10"), -1.0)
    shape = replace(model("llama-2-7b"), params=7e9)  # without layers
    with pytest.raises(ConfigError, match=r"^quantization=int8: model=llama-2-7b has "):
        Replica.of(ServerSpec(quantization="int8"), shape, hardware("h200"))
    with pytest.raises(ConfigError) as caught:
        capacity(replica("llama-2-7b", "a100-80gb", block_size=10**6))
    assert str(caught.value) == (
        "block_size=1000000: one block takes 488.281 GiB, and 57.994 GiB are left of "
        "hardware=a100-80gb beside model=llama-2-7b"
    )

"""What fills a GPU's memory: parts that add up."""

from dataclasses import replace

import pytest

from pagedsim.sim.capacity import activation_bytes, activations, capacity
from pagedsim.sim.footprint import footprint, weights
from pagedsim.sim.replica import Replica
from tests.sim.shapes import MODELS, hardware, model, replica


@pytest.mark.parametrize("name", MODELS)
def test_weights_by_part_are_all_weights(name: str) -> None:
    found = weights(model(name))
    assert sum(found.values()) == pytest.approx(model(name).weight_bytes, rel=1e-12)
    assert ("experts" in found) == bool(model(name).moe)
    assert ("LM head" in found) != model(name).tied_embeddings


def test_weights_of_llama_2_7b_by_hand() -> None:
    assert weights(model("llama-2-7b")) == {
        "attention": 32 * 4 * 4096 * 4096 * 2,
        "MLP": 32 * 3 * 4096 * 11008 * 2,
        "norms": 65 * 4096 * 2,
        "embeddings": 32000 * 4096 * 2,
        "LM head": 32000 * 4096 * 2,
    }
    assert weights(replace(model("llama-2-7b"), params=7e9)) == {"all": 14e9}


def test_activations_of_llama_2_7b_by_hand() -> None:
    """In 16 bits: two vectors and three of the MLP's width a token; four float32 logits."""
    found = activations(model("llama-2-7b"), 2, 4096, 256)
    assert found == {
        "residual stream and norm": 4096 * 2 * 4096 * 2,
        "MLP": 4096 * 3 * 11008 / 2 * 2,
        "logits": 256 * 32000 * 16,
    }
    assert sum(found.values()) == activation_bytes(model("llama-2-7b"), 2, 4096, 256)


def test_the_widest_part_of_a_layer_may_be_attention() -> None:
    assert "attention" in activations(model("deepseek-v3"), 8, 4096, 256)


@pytest.mark.parametrize("gpus", [1, 2])
def test_what_is_left_holds_the_blocks(gpus: int) -> None:
    where = replica("llama-2-7b", "a100-80gb", tensor_parallel=gpus)
    found = capacity(where, gpu_memory_utilization=0.8)
    told = footprint(
        where,
        blocks=found.blocks,
        gpu_memory_utilization=0.8,
        reserved_gib=0.5,
        max_batched_tokens=2048,
        max_seqs=256,
    )
    assert told.left == pytest.approx(found.kv_bytes)
    assert told.blocks * told.block_bytes <= told.left < (told.blocks + 1) * told.block_bytes
    assert sum(told.weights.values()) == pytest.approx(where.weight_bytes)


def test_weights_of_experts_have_their_own_format() -> None:
    shape = model("mixtral-8x7b")
    assert shape.moe is not None
    halved = replace(shape, moe=replace(shape.moe, dtype_bytes=1.0))
    assert 2 * weights(halved)["experts"] == weights(shape)["experts"]
    assert weights(halved)["attention"] == weights(shape)["attention"]
    assert Replica(halved, hardware("h200")).weight_bytes < shape.weight_bytes

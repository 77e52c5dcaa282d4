"""The simulator's arithmetic and the engine agree on a model's weights and on its blocks."""

from __future__ import annotations

import copy

import pytest
import torch

from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.models import load_model
from pagedsim.engine.models.shaped import shaped_config
from pagedsim.sim.huggingface import read_shape
from tests.engine.models.architectures import reference

BLOCK = 4
NAMES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3")


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_those_of_the_simulator(name: str) -> None:
    model = copy.deepcopy(reference(name))
    shape = read_shape(model.config.to_dict(), name)
    # What the simulator leaves out of weights: biases, and norms inside of attention.
    counted = {
        parameter.data_ptr(): parameter.numel()
        for place, parameter in model.named_parameters()
        if parameter.dim() > 1 or place.endswith(("layernorm.weight", "model.norm.weight"))
        if "self_attn" not in place or parameter.dim() > 1
    }
    assert sum(counted.values()) == shape.weight_params

    engine = LLMEngine(model=model, device="cpu", block_size=BLOCK, blocks=8, max_seqs=2)
    assert engine.runner.model.native is not None
    cache = engine.runner.cache
    values = shape.kv_values_per_token * BLOCK
    assert cache.shape.block_bytes == values * torch.float32.itemsize
    assert cache.gpu.nbytes == 8 * cache.shape.block_bytes


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe", "deepseek-v3"])
def test_a_shape_makes_a_model_of_its_sizes(name: str) -> None:
    shape = read_shape(reference(name).config.to_dict(), name)
    assert load_model(shaped_config(shape)).native is not None
    made = read_shape(shaped_config(shape).to_dict(), name)
    assert made.weight_params == shape.weight_params
    assert made.kv_values_per_token == shape.kv_values_per_token
    assert (made.moe, made.mla) == (shape.moe, shape.mla)

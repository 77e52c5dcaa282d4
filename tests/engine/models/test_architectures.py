"""Every architecture computes through the paged cache what transformers computes for itself."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.models.shaped import shaped_config
from pagedsim.sim.huggingface import read_shape
from tests.engine.architectures import (
    CONFIGS,
    NATIVE,
    VOCAB,
    WINDOW,
    fresh,
    loaded,
    reference,
)
from tests.engine.models.serving import alone, equal, served, staggered, texts
from tests.sim.shapes import parameters

LENGTHS = (17, 1, 11)
DIGEST = "77db110af03f14723b12cd1b7e33e8f09cc82ff4958070665e4db98fede9b3a6"
"""Of names and weights; a change of it changes every recorded run of the tiny model."""
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_each_sequence_alone(name: str) -> None:
    """By auto, which is native for the families that it knows, and by transformers' own forward."""
    sequences = texts(LENGTHS, VOCAB)
    wanted = alone(reference(name), sequences)
    model = loaded(name)
    assert (model.native is not None) is (name in NATIVE)
    equal(served(model, sequences, staggered(LENGTHS)), wanted)
    if name in ("llama", "mixtral"):
        model = loaded(name, "transformers")
        assert model.native is None
        equal(served(model, sequences, staggered(LENGTHS)), wanted)


@pytest.mark.parametrize(
    ("name", "model_impl", "dtype"),
    [
        ("gemma2", "transformers", torch.bfloat16),
        *((name, "native", torch.bfloat16) for name in ("qwen3-moe", "deepseek-v3")),
        ("llama", "auto", torch.float16),
    ],
)
def test_half_precision(name: str, model_impl: str, dtype: torch.dtype) -> None:
    """Against transformers in the same precision, and no farther from float32 than that is."""
    model = load_model(fresh(name), dtype=dtype, model_impl=model_impl)
    assert model.dtype == dtype
    assert {parameter.dtype for parameter in model.module.parameters()} == {dtype}
    sequences = texts(LENGTHS, VOCAB)
    exact = torch.cat(alone(reference(name), sequences))
    module: Any = copy.deepcopy(model.module)
    module.set_attn_implementation("eager")
    theirs = torch.cat(alone(module, sequences)).float()
    ours = torch.cat(served(model, sequences, staggered(LENGTHS)))
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() <= 1.2 * (theirs - exact).abs().mean()


@pytest.mark.parametrize(
    ("name", "what", "by_layer"),
    [
        ("llama", "window", [None, None]),
        ("mistral", "window", [WINDOW, WINDOW]),
        ("phi3", "window", [WINDOW, WINDOW]),
        ("qwen2", "window", [None, WINDOW]),
        ("gemma2", "window", [WINDOW, None]),
        ("gemma2", "softcap", [3.0, 3.0]),
        ("gemma2", "scale", [11**-0.5, 11**-0.5]),
        ("granite", "scale", [0.2, 0.2]),
        ("gpt2", "scale", [8**-0.5, 8**-0.5 / 2]),
    ],
)
def test_what_attention_does_is_found_layer_by_layer(name: str, what: str, by_layer: Any) -> None:
    found = [getattr(layer, what) for layer in layers(loaded(name))]
    assert found == (by_layer if what == "window" else pytest.approx(by_layer))


def layers(model: LoadedModel) -> list:
    found = [vars(module).get("pagedsim_layer") for module in model.module.modules()]
    return sorted((layer for layer in found if layer), key=lambda layer: layer.number)


# Sizes: those of the attention, of the simulator and of conf/model/tiny.yaml


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3"])
def test_sizes_are_those_of_the_simulator(name: str) -> None:
    model = loaded(name, "native")
    shape = read_shape(reference(name).config.to_dict(), name)
    # What the simulator leaves out of weights: biases, and norms inside of attention.
    counted = {
        parameter.data_ptr(): parameter.numel()
        for place, parameter in reference(name).named_parameters()
        if parameter.dim() > 1 or place.endswith(("layernorm.weight", "model.norm.weight"))
        if "self_attn" not in place or parameter.dim() > 1
    }
    assert sum(counted.values()) == parameters(shape)

    engine = LLMEngine(model=model, device="cpu", block_size=4, blocks=8, max_seqs=2)
    cache = engine.runner.cache
    assert cache.shape.block_bytes == shape.kv_values_per_token * 4 * torch.float32.itemsize
    assert cache.gpu.nbytes == 8 * cache.shape.block_bytes
    assert (model.num_layers, model.num_kv_heads) == (2, 1 if shape.mla else 2)


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_a_shape_makes_a_model_of_its_sizes(name: str) -> None:
    shape = read_shape(reference(name).config.to_dict(), name)
    assert load_model(shaped_config(shape)).native is not None
    made = read_shape(shaped_config(shape).to_dict(), name)
    assert parameters(made) == parameters(shape)
    assert made.kv_values_per_token == shape.kv_values_per_token
    assert (made.moe, made.mla) == (shape.moe, shape.mla)


def test_the_tiny_model_is_the_same_everywhere_and_of_its_configured_shape() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model = load_model("tiny", seed=9, load_format="dummy")
    assert torch.equal(torch.get_rng_state(), state)
    digest = hashlib.sha256()
    for name, weight in model.module.named_parameters():
        digest.update(name.encode() + weight.numpy().tobytes())
    assert digest.hexdigest() == DIGEST
    shape, config = OmegaConf.load(ROOT / "conf/model/tiny.yaml"), model.config
    assert (model.name, model.architecture) == (shape.name, "LlamaForCausalLM")
    assert (model.num_layers, model.num_kv_heads) == (shape.layers, shape.kv_heads)
    assert (config.hidden_size, config.num_attention_heads) == (shape.hidden, shape.heads)
    assert (model.head_dim, config.intermediate_size) == (shape.head_dim, shape.intermediate)
    assert (model.vocab_size, model.max_model_len) == (shape.vocab, shape.max_model_len)
    assert model.eos_token_ids == (257,)
    rounded = load_model("tiny", dtype="bfloat16").module
    for one, other in zip(model.module.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(one.to(torch.bfloat16), other)

"""The model called tiny: identical everywhere, with the shape of conf/model/tiny.yaml."""

import copy
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from pagedsim.engine.models import load_model
from pagedsim.engine.models.weights import _uniform
from tests.engine.models.serving import alone, chunked, served, texts

DIGEST = "77db110af03f14723b12cd1b7e33e8f09cc82ff4958070665e4db98fede9b3a6"
"""Of names and weights; a change of it changes every recorded run of the tiny model."""

ROOT = Path(__file__).resolve().parents[3]


def test_the_shape_is_that_of_the_configuration_group() -> None:
    shape = OmegaConf.load(ROOT / "conf/model/tiny.yaml")
    model = load_model("tiny")
    config = model.config
    assert (model.name, model.architecture) == (shape.name, "LlamaForCausalLM")
    assert (model.num_layers, model.num_kv_heads) == (shape.layers, shape.kv_heads)
    assert (config.hidden_size, config.num_attention_heads) == (shape.hidden, shape.heads)
    assert (model.head_dim, config.intermediate_size) == (shape.head_dim, shape.intermediate)
    assert (model.vocab_size, model.max_model_len) == (shape.vocab, shape.max_model_len)
    assert sum(parameter.numel() for parameter in model.module.parameters()) == 3_164_416


def test_it_is_the_same_model_everywhere() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model = load_model("tiny", seed=9, load_format="dummy")
    assert torch.equal(torch.get_rng_state(), state)
    digest = hashlib.sha256()
    for name, weight in model.module.named_parameters():
        digest.update(name.encode() + weight.numpy().tobytes())
    assert digest.hexdigest() == DIGEST


def test_its_random_numbers_are_exact() -> None:
    """A product that is rounded once: nothing that two machines could do differently."""
    values = _uniform(np.random.PCG64(0), 1000, 0.25)
    assert values.dtype == np.float32
    assert np.array_equal(values * 2**25, np.round(values * 2**25))
    assert -0.25 <= values.min() < -0.24 < 0.24 < values.max() < 0.25


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_it_is_that_model_rounded(dtype: str) -> None:
    exact, rounded = load_model("tiny").module, load_model("tiny", dtype=dtype).module
    for one, other in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(one.to(other.dtype), other)


def test_it_ends_with_257_and_its_attention_is_no_mean() -> None:
    """So that a mistake in the cache shows in the tokens."""
    model = load_model("tiny")
    assert model.eos_token_ids == (257,)
    module = copy.deepcopy(model.module)
    module.set_attn_implementation("eager")  # type: ignore[operator]
    tokens = texts([40], 512)
    with torch.no_grad():
        (wanted,) = alone(module, tokens)
        swapped = tokens[0].clone()
        swapped[[3, 20]] = swapped[[20, 3]]
        (other,) = alone(module, [swapped])
    (got,) = served(model, tokens, chunked([40], 13))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert (other[-1] - wanted[-1]).abs().max() > 0.1

"""Models that cannot be served are found out, whatever they are called."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from pagedsim.core.errors import ConfigError
from pagedsim.engine.models import load_model, weights
from pagedsim.engine.models.load import REACH
from pagedsim.engine.models.probe import MaskFunction, Refusal, window_of
from tests.engine.architectures import SHAPE, fresh

GPT: dict[str, Any] = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

ELSEWHERE = "its attention does not go through transformers' AttentionInterface"
APART = "its tokens reach each other outside of attention"

REFUSED = {
    "GPTJForCausalLM": (lambda: transformers.GPTJConfig(**GPT, rotary_dim=4), ELSEWHERE),
    "MambaForCausalLM": (
        lambda: transformers.MambaConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4
        ),
        ELSEWHERE,
    ),
    "JambaForCausalLM": (
        lambda: transformers.JambaConfig(
            **SHAPE, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4
        ),
        APART,
    ),
    "GptOssForCausalLM": (
        lambda: transformers.GptOssConfig(
            **SHAPE,
            num_local_experts=2,
            num_experts_per_tok=1,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        "its attention takes s_aux, which the kernels do not know",
    ),
    "DeepseekV3ForCausalLM": (
        lambda: transformers.DeepseekV3Config(
            **SHAPE | {"num_key_value_heads": 4, "scoring_func": "softmax"}
        ),
        "its keys have 192 dimensions and its values 128, and the native decoder does not take it: "
        "its experts have scoring_func=softmax, not sigmoid",
    ),
    "Llama4ForCausalLM": (
        lambda: transformers.Llama4TextConfig(**SHAPE),
        "its attention's mask is no plain function of two positions",
    ),
    "BertLMHeadModel": (
        lambda: transformers.BertConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64,
        ),
        "its attention's mask is neither causal nor a sliding window",
    ),
    "T5Config": (lambda: transformers.T5Config(), "it is an encoder-decoder"),
    "ViTConfig": (
        lambda: transformers.ViTConfig(),
        "transformers has no causal language model of its type",
    ),
}  # fmt: skip


@pytest.mark.parametrize("architecture", REFUSED)
def test_an_architecture_that_cannot_be_reached(architecture: str) -> None:
    make, why = REFUSED[architecture]
    config = make()
    with pytest.raises(ConfigError) as caught:
        load_model(config, max_model_len=64)
    name = type(config).__name__
    assert str(caught.value) == f"model={name}: {architecture} cannot be served: {why}; {REACH}"


def test_it_is_found_out_before_weights_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(weights, "random")
    with pytest.raises(ConfigError, match="GPTJForCausalLM cannot be served"):
        load_model(transformers.GPTJConfig(**GPT, rotary_dim=4))


class Shift(nn.Module):
    """A layer's input with a little of the token before it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shifted: torch.Tensor = self.inner(hidden + 1e-3 * hidden.roll(1, dims=1))
        return shifted


def test_a_model_that_looks_back_on_its_own() -> None:
    model = fresh("llama")
    model.model.layers[1].mlp = Shift(model.model.layers[1].mlp)
    with pytest.raises(ConfigError, match=APART):
        load_model(model)
    assert model.config._attn_implementation == "eager"  # as before


def test_a_layer_that_does_not_attend() -> None:
    model = fresh("llama")
    model.config.num_hidden_layers = 3
    with pytest.raises(ConfigError, match="2 of its 3 layers attend, in 2 calls"):
        load_model(model)


# The window that a mask function amounts to.


def causal(_: Any, __: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k <= q


def sliding(width: int) -> MaskFunction:
    return lambda _, __, q, k: (k <= q) & (k > q - width)


def test_windows() -> None:
    for length in (1, 2, 3, 10, 4096):
        assert window_of(causal, length) is None
    for width in (1, 2, 7, 99):
        assert window_of(sliding(width), 100) == width
        assert window_of(sliding(width), width) is None


@pytest.mark.parametrize(
    "mask",
    [
        lambda _, __, q, k: k <= q + 1,
        lambda _, __, q, k: k >= 0,
        lambda _, __, q, k: k < q,
        lambda _, __, q, k: (k <= q) & (k // 16 == q // 16),
        lambda _, __, q, k: (k <= q) & ((k > q - 9) | (k == 0)),
        lambda _, __, q, k: (k <= q) & ((q - k) % 2 == 0),
    ],
    ids=["ahead", "all", "behind", "chunks", "a sink", "dilated"],
)
def test_other_masks_are_refused(mask: MaskFunction) -> None:
    with pytest.raises(Refusal, match="neither causal nor a sliding window"):
        window_of(mask, 100)

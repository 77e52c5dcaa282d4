"""The native decoder: whatever the configuration, it computes what transformers computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pagedsim.core.errors import ConfigError
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.models.native.decoder import MLP, Experts, GroupedQuery, Latent, Rotation
from tests.engine.architectures import CONFIGS, SHAPE, VOCAB, build, fresh, loaded, reference
from tests.engine.models.serving import alone, equal, served, staggered, texts

LENGTHS = (17, 1, 11)
DENSE = ("llama", "mistral", "qwen2", "qwen3")
FAMILIES = (*DENSE, "mixtral", "qwen3-moe", "deepseek-v3")
EVERY = [seed if seed < 1 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(6)]


@pytest.mark.parametrize("seed", EVERY)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_configuration(family: str, seed: int) -> None:
    config = drawn(family, Random(seed))
    theirs = build(config)
    sequences = texts(LENGTHS, VOCAB, seed)
    wanted = alone(theirs, sequences)
    model = load_model(copy.deepcopy(theirs), model_impl="native")
    equal(served(model, sequences, staggered(LENGTHS)), wanted)


def drawn(family: str, rng: Random) -> PreTrainedConfig:
    """A configuration of a family: heads, biases, windows, rotary scaling, ties, as they fall."""
    kv_heads, group, dim = rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 5)), 2 * rng.randint(2, 11)
    layers = rng.randint(1, 3)
    shape = SHAPE | {
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "hidden_size": kv_heads * group * rng.choice((4, 6, 8)),
        "intermediate_size": rng.choice((7, 48, 65)),
        "tie_word_embeddings": rng.random() < 0.5,
        "rms_norm_eps": rng.choice((1e-6, 1e-2)),
        "rope_parameters": rng.choice(ropes(dim)),
    }
    some = [rng.random() < 0.5 for _ in range(2)]
    if family == "llama":
        return LlamaConfig(**shape, attention_bias=some[0], mlp_bias=some[1])
    if family == "mistral":
        return MistralConfig(**shape, sliding_window=rng.choice((None, 1, 9)))
    experts: dict[str, Any] = shape | {  # transformers' own product takes but multiples of 16 bytes
        "hidden_size": kv_heads * group * 8,
        "intermediate_size": rng.choice((8, 64)),
        "num_experts_per_tok": rng.choice((1, 2, 3)),
    }
    if family == "mixtral":
        experts["num_local_experts"] = rng.choice((3, 8))
        return MixtralConfig(**experts, sliding_window=rng.choice((None, 9)))
    if family == "deepseek-v3":
        groups = rng.choice((1, 2, 3))
        return DeepseekV3Config(
            **experts
            | {
                "num_key_value_heads": kv_heads * group,
                "rope_parameters": rng.choice(ropes(dim, mscale=rng.choice((0.0, 0.5)))),
            },
            q_lora_rank=rng.choice((None, 8, 28)),
            kv_lora_rank=rng.choice((8, 20)),
            qk_nope_head_dim=rng.choice((4, 8)),
            qk_rope_head_dim=dim,
            v_head_dim=rng.choice((4, dim + 8)),  # with 8 dims not rotated: as many as a key
            rope_interleave=rng.random() < 0.5,
            n_routed_experts=3 * groups,
            n_group=groups,
            topk_group=rng.randint(1, groups),
            n_shared_experts=rng.choice((1, 2)),
            first_k_dense_replace=rng.randint(0, 2),
            moe_intermediate_size=rng.choice((8, 32)),
            norm_topk_prob=some[0],
            attention_bias=some[1],
        )
    if family == "qwen3-moe":
        return Qwen3MoeConfig(
            **experts,
            num_experts=rng.choice((4, 9)),
            moe_intermediate_size=rng.choice((8, 32)),
            norm_topk_prob=some[0],
            attention_bias=some[1],
            decoder_sparse_step=rng.choice((1, 2)),
            sliding_window=9,
            use_sliding_window=rng.random() < 0.5,
        )
    windows: dict[str, Any] = {
        "use_sliding_window": some[0],
        "sliding_window": rng.choice((1, 9)),
        "layer_types": rng.choices(["full_attention", "sliding_attention"], k=layers)
        if some[0]
        else None,
    }
    if family == "qwen2":
        return Qwen2Config(**shape, **windows)
    return Qwen3Config(**shape, **windows, attention_bias=some[1])


def ropes(dim: int, mscale: float = 0.0) -> list[dict[str, Any]]:
    """Every kind of rotary scaling that these families have; `mscale` scales DeepSeek's scores."""
    short = [1 + i / 10 for i in range(dim // 2)]
    before = {"original_max_position_embeddings": 32}
    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 3.0},
        "dynamic": {"factor": 2.0},
        "yarn": {"factor": 4.0, **before, **({"mscale_all_dim": mscale} if mscale else {})},
        "longrope": {"short_factor": short, "long_factor": short[::-1], "factor": 2.0, **before},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **before},
    }
    return [{"rope_type": kind, "rope_theta": 1e3, **rest} for kind, rest in kinds.items()]


# Its weights are the module's.


def storages(model: LoadedModel) -> dict[int, int]:
    """Where the weights of a model lie, and how many bytes there are."""
    native = model.native
    assert native is not None
    layers: list[torch.Tensor] = []
    for layer in native._layers:
        attention = layer.attention
        assert isinstance(attention, GroupedQuery | Latent)
        feed = layer.feed_forward
        assert isinstance(feed, MLP | Experts)
        packed = feed.gate_up.weight if isinstance(feed, MLP) else feed.gate_up
        first = attention.qkv if isinstance(attention, GroupedQuery) else attention.down
        layers += [first.weight, packed]
    parts = [part.untyped_storage() for part in [*model.module.parameters(), *layers]]
    return {part.data_ptr(): part.nbytes() for part in parts}


@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe", "deepseek-v3"])
def test_packing_takes_no_memory(name: str) -> None:
    model = loaded(name, "native")
    weights = sum(weight.nbytes for weight in model.module.parameters())
    assert sum(storages(model).values()) == weights
    assert {n: w.tolist() for n, w in model.module.state_dict().items()} == {
        n: w.tolist() for n, w in reference(name).state_dict().items()
    }


def test_a_native_decoder_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Rotation.of

    def wrong(self: Rotation, positions: torch.Tensor) -> Any:
        return right(self, positions + (positions > 3))

    monkeypatch.setattr(Rotation, "of", wrong)
    with pytest.raises(ConfigError, match=r"differ from transformers' own by \d+\.\d\d%"):
        load_model(CONFIGS["llama"](), model_impl="native")


# What it does not know, it leaves to transformers, or refuses.


class Quantised(nn.Linear):
    """A projection that is not what it seems."""


class Mine(LlamaForCausalLM):
    """A model that may do anything."""


KNOWN = (
    "it is none of transformers' LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, "
    "Qwen3ForCausalLM, MixtralForCausalLM, Qwen3MoeForCausalLM and DeepseekV3ForCausalLM"
)


def unchanged(layer: Any) -> None: ...


UNKNOWN: list[tuple[Callable[[], Any], Callable[[Any], object], str]] = [
    (lambda: fresh("olmo2"), unchanged, KNOWN),
    (lambda: Mine(CONFIGS["llama"]()).eval(), unchanged, KNOWN),
    (
        lambda: build(LlamaConfig(**SHAPE, hidden_act="gelu")),
        unchanged,
        "its MLP has hidden_act=gelu, not silu",
    ),
    (
        lambda: fresh("qwen2"),
        lambda layer: setattr(layer.mlp, "down_proj", Quantised(48, 32, bias=False)),
        "its model.layers.1.mlp.down_proj is a Quantised",
    ),
    (
        lambda: fresh("llama"),
        lambda layer: layer.mlp.register_forward_hook(lambda *_: None),
        "its model.layers.1.mlp was changed from outside",
    ),
    (
        lambda: fresh("llama"),
        lambda layer: setattr(layer.mlp, "forward", layer.mlp.forward),
        "its model.layers.1.mlp was changed from outside",
    ),
    (
        lambda: fresh("qwen2"),
        lambda layer: setattr(layer.self_attn.k_proj, "bias", None),
        "its weights are not those that its configuration makes",
    ),
]


@pytest.mark.parametrize(("make", "change", "why"), UNKNOWN)
def test_what_native_does_not_know(
    make: Callable[[], Any], change: Callable[[Any], object], why: str
) -> None:
    model = make()
    change(model.model.layers[1])
    name = type(model).__name__
    with pytest.raises(ConfigError) as caught:
        load_model(model, model_impl="native")
    assert str(caught.value) == (
        f"model_impl=native: model={name}: {why}; auto takes transformers for it"
    )
    assert load_model(model).native is None

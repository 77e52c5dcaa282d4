"""Keys, values and weights in 8 bits: half the bytes, and the tokens of transformers' generate with
the same rounding, whatever the scheduler does to a request.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch

from pagedsim.core import ConfigError
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.models import quantization
from pagedsim.engine.models.quantization import LARGEST, EightBit, check_quantization
from pagedsim.kernels.float8 import FORMATS, rounded
from tests.engine.architectures import fresh, loaded
from tests.engine.test_equality import (
    BLOCKS,
    generated,
    served,
    small,
    tokens,
    total,
)
from tests.engine.test_equality import wanted as wanted_in_full

FORMS = pytest.mark.parametrize("form", sorted(LARGEST))
STEP = {"int8": 1 / 254, "fp8": 1 / 28}
"""The largest error of a weight, as a part of the largest of its output: half a step of 1/127, and
of four bits where e4m3 is coarsest, between 256 and 448."""

# Keys and values


@cache
def wanted(name: str, form: str) -> list[list[int]]:
    """What transformers generates where keys and values are rounded."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(module: Any, q: torch.Tensor, *rest: Any, **named: Any) -> Any:
        k, v = (rounded(one, FORMATS[form]).to(q.dtype) for one in rest[:2])
        return sdpa_attention_forward(module, q, k, v, *rest[2:], **named)

    AttentionInterface.register(form, attention)
    AttentionMaskInterface.register(form, sdpa_mask)
    theirs = fresh(name)
    theirs.set_attn_implementation(form)
    return generated(theirs)


@pytest.mark.parametrize(
    ("name", "form", "batching", "memory", "preemption"),
    [
        ("llama", "fp8_e4m3", "prefill_first", "paged", "recompute"),
        ("llama", "fp8_e5m2", "unified", "prefix", "swap"),
        ("mistral", "fp8_e5m2", "static", "paged", "recompute"),
        ("gpt2", "fp8_e4m3", "unified", "paged", "swap"),
    ],
)
def test_tokens_with_rounded_keys_and_values(
    name: str, form: str, batching: str, memory: str, preemption: str
) -> None:
    engine = small(
        name, kv_cache_dtype=form, batching=batching, memory=memory, preemption=preemption,
        max_seqs=6,
    )  # fmt: skip
    outputs = served(engine)
    assert tokens(outputs) == wanted(name, form) != wanted_in_full(name)
    assert total(outputs, "preemptions") > 0
    assert (total(outputs, "swapped_blocks") > 0) == (preemption == "swap")
    assert engine.runner.cache.gpu.dtype == engine.runner.cache.cpu.dtype == FORMATS[form]
    if memory == "prefix":
        again = served(engine)
        assert tokens(again) == wanted(name, form) and total(again, "cached_tokens") > 0


def test_formats_that_are_refused() -> None:
    for name in ("fp16", None):
        with pytest.raises(ConfigError, match="kv_cache_dtype") as caught:
            small("llama", kv_cache_dtype=name)
        assert "choose from auto, fp8, fp8_e4m3, fp8_e5m2" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        small("deepseek-v3", kv_cache_dtype="fp8")
    assert str(caught.value) == (
        "kv_cache_dtype=fp8: model=DeepseekV3ForCausalLM has compressed keys and values, which "
        "are kept in its own dtype alone; choose auto"
    )


# Weights


def plain(module: Any) -> Any:
    """The module with the weights that its 8 bits stand for."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, EightBit):
                linear = torch.nn.Linear(child.in_features, child.out_features, bias=False)
                linear.weight.data, linear.bias = child.plain(torch.float32), child.bias
                setattr(parent, name, linear)
    return module


@FORMS
def test_weights_are_near_those_that_they_were(form: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 48) * torch.logspace(-3, 3, 64)[:, None]
    weight[7] = 0
    bits, scale = quantization.rounded(weight, form)
    off = (bits.float() * scale[:, None] - weight).abs().amax(1)
    assert bits.element_size() == 1 and scale.dtype == torch.float32
    assert bool((off <= STEP[form] * weight.abs().amax(1) * (1 + 1e-6)).all())
    assert bits.float().abs().amax() == LARGEST[form]


@pytest.mark.parametrize(
    ("name", "form"), [("llama", "int8"), ("mistral", "fp8"), ("qwen3", "int8")]
)
def test_tokens_are_those_of_the_weights_that_they_stand_for(name: str, form: str) -> None:
    model = loaded(name, quantization=form)
    layers: Any = model.module
    assert {weight.element_size() for weight in layers.model.layers.parameters()} == {1, 4}
    theirs = plain(deepcopy(model.module))
    theirs.set_attn_implementation("sdpa")
    engine = LLMEngine(model=model, device="cpu", blocks=BLOCKS, block_size=4, max_model_len=30)
    assert tokens(served(engine)) == generated(theirs)


@pytest.mark.parametrize(
    ("model", "settings", "line"),
    [
        ("tiny", {"quantization": "awq"}, "unknown quantization 'awq': choose from fp8, int8"),
        (
            "tiny",
            {"quantization": "int8", "model_impl": "transformers"},
            "quantization=int8: model=tiny: model_impl=transformers; only the native decoder has "
            "weights in 8 bits, and for these families alone",
        ),
        ("gpt2", {"quantization": "fp8"}, "quantization=fp8: model=GPT2LMHeadModel: it is none"),
    ],
)
def test_weights_that_are_refused(model: str, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLMEngine(model=model if model == "tiny" else fresh(model), device="cpu", **settings)
    assert str(caught.value).startswith(line)


def test_float8_where_a_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    check_quantization("int8", device)
    with pytest.raises(ConfigError, match=r"^quantization=fp8: NVIDIA A100 has no float8; choose"):
        check_quantization("fp8", device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_quantization("fp8", device)

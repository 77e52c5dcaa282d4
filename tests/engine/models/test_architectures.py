"""Every architecture computes through the paged cache what transformers computes for itself."""

import copy
from functools import cache
from typing import Any

import pytest
import torch

from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.kernels.batch import AttentionBatch
from tests.engine.models.architectures import CONFIGS, VOCAB, WINDOW, build, reference
from tests.engine.models.serving import (
    Schedule,
    alone,
    chunked,
    decoded,
    served,
    staggered,
    texts,
    whole,
)

LENGTHS = (23, 1, 14, 30)
SCHEDULES = {
    "whole": whole(LENGTHS),
    "chunks": chunked(LENGTHS, 5),
    "decodes": decoded(LENGTHS, 7),
    "staggered": staggered(LENGTHS),
}


NATIVE = (
    *("llama", "llama-3.1", "llama-yarn", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe"),
    "deepseek-v3",
)
ALONE = ("deepseek-v3",)
"""What only the native decoder takes."""
BOTH = [
    *((name, "transformers") for name in CONFIGS if name not in ALONE),
    *((name, "native") for name in NATIVE),
]


@cache
def loaded(name: str, model_impl: str = "auto") -> LoadedModel:
    return load_model(copy.deepcopy(reference(name)), model_impl=model_impl)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(("name", "model_impl"), BOTH)
def test_logits_are_those_of_each_sequence_alone(
    name: str, model_impl: str, schedule: Schedule
) -> None:
    sequences = texts(LENGTHS, VOCAB)
    wanted = alone(reference(name), sequences)
    model = loaded(name, model_impl)
    for one, other in zip(served(model, sequences, schedule), wanted, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize("name", CONFIGS)
def test_auto_is_native_for_the_families_that_it_knows(name: str) -> None:
    assert (loaded(name).native is not None) is (name in NATIVE)
    if name not in ALONE:
        assert loaded(name, "transformers").native is None


@pytest.mark.parametrize("block_size", [1, 3, 16, 21])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_any_block_size(name: str, block_size: int) -> None:
    sequences = texts(LENGTHS, VOCAB, seed=1)
    wanted = alone(reference(name), sequences)
    got = served(loaded(name), sequences, SCHEDULES["staggered"], block_size=block_size)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "model_impl"),
    [
        *((name, "transformers") for name in ("llama", "gemma2", "opt", "gpt-neox")),
        *((name, "native") for name in ("llama", "qwen2", "qwen3", "mixtral", "qwen3-moe", *ALONE)),
    ],
)
def test_half_precision(name: str, model_impl: str, dtype: torch.dtype) -> None:
    """Against transformers in the same precision, and no farther from float32 than that is."""
    model = load_model(copy.deepcopy(reference(name)), dtype=dtype, model_impl=model_impl)
    assert model.dtype == dtype
    assert {parameter.dtype for parameter in model.module.parameters()} == {dtype}
    sequences = texts(LENGTHS, VOCAB)
    exact = torch.cat(alone(reference(name), sequences))
    module: Any = copy.deepcopy(model.module)
    module.set_attn_implementation("eager")
    theirs = torch.cat(alone(module, sequences)).float()
    ours = torch.cat(served(model, sequences, SCHEDULES["staggered"]))
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() <= 1.2 * (theirs - exact).abs().mean()


WINDOWS = {
    "llama": [None] * 3,
    "mistral": [WINDOW] * 3,
    "phi3": [WINDOW] * 3,
    "qwen2": [None, WINDOW, WINDOW],
    "gemma2": [WINDOW, None, WINDOW],
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_found_layer_by_layer(name: str) -> None:
    assert [layer.window for layer in layers(loaded(name))] == WINDOWS[name]


def test_a_window_that_hides_nothing_is_left_out() -> None:
    model = load_model(copy.deepcopy(reference("mistral")), max_model_len=WINDOW)
    assert [layer.window for layer in layers(model)] == [None] * 3
    model = load_model(copy.deepcopy(reference("mistral")), max_model_len=WINDOW + 1)
    assert [layer.window for layer in layers(model)] == [WINDOW] * 3


def test_scales_and_soft_caps_are_found() -> None:
    assert [layer.softcap for layer in layers(loaded("gemma2"))] == [3.0] * 3
    assert [layer.scale for layer in layers(loaded("gemma2"))] == [11**-0.5] * 3
    assert [layer.scale for layer in layers(loaded("granite"))] == [0.2] * 3
    by_layer = [8**-0.5 / number for number in (1, 2, 3)]
    assert [layer.scale for layer in layers(loaded("gpt2"))] == pytest.approx(by_layer)


@pytest.mark.parametrize(
    ("setting", "off"), [("attn_logit_softcapping", None), ("sliding_window", 1000)]
)
def test_what_gemma2_does_with_scores_matters_here(setting: str, off: int | None) -> None:
    """Or the tests above would pass without it."""
    config = CONFIGS["gemma2"]()
    setattr(config, setting, off)
    sequences = texts(LENGTHS, VOCAB)
    with_it = torch.cat(alone(reference("gemma2"), sequences))
    without = torch.cat(alone(build(config), sequences))
    assert (with_it - without).abs().max() > 0.05 * with_it.abs().max()


def test_shapes_are_those_of_the_attention() -> None:
    shape = [(m.num_layers, m.num_kv_heads, m.head_dim) for m in map(loaded, ("llama", "gpt2"))]
    assert shape == [(3, 2, 12), (3, 4, 8)]
    cache = loaded("llama").new_cache(5, 16)
    assert cache.shape == (5, 3, 2, 16, 2, 12)
    assert cache.dtype == torch.float32


@pytest.mark.parametrize("model_impl", ["transformers", "native"])
def test_logits_of_some_tokens_or_none(model_impl: str) -> None:
    model = loaded("llama", model_impl)
    (tokens,) = texts([9], VOCAB)
    (wanted,) = alone(reference("llama"), [tokens])

    def some(at: list[int]) -> torch.Tensor:
        batch = AttentionBatch.build([[0, 1, 2]], [0], [9], block_size=4)
        rows = torch.tensor(at, dtype=torch.int64)
        return model.forward(tokens, torch.arange(9), batch, model.new_cache(3, 4), rows)

    torch.testing.assert_close(some([8, 2]), wanted[[8, 2]], rtol=1e-4, atol=1e-4)
    assert some([]).shape == (0, VOCAB)


def test_two_models_do_not_meet() -> None:
    """The same step, computed by turns in two models of different depth and precision."""
    sequences = texts(LENGTHS, VOCAB)
    first, second = loaded("llama"), loaded("gpt2")
    before = torch.cat(served(first, sequences, SCHEDULES["chunks"]))
    served(second, sequences, SCHEDULES["whole"])
    assert torch.equal(torch.cat(served(first, sequences, SCHEDULES["chunks"])), before)


def layers(model: LoadedModel) -> list:
    found = [vars(module).get("pagedsim_layer") for module in model.module.modules()]
    return sorted((layer for layer in found if layer), key=lambda layer: layer.number)

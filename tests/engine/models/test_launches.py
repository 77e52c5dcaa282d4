"""What the native decoder launches for a layer of a decode step on a GPU, counted without one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.models.native import decoder
from pagedsim.kernels import ops as kernels
from pagedsim.kernels.batch import AttentionBatch
from tests.engine.models.architectures import CONFIGS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

TOKENS = 3
LAYERS = (2, 3)


class Operations(TorchDispatchMode):
    """Keeps the names of torch's operations that compute something."""

    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self.launched = launched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(arg.alias_info and not arg.alias_info.is_write for arg in func._schema.returns)
        if not views and "empty" not in func.__name__:
            self.launched.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears stay as they are on a GPU."""
    monkeypatch.setattr(decoder, "on_host", lambda part, copies: part)


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """As on a GPU, but Triton's kernels are only named."""
    from triton.runtime.jit import JITFunction

    launched: list[str] = []

    def name(self: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: launched.append(self.fn.__name__)

    with monkeypatch.context() as patched:
        patched.setattr(kernels, "on_gpu", lambda tensor: True)
        patched.setattr(JITFunction, "__getitem__", name)
        with Operations(launched):
            yield launched


def launched(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a decode step of three sequences launches."""
    tables, lengths = [[0], [1], [2]], [4, 2, 7]
    batch = AttentionBatch.build(tables, lengths, [1] * TOKENS, block_size=16)
    cache = model.new_cache(num_blocks=3, block_size=16)
    ids, rows = torch.zeros(TOKENS, dtype=torch.int64), torch.arange(TOKENS)
    positions = torch.tensor(lengths)
    with launches(monkeypatch) as names:
        model.forward(ids, positions, batch, cache, rows)
    return names


def of_a_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a layer takes: by so much does one more of them add to a step."""
    steps = []
    for layers in LAYERS:
        config: Any = CONFIGS[name]()
        config.num_hidden_layers = layers
        if hasattr(config, "layer_types"):
            config.layer_types = ["full_attention"] * layers
        if hasattr(config, "mlp_only_layers"):
            config.mlp_only_layers = []
        model = load_model(config, model_impl="native")
        steps.append(launched(model, monkeypatch))
    less, more = steps
    first = next(i for i, (one, other) in enumerate(zip(less, more, strict=False)) if one != other)
    return more[first : first + len(more) - len(less)]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_six_for_a_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = of_a_layer(name, monkeypatch)
    assert sorted(layer) == sorted(["_product"] * 4 + ["_rotate", "_decode"])


def test_nine_where_tokens_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FEW", TOKENS - 1)
    layer = of_a_layer("llama", monkeypatch)
    assert sorted(layer) == sorted(["mm"] * 4 + ["_norm"] * 2 + ["_rotate", "_decode", "_silu_mul"])


EXPERTS = ["_norm", "mm", "_route", "_list", "_up", "_down", "_sum"]
"""A router, and two products over tokens sorted by expert."""


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_twelve_with_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = ["_norm", "mm", "_rotate", "_decode", "_product"]
    assert sorted(of_a_layer(name, monkeypatch)) == sorted(attention + EXPERTS)


def test_twenty_with_compressed_keys_and_shared_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    absorbed = ["_compress", "bmm", "_latent", "_merge", "bmm", "_product"]
    attention = ["_norm", "mm", "_norm", "mm", *absorbed]
    layer = of_a_layer("deepseek-v3", monkeypatch)
    assert sorted(layer) == sorted([*attention, *EXPERTS, "mm", "_silu_mul", "mm"])


def test_what_a_step_launches_beside_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = CONFIGS["llama"]()
    config.num_hidden_layers = 1
    names = launched(load_model(config, model_impl="native"), monkeypatch)
    in_front = ["embedding", "index_select", "_norm", "mm"]
    assert names[:4] == in_front  # the first layer's norm has no squares to go by
    assert names[-2:] == ["_norm", "mm"]
    assert names.count("index") == 2  # of whom logits are wanted

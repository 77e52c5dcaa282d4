"""The native decoder's products: results on a CPU, and what a GPU would launch for a layer."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pagedsim.core import Request
from pagedsim.engine import runner as runner_module
from pagedsim.engine.cache import Cache
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.models.native import decoder
from pagedsim.engine.models.native import linear as linears
from pagedsim.engine.models.native.linear import (
    HostLinear,
    Linear,
    Norm,
    Stream,
    may_copy,
    on_host,
)
from pagedsim.engine.runner import Runner
from pagedsim.kernels import ops as kernels
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.server import ServerSpec
from tests.engine.architectures import CONFIGS

WEIGHTS = [torch.float32, torch.int8, torch.float8_e4m3fn]
HIDDEN, OUT, TOKENS = 32, 24, 5


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_what_a_layer_calls(weights: torch.dtype, bias: bool) -> None:
    check(weights, bias)


def check(weights: torch.dtype, bias: bool) -> None:
    """Fail unless norm, product, gate and sum are those of plain torch."""
    torch.manual_seed(0)
    up, down = some(2 * OUT, HIDDEN, weights, bias), some(HIDDEN, OUT, weights, bias)
    norm = Norm(torch.rand(HIDDEN) + 0.5, 1e-5)
    tokens, x = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, OUT)
    stream = Stream(tokens.clone(), None)
    down.add_to(stream, x)  # which may leave its squares for the norm
    summed = tokens + plain(down, x)
    normed = functional.rms_norm(summed, (HIDDEN,), norm.weight, norm.eps)
    gate, up_of_it = plain(up, normed).chunk(2, -1)
    near(up.gated(norm, stream), functional.silu(gate) * up_of_it)
    near(stream.sum, summed)
    near(up.normed(norm, stream), plain(up, normed))
    near(up(tokens), plain(up, tokens))


def some(rows: int, columns: int, weights: torch.dtype, bias: bool) -> Linear:
    """A Linear with random weights, 8-bit ones with a scale."""
    weight, own = torch.randn(rows, columns) * 50, weights == torch.float32
    scale = None if own else torch.rand(rows) / 20
    return Linear(weight.to(weights), torch.randn(rows) if bias else None, scale)


def plain(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """The product in float32."""
    weight = linear.weight.float()
    if linear.scale is not None:
        weight = weight * linear.scale[:, None]
    return functional.linear(x, weight, linear.bias)


def near(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [None, torch.int8, torch.float8_e4m3fn])
def test_products_on_a_cpu_for_any_number_of_tokens(
    weights: torch.dtype | None, dtype: torch.dtype
) -> None:
    for inputs, bias in ((40, False), (40, True), (2 * linears.INT8_INPUTS, True)):
        linear = of_dtype(weights or dtype, dtype, bias, inputs)
        mine = on_host(linear, copies=True)
        assert type(mine) is HostLinear and mine.weight is linear.weight
        few, many = linears.INT8_TOKENS, linears.WEIGHTS_BEHIND
        for rows in (0, 1, 2, few, few + 1, many - 1, many, many + 3):
            x = torch.randn(rows, inputs).to(dtype)
            found, wanted = mine(x), linear(x)
            assert found.dtype == dtype and found.shape == wanted.shape and found.is_contiguous()
            off = 1e-5 if dtype == torch.float32 else 2e-2
            largest = float(wanted.abs().amax()) if rows else 0.0
            torch.testing.assert_close(found, wanted, rtol=off, atol=off * largest)


def of_dtype(weights: torch.dtype, dtype: torch.dtype, bias: bool, inputs: int) -> Linear:
    torch.manual_seed(0)
    weight = torch.randn(48, inputs) * 20
    scale = None if weights == dtype else torch.rand(48) / 100
    return Linear(weight.to(weights), torch.randn(48).to(dtype) if bias else None, scale)


def test_copies_are_of_float32_alone_and_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for dtype, copies in ((torch.float32, False), (torch.bfloat16, True)):
        assert on_host(of_dtype(dtype, dtype, False, 40), copies=copies).tiles is None
    module: Any = load_model("tiny").module
    size = sum(weight.nbytes for weight in module.parameters())
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for room, copied in ((linears.COPY_SHARE * size, True), (linears.COPY_SHARE * size - 1, False)):
        monkeypatch.setattr(os, "sysconf", lambda name, room=room: room if "PAGES" in name else 1)
        assert may_copy(module) is copied
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not may_copy(module)


# What a decode step of three sequences launches on a GPU, counted without one


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


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """As on a GPU, but Triton's kernels are only named."""
    JITFunction = pytest.importorskip("triton.runtime.jit").JITFunction
    launched: list[str] = []

    def name(self: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: launched.append(self.fn.__name__)

    with monkeypatch.context() as patched:
        patched.setattr(kernels, "on_gpu", lambda tensor: True)
        patched.setattr(JITFunction, "__getitem__", name)
        with Operations(launched):
            yield launched


def launched(config: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    with monkeypatch.context() as patched:  # Linears stay as they are on a GPU
        patched.setattr(decoder, "on_host", lambda part, copies: part)
        model: LoadedModel = load_model(config, model_impl="native")
    lengths = [4, 2, 7]
    batch = AttentionBatch.build([[0], [1], [2]], lengths, [1] * 3, block_size=16)
    cache = model.new_cache(num_blocks=3, block_size=16)
    ids, rows = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    positions = torch.tensor(lengths)
    with launches(monkeypatch) as names:
        model.forward(ids, positions, batch, cache, rows)
    return names


def of_a_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a layer takes: by so much does one more of them add to a step."""
    steps = []
    for layers in (2, 3):
        config: Any = CONFIGS[name]()
        config.num_hidden_layers = layers
        if hasattr(config, "layer_types"):
            config.layer_types = ["full_attention"] * layers
        if hasattr(config, "mlp_only_layers"):
            config.mlp_only_layers = []
        steps.append(launched(config, monkeypatch))
    less, more = steps
    first = next(i for i, (one, other) in enumerate(zip(less, more, strict=False)) if one != other)
    return more[first : first + len(more) - len(less)]


ROUTED = ["_norm", "mm", "_route", "_list", "_up", "_down", "_sum"]
"""A router, and two products over tokens sorted by expert."""
EXPERTS = ["_norm", "mm", "_rotate", "_decode", "_product", *ROUTED]
ABSORBED = ["_norm", "mm", "_norm", "mm", "_compress", "bmm", "_latent", "_merge", "bmm"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        *((name, ["_product"] * 4 + ["_rotate", "_decode"]) for name in ("qwen2", "qwen3")),
        *((name, EXPERTS) for name in ("mixtral", "qwen3-moe")),
        ("deepseek-v3", [*ABSORBED, "_product", *ROUTED, "mm", "_silu_mul", "mm"]),
    ],
)
def test_launches_of_a_layer(name: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(of_a_layer(name, monkeypatch)) == sorted(wanted)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_any_step_with_a_graph_is_one_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another that puts new blocks into tables; eagerly there are several a layer."""
    for graphs in (False, True):
        runner = runner_of(CONFIGS[name](), monkeypatch)
        scheduler = ServerSpec(
            batching="unified", blocks=64, cpu_blocks=0, max_seqs=8, max_batched_tokens=64,
            max_model_len=128,
        ).scheduler()  # fmt: skip
        counts: dict[str, int] = {}
        with launches(monkeypatch) as names:
            monkeypatch.setattr(runner_module, "recorder_of", lambda device, to=names: Noted(to))
            runner.warm_up(64, graphs=64 * graphs)
            for number, kind in enumerate(["prompt", "both", "decodes"]):
                if kind != "decodes":
                    scheduler.add(Request(number, [5] * 45), 0)
                plan = scheduler.plan(0)
                names.clear()
                runner.carry_out(runner.inputs_of(plan))
                counts[kind] = len(names)
                if graphs:
                    assert names == ["index_copy_", "graph"][kind == "decodes" :]
                requests = [*plan.decodes, *(chunk.request for chunk in plan.chunks)]
                scheduler.commit(plan, 0, {request.id: 5 for request in requests})
        launched = runner.launched
        assert launched == {"graph": 3 * graphs, "eager": 3 * (not graphs)}
        layers = runner.model.num_layers
        assert graphs or min(counts["prompt"], counts["both"]) >= 9 * layers


def runner_of(config: Any, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """A runner whose model has the products of a GPU."""
    with monkeypatch.context() as patched:
        patched.setattr(decoder, "on_host", lambda part, copies: part)
        model: LoadedModel = load_model(config, model_impl="native")
    return Runner(model, Cache(model.cache_shape(16), 64, 0, model.device), seqs=8, longest=128)


class Noted:
    """A recorder whose replays are noted as launches."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def record(self, work: Any) -> Any:
        work()
        return lambda: self._names.append("graph")

"""The native decoder's products: results on a CPU, and what a GPU would launch for a layer."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from pagedsim.engine.models.native import host as hosts
from pagedsim.engine.models.native.host import (
    BOUNDS,
    INT8_INPUTS,
    TIMED_FROM,
    WAYS,
    Host,
    HostLinear,
    Kind,
    on_host,
    rehearsed,
)
from pagedsim.engine.models.native.linear import Linear, Norm, Stream
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
    for inputs, bias in ((40, False), (40, True), (2 * INT8_INPUTS, True)):
        linear = of_dtype(weights or dtype, dtype, bias, inputs)
        kind = Kind(linear.weight.dtype, dtype, 48, inputs, 1, 2)
        mine = on_host(linear, Host(dtype, 2, timed=False))
        assert type(mine) is HostLinear and mine.weight is linear.weight
        assert mine.ways == kind.untimed and {*mine.ways} <= {*kind.fitting}
        ways = [mine] + [
            replace(mine, ways=(name,) * 4, kept=(WAYS[name].pack(linear.weight, dtype),) * 4)
            for name in kind.fitting
        ]
        for rows in (0, 1, 2, *(bound + more for bound in BOUNDS[1:] for more in (0, 1))):
            x = torch.randn(rows, inputs).to(dtype)
            wanted = linear(x)
            for way in ways:
                found = way(x)
                assert found.dtype == dtype and found.shape == wanted.shape
                assert found.is_contiguous()
                off = 1e-5 if dtype == torch.float32 else 2e-2
                largest = float(wanted.abs().amax()) if rows else 0.0
                torch.testing.assert_close(found, wanted, rtol=off, atol=off * largest)


def of_dtype(weights: torch.dtype, dtype: torch.dtype, bias: bool, inputs: int) -> Linear:
    torch.manual_seed(0)
    weight = torch.randn(48, inputs) * 20
    scale = None if weights == dtype else torch.rand(48) / 100
    return Linear(weight.to(weights), torch.randn(48).to(dtype) if bias else None, scale)


def test_copies_are_made_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for copies, names in enumerate((["rows"], ["rows", "tiles"], ["rows", "tiles", "columns"])):
        assert Kind(torch.float32, torch.float32, 8, 8, 1, copies).fitting == names
    module: Any = load_model("tiny").module
    size = sum(weight.nbytes for weight in module.parameters())
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for room, copies in ((16 * size, 2), (16 * size - 1, 1), (8 * size - 1, 0)):
        monkeypatch.setattr(os, "sysconf", lambda name, room=room: room if "PAGES" in name else 1)
        assert Host.of(module) == Host(torch.float32, copies, timed=size >= TIMED_FROM)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert Host.of(module).copies == 0


def test_the_fastest_way_that_is_right_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that fails on this processor, or is wrong, is not, however fast."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("not here")

    now = 0.0

    def slow(seconds: float, of: Any = torch.nn.functional.linear) -> Any:
        def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            nonlocal now
            now += seconds
            return of(x, weight)

        return hosts.Way(multiply)

    monkeypatch.setattr(hosts, "COLD", 2**14)
    monkeypatch.setattr(time, "thread_time", lambda: now)
    ways = {"rows": slow(2), "tiles": slow(1), "columns": slow(0.98)}
    kind = Kind(torch.float32, torch.float32, 24, 40, 1, 2)
    for taken, more in (
        ("tiles", {}),  # columns gain too little
        ("rows", {"tiles": slow(3), "columns": slow(0.5, lambda x, w: 1.01 * (x @ w.t()))}),
        ("columns", {"tiles": slow(1)._replace(pack=fails), "columns": slow(1.5)}),
    ):
        monkeypatch.setattr(hosts, "WAYS", {**ways, **more})
        rehearsed.cache_clear()
        assert rehearsed(kind) == (taken,) * len(hosts.TOKENS)
    rehearsed.cache_clear()


def test_a_model_takes_what_was_rehearsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for weights that float16 does not hold."""
    linear = of_dtype(torch.bfloat16, torch.bfloat16, True, 40)
    monkeypatch.setattr(hosts, "rehearsed", lambda kind: ("float16",) * len(hosts.TOKENS))
    host = Host(torch.bfloat16, 1, timed=True)
    assert on_host(linear, host).ways == ("float16",) * len(hosts.TOKENS)
    linear.weight[3, 3] = 1e5
    mine = on_host(linear, host)
    assert "float16" not in mine.ways
    x = torch.randn(2, 40).bfloat16()
    torch.testing.assert_close(mine(x), linear(x), rtol=2e-2, atol=2e-2 * 1e5)


def test_what_was_chosen_is_logged_in_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hosts, "COLD", 2**14)
    rehearsed.cache_clear()
    with caplog.at_level("INFO"):
        assert len(rehearsed(Kind(torch.bfloat16, torch.bfloat16, 24, 64, 1, 1))) == len(
            hosts.TOKENS
        )
    [line] = caplog.messages
    assert line.startswith("products of 24 × 64 weights, bfloat16: ") and "for 128" in line


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
        patched.setattr(decoder, "on_host", lambda part, host: part)
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
        patched.setattr(decoder, "on_host", lambda part, host: part)
        model: LoadedModel = load_model(config, model_impl="native")
    return Runner(model, Cache(model.cache_shape(16), 64, 0, model.device), seqs=8, longest=128)


class Noted:
    """A recorder whose replays are noted as launches."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def record(self, work: Any) -> Any:
        work()
        return lambda: self._names.append("graph")

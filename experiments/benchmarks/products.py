"""The products of one layer of a decode step, with what stands around them, against torch's.

    python -m experiments.benchmarks.products
    python -m experiments.benchmarks.products --device cpu --quick    (the same way, without a GPU)

Llama-3.1-8B's: queries, keys and values of the normed tokens; back from attention, added to the
tokens; gate and up of the normed tokens; down, added to them. *Ours* is `kernels/product.py`, four
launches; *torch* is four of its products, two norms and a gate, as the engine does it for many
tokens (`tiles.FEW` says how many these are). The limit is what the weights take to be read once at
the speed of a device copy, timed in the same rounds. Both run as CUDA graphs, where there are any.
Weights are in bf16 and in 8 bits; torch's are in bf16 always. Before anything is timed it is held
against fp64; what is wrong is not timed. Results go to
experiments/results/<GPU>/products.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from experiments.benchmarks.device import Copy, device_of, facts, medians, options, table
from experiments.benchmarks.results import before, folder, keep, told
from experiments.benchmarks.shapes import BASE, shape_of
from pagedsim.engine.graphs import recorder_of
from pagedsim.kernels import ops
from pagedsim.kernels.row_norm import RowNorm
from pagedsim.kernels.tiles import FEW

TOKENS = (1, 8, 32, 64)
"""Up to twice as many as the engine would take ours for: is that bound right?"""
WEIGHTS = {"auto": None, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
EPS = 1e-5


class Widths(NamedTuple):
    """Of what goes through a layer."""

    hidden: int
    heads: int
    """Of all query heads."""
    qkv: int
    inner: int


TINY = Widths(64, 48, 96, 80)


class Weight(NamedTuple):
    """A matrix, [out, in], and for 8 bits each output's scale."""

    values: torch.Tensor
    scale: torch.Tensor | None

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in another dtype."""
        if self.scale is None:
            return self.values.to(dtype)
        return (self.values.to(torch.float32) * self.scale[:, None]).to(dtype)


class Layer:
    """Weights and tokens, and what becomes of these both ways."""

    def __init__(
        self, widths: Widths, tokens: int, weights: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        hidden, heads, qkv, inner = widths
        self._kind: Any = {"dtype": dtype, "device": device}
        self.heads = heads
        self.weights = {
            "qkv": self._weight(qkv, hidden, weights),
            "out": self._weight(hidden, heads, weights),
            "gate_up": self._weight(2 * inner, hidden, weights),
            "down": self._weight(hidden, inner, weights),
        }
        self.norms = [self._random(hidden) for _ in range(2)]
        self.tokens = self._random(tokens, hidden)
        self.residual = self.tokens.clone()
        squares = self.tokens.float().square().sum(1, keepdim=True)
        self.known = RowNorm(self.norms[0], squares, EPS)  # what the layer before has left
        self.plain: list[torch.Tensor] = []
        """The matrices as torch multiplies by them, once there are any."""

    def ours(self) -> torch.Tensor:
        """The tokens behind the layer."""
        qkv, out, gate_up, down = (
            (weight.values, None, weight.scale) for weight in self.weights.values()
        )
        seen = ops.product(self.residual, *qkv, norm=self.known)
        squares = ops.add_product(self.residual, seen[:, : self.heads].contiguous(), *out)
        norm = RowNorm(self.norms[1], squares, EPS)
        x = ops.product(self.residual, *gate_up, norm=norm, gated=True)
        ops.add_product(self.residual, x, *down)
        return self.residual

    def theirs(self) -> torch.Tensor:
        """The same, but for the last sum, which the norm of the next layer takes along."""
        qkv, out, gate_up, down = self.plain
        seen = functional.linear(ops.rms_norm(self.residual, self.norms[0], EPS), qkv)
        x = functional.linear(seen[:, : self.heads].contiguous(), out)
        x = functional.linear(ops.rms_norm(x, self.norms[1], EPS, self.residual), gate_up)
        return functional.linear(ops.silu_mul(x), down)

    def exact(self) -> torch.Tensor:
        """The tokens behind the layer in fp64, which are made anew."""
        self.fresh()
        x, (first, second) = self.tokens.double(), (norm.double() for norm in self.norms)
        size = first.shape
        qkv, out, gate_up, down = (one.plain(torch.float64) for one in self.weights.values())
        x = x + (functional.rms_norm(x, size, first, EPS) @ qkv.T)[:, : self.heads] @ out.T
        gate, up = (functional.rms_norm(x, size, second, EPS) @ gate_up.T).chunk(2, 1)
        return x + (functional.silu(gate) * up) @ down.T

    def fresh(self) -> None:
        """Take the tokens in front of the layer again."""
        self.residual.copy_(self.tokens)

    def unpack(self) -> None:
        """Make the matrices that torch multiplies by."""
        self.plain = [one.plain(self.residual.dtype) for one in self.weights.values()]

    @property
    def nbytes(self) -> int:
        """Of the weights."""
        return sum(one.values.nbytes for one in self.weights.values())

    def _weight(self, rows: int, columns: int, weights: str) -> Weight:
        drawn, kind = self._random(rows, columns) * columns**-0.5, WEIGHTS[weights]
        if kind is None:
            return Weight(drawn, None)
        most = 127 if kind == torch.int8 else torch.finfo(kind).max
        scale = drawn.abs().amax(1).float() / most
        scaled = drawn.float() / scale[:, None]
        return Weight((scaled.round() if kind == torch.int8 else scaled).to(kind), scale)

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, **self._kind)


def main(words: Sequence[str] | None = None) -> None:
    """Measure all of them; print a table, and keep the results."""
    words = sys.argv[1:] if words is None else words
    asked = options(__doc__).parse_args(words)
    device = device_of(asked)
    torch.set_num_threads(1)
    place = folder(device, asked)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    copy = Copy(device, asked.quick)
    result: dict[str, Any] = {
        **facts(device, "experiments.benchmarks.products", words),
        "dtype": str(dtype).removeprefix("torch."),
        "rounds": asked.rounds,
        "quick": asked.quick,
        "few": FEW,
    }
    known = before(place, "products", result, "cases") if asked.resume else []
    result["cases"] = [one for one in known if "seconds" in one]
    there = {(one["weights"], one["tokens"]) for one in result["cases"]}
    for weights in WEIGHTS:
        for tokens in TOKENS:
            if (weights, tokens) in there:
                continue
            layer = Layer(TINY if asked.quick else widths(), tokens, weights, dtype, device)
            found = measured(layer, copy, device, asked.rounds)
            result["cases"].append({"weights": weights, "tokens": tokens, **found})
            keep(place, "products", result)
    print(written(result))
    told(place, "products")
    if wrong := [one for one in result["cases"] if "seconds" not in one]:
        sys.exit("wrong: " + "; ".join(f"{one['weights']}, {one['tokens']}" for one in wrong))


def widths(model: str = BASE) -> Widths:
    """A model's."""
    shape = shape_of(model)
    heads = shape.heads * shape.head_dim
    return Widths(
        shape.hidden, heads, heads + 2 * shape.kv_heads * shape.head_dim, shape.intermediate
    )


def measured(layer: Layer, copy: Copy, device: torch.device, rounds: int) -> dict[str, Any]:
    """Is it right, and how long does it take?"""
    exact = layer.exact()
    error = float((layer.ours().double() - exact).norm() / exact.norm())
    # A few independent roundings, and sums in fp32.
    eps = [torch.finfo(dtype).eps for dtype in (layer.residual.dtype, torch.float32)]
    allowed = 2 * eps[0] + 16 * eps[1]
    found: dict[str, Any] = {"error": error, "error_allowed": allowed, "bytes": layer.nbytes}
    if not error <= allowed:
        return found
    layer.unpack()
    calls: dict[str, Callable[[], object]] = {
        "ours": captured(layer.ours, device),
        "torch": captured(layer.theirs, device),
        "copy": copy,
    }
    seconds = medians(calls, device, rounds)
    limit = layer.nbytes / copy.moved * seconds["copy"]
    return {
        **found,
        "seconds": seconds["ours"],
        "torch_seconds": seconds["torch"],
        "limit_seconds": limit,
        "of_limit": limit / seconds["ours"],
    }


def captured(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """What does it again: a CUDA graph where there are any, as in the engine."""
    recorder = recorder_of(device)

    def work() -> None:
        call()

    return work if recorder is None else recorder.record(work)


def written(result: Mapping[str, Any]) -> str:
    """As Markdown."""
    rows = [
        [
            one["weights"],
            str(one["tokens"]),
            f"{one['seconds'] * 1e6:,.1f}",
            f"{one['torch_seconds'] * 1e6:,.1f}",
            f"{one['torch_seconds'] / one['seconds']:.2f}",
            f"{one['of_limit']:.0%}",
        ]
        for one in result["cases"]
        if "seconds" in one
    ]
    head = ["weights", "tokens", "ours, µs", "torch in 16 bits, µs", "torch / ours", "of the limit"]
    about = f"{result['device']}, {result['dtype']}, torch {result['torch']}, {result['date']}"
    return f"{about}\n\n{table(head, rows)}"


if __name__ == "__main__":
    main()

"""Products with weights on a CPU.

No library's product is the fastest for every shape, number of tokens and processor. So there are
several ways to multiply, and where a model is loaded each is timed with weights of the model's
shapes, once a process; see `rehearsed`. A way whose results are not those of the plain product up
to the rounding of its dtype is left out. Small models, which are mostly overhead, are not timed.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from pagedsim.engine.models.native.linear import Linear, Stream

log = logging.getLogger(__name__)

COPY_SHARE = 8
"""Copies of weights take at most this fraction (1/8) of the host's memory."""
MOST_COPIES = 2
TIMED_FROM = 2**26
"""Bytes of a model's weights from which on products are timed."""
BOUNDS = (1, 4, 63)
"""The most tokens of the classes of steps, of which each has its way; the last has no bound."""
TOKENS = (1, 3, 16, 128)
"""The tokens with which each class is timed."""
COLD = 32 * 2**20
"""Bytes of weights that are read between two readings of the same, to find none in a cache."""
WORK = 2**26
"""Multiplications after which a timing ends, whatever was read."""
ROUNDS = 3
GAIN = 0.95
"""Another way is taken if it takes at most this fraction of the time of a way before it."""
TILE_ROWS = 16
"""The tokens of a step that oneDNN's tiles are laid out for."""
INT8_INPUTS = 32
"""Inputs that torch's int8 product reads at a time, past their end if they are no multiple."""


def _rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32 and len(x) == 1:
        return torch.mv(weight, x[0])[None]
    return functional.linear(x, weight)


def _first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(weight, x.t()).t().contiguous()


def _widened(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = weight.to(x.dtype)
    few = 1 < len(x) <= BOUNDS[-1] and x.dtype != torch.float32
    return _first(x, wide) if few else _rows(x, wide)


def _float16(weight: torch.Tensor, dtype: torch.dtype) -> Any:
    """FBGEMM's float16; raises ValueError if weights are rounded in it by more than in `dtype`."""
    wide = weight.float()
    off = (wide.half().float() - wide).norm(dim=1)
    if not bool((off <= torch.finfo(dtype).eps * wide.norm(dim=1)).all()):
        raise ValueError("weights beyond float16")
    return torch.ops.quantized.linear_prepack_fp16(wide, None)


class Way(NamedTuple):
    """A way to compute x @ weightᵀ."""

    multiply: Callable[[torch.Tensor, Any], torch.Tensor]
    """Takes x [tokens, in], at least one, and what was packed; returns a new [tokens, out]."""
    pack: Callable[[torch.Tensor, torch.dtype], Any] = lambda weight, dtype: weight
    """From weights [out, in] and the dtype of the tokens to what is multiplied with."""
    copies: int = 0
    """How many copies of the weights there must be room for."""


_OPS: Any = torch.ops
WAYS: Mapping[str, Way] = {
    "rows": Way(_rows),
    "weights first": Way(_first),
    "widened": Way(_widened),
    "int8": Way(
        lambda x, kept: _OPS.aten._weight_int8pack_mm(x, *kept),
        # Ones in place of scales, which it would round to 16 bits.
        lambda weight, dtype: (weight, torch.ones(len(weight), dtype=dtype)),
    ),
    "tiles": Way(
        lambda x, tiles: _OPS.mkldnn._linear_pointwise(x, tiles, None, "none", [], ""),
        lambda weight, _: _OPS.mkldnn._reorder_linear_weight(weight, TILE_ROWS),
        copies=1,
    ),
    "columns": Way(torch.mm, lambda weight, _: weight.t().contiguous(), copies=2),
    "float16": Way(
        lambda x, kept: _OPS.quantized.linear_dynamic_fp16(x.float(), kept).to(x.dtype),
        _float16,
        copies=1,
    ),
}
"""Weights row by row, as they lie; or as the first factor, which oneDNN reads in place; or, of 8
bits, in the tokens' dtype first. Copies: in oneDNN's tiles; column by column, which for one token
is read without a sum across registers; in FBGEMM's float16, multiplied in float32."""


class Kind(NamedTuple):
    """What products are chosen by: weights and tokens, threads, and room for copies."""

    stored: torch.dtype
    dtype: torch.dtype
    outputs: int
    inputs: int
    threads: int
    copies: int

    @property
    def fitting(self) -> list[str]:
        """The names of the ways that there are."""
        if self.stored == torch.float32:
            names = ["rows", "tiles", "columns"]
        elif self.stored == self.dtype:
            names = ["rows", "weights first", "float16"]
        else:
            whole = self.stored == torch.int8 and self.inputs % INT8_INPUTS == 0
            names = ["widened", "float16"]
            names[1:1] = ["int8"] if whole and self.dtype == torch.bfloat16 else []
        return [name for name in names if WAYS[name].copies <= self.copies]

    @property
    def untimed(self) -> tuple[str, ...]:
        """The way of each class where none is timed."""
        names = self.fitting
        if self.stored == torch.float32:
            return "rows", *(["tiles" if "tiles" in names else "rows"] * 3)
        if self.stored == self.dtype:
            return "rows", "weights first", "weights first", "rows"
        few = "int8" if "int8" in names else "widened"
        return few, few, "widened", "widened"


@dataclass(frozen=True, slots=True)
class Host:
    """What a model may use of the host."""

    dtype: torch.dtype
    """Of its tokens."""
    copies: int
    """How many copies of its weights there is room, and a use, for."""
    timed: bool

    @classmethod
    def of(cls, module: Any) -> Host:
        """For a model with these weights."""
        size = sum(weight.nbytes for weight in module.parameters())
        copies = 0
        known = hasattr(os, "sysconf")  # not on Windows
        if known and platform.machine() == "x86_64" and torch.backends.mkldnn.is_available():
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            copies = min(memory // (COPY_SHARE * size), MOST_COPIES)
        return cls(module.dtype, copies, size >= TIMED_FROM)


@dataclass(frozen=True, slots=True)
class HostLinear(Linear):
    """A `Linear` with its weights on the host, and a way for each class of steps."""

    ways: tuple[str, ...] = ()
    kept: tuple[Any, ...] = ()
    """What each of them has packed."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        if not tokens:
            return x.new_empty(0, len(self.weight))
        number = bisect_left(BOUNDS, tokens)
        y = WAYS[self.ways[number]].multiply(x, self.kept[number])
        if self.scale is not None:
            y = y.float() * self.scale
            return (y if self.bias is None else y + self.bias).to(x.dtype)
        return y if self.bias is None else y.add_(self.bias)

    def add_to(self, stream: Stream, x: torch.Tensor) -> None:
        """As `Linear.add_to`; in float32 a matrix product adds up in place."""
        number = bisect_left(BOUNDS, x.shape[0])  # len() of a tensor takes longer
        way = self.ways[number]
        plain = self.bias is None and self.scale is None and stream.group is None
        if not plain or x.dtype != torch.float32 or way not in ("rows", "columns"):
            stream.add(self(x))
            return
        stream.check_nothing_waits()
        kept = self.kept[number]
        stream.sum.addmm_(x, kept.t() if way == "rows" else kept)


def on_host(part: Any, host: Host) -> Any:
    """A `Linear`, or all of an attention or feed-forward part, for the host's processor."""
    if not isinstance(part, Linear):
        values = {field.name: getattr(part, field.name) for field in fields(part)}
        linears = {name: value for name, value in values.items() if isinstance(value, Linear)}
        return replace(part, **{name: on_host(linear, host) for name, linear in linears.items()})
    given = {field.name: getattr(part, field.name) for field in fields(Linear)}
    weight, dtype = part.weight.detach(), host.dtype
    kind = Kind(
        weight.dtype, dtype, len(weight), weight.shape[1], torch.get_num_threads(), host.copies
    )
    ways = rehearsed(kind) if host.timed else kind.untimed
    packed: dict[str, Any] = {}
    try:
        for name in ways:
            if name not in packed:
                packed[name] = WAYS[name].pack(weight, dtype)
    except ValueError:  # these weights alone
        ways = kind._replace(copies=0).untimed
        packed = {name: WAYS[name].pack(weight, dtype) for name in ways}
    return HostLinear(**given, ways=ways, kept=tuple(packed[name] for name in ways))


# -- the rehearsal ---------------------------------------------------------------------------------


@cache
def rehearsed(kind: Kind) -> tuple[str, ...]:
    """The fastest way of each class of steps; timed with random weights of this kind."""
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for tokens, usual in zip(TOKENS, kind.untimed, strict=True):
        x = torch.randn(tokens, kind.inputs, generator=generator).to(kind.dtype)
        weights = _samples(kind, tokens, generator)
        wanted = functional.linear(x.float(), weights[0].float())
        best, least = usual, math.inf
        for name in kind.fitting:
            taken = _seconds(WAYS[name], weights, x, wanted, kind)
            if taken <= GAIN * least:
                best, least = name, taken
        chosen.append(best)
    log.info(
        "products of %s × %s weights, %s: %s",
        kind.outputs, kind.inputs, str(kind.stored).removeprefix("torch."),
        ", ".join(f"{name} for {tokens}" for tokens, name in zip(TOKENS, chosen, strict=True)),
    )  # fmt: skip
    return tuple(chosen)


def _samples(kind: Kind, tokens: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Weights of the kind's shape, or fewer rows of it, for one timing."""
    most = min(COLD // kind.stored.itemsize, WORK // tokens) // kind.inputs
    rows = max(min(kind.outputs, most), 1)
    values = torch.randn(rows, kind.inputs, generator=generator) * 20
    return [values.to(kind.stored, copy=True) for _ in range(max(most // rows, 1))]


def _seconds(
    way: Way, weights: list[torch.Tensor], x: torch.Tensor, wanted: torch.Tensor, kind: Kind
) -> float:
    """The least time of the products with all weights; infinite where a way fails or is wrong."""
    # The processor's time of this thread is steadier than the wall clock's on a shared machine.
    clock = time.thread_time if kind.threads == 1 else time.perf_counter
    try:
        packed = [way.pack(weight, kind.dtype) for weight in weights]
        off = (way.multiply(x, packed[0]).float() - wanted).norm() / wanted.norm()
    except RuntimeError:  # not for this processor
        return math.inf
    if not off <= max(torch.finfo(kind.dtype).eps, 1e-5):
        return math.inf
    times = []
    for _ in range(ROUNDS):
        start = clock()
        for weight in packed:
            way.multiply(x, weight)
        times.append(clock() - start)
    return min(times)

"""Shapes of models, and cases of attention with their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import yaml

from pagedsim.engine.attention import TRITON, attention_of
from pagedsim.engine.models.shaped import shaped_config
from pagedsim.experiments.benchmarks.device import norm_error
from pagedsim.experiments.benchmarks.harness import ROOT
from pagedsim.kernels import reference
from pagedsim.kernels.batch import Attention, AttentionBatch
from pagedsim.kernels.float8 import AUTO, FORMATS, raw, rounded
from pagedsim.sim.model import ModelShape

# -- shapes ----------------------------------------------------------------------------------------

BASE = "llama-3.1-8b"
TINY = ModelShape("little", 2, 48, 4, 2, 16, 80, 512, 512)
SHAPES = (BASE, "qwen3-0.6b", "llama-2-7b", "llama-3.1-70b")
"""The models whose attention is measured."""
LONG = 131072


@cache
def shape_of(name: str) -> ModelShape:
    """A model's shape, from conf/model, or the tiny one."""
    if name == TINY.name:
        return TINY
    path = ROOT / "conf" / "model" / f"{name}.yaml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    del settings["_target_"]
    return ModelShape(**settings)


def config_of(shape: ModelShape) -> Any:
    """transformers' configuration of a model with this shape, for random weights.

    Scores are of order one for any width, so that attention weights differ and attention to the
    wrong keys shows in the logits.
    """
    config = shaped_config(shape)
    config.initializer_range = shape.hidden**-0.5
    return config


# -- attention -------------------------------------------------------------------------------------

LAYERS, LAYER = 4, 1
"""A block holds several layers, as in the engine, and one of them is read."""
ROWS = 4
"""Query tokens of each stretch whose outputs are compared."""


class Case(NamedTuple):
    """Sequences of one length, of which the last `queries` tokens are computed."""

    model: str | ModelShape
    """A shape, or its name."""
    batch: int
    queries: int
    context: int
    block_size: int = 16
    cache: str = AUTO
    beside: int = 0
    """The context of one more sequence, the last; 0: none."""

    @property
    def contexts(self) -> list[int]:
        return [self.context] * self.batch + ([self.beside] if self.beside else [])

    @property
    def kind(self) -> str:
        if self.queries == 1:
            return "decode"
        return "prefill" if self.queries == self.context else "chunk"

    @property
    def kernel(self) -> str:
        """The one that computes it."""
        return "decode" if self.queries == 1 else "prefill"

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.model) if isinstance(self.model, str) else self.model

    @property
    def flop(self) -> int:
        """FLOP of one layer's products, over the keys that a query sees."""
        hidden = self.queries * (self.queries - 1) // 2
        seen = sum(self.queries * context - hidden for context in self.contexts)
        return 4 * self.shape.heads * self.shape.head_dim * seen

    def held(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the cache for queries of this dtype."""
        return FORMATS.get(self.cache, dtype)

    def attention(self, name: str, dtype: torch.dtype, device: torch.device) -> Attention:
        """The attention of that name; raises ConfigError if it does not have the case."""
        sizes: dict[str, Any] = {"head_dim": self.shape.head_dim, "block_size": self.block_size}
        return attention_of(name, device, dtype=dtype, held=self.held(dtype), **sizes)

    def moved(self, dtype: torch.dtype) -> int:
        """Bytes of K, V, queries and output, each moved once."""
        keys = sum(self.contexts) * self.shape.kv_heads * self.held(dtype).itemsize
        rows = len(self.contexts) * self.queries * self.shape.heads * dtype.itemsize
        return 2 * (keys + rows) * self.shape.head_dim

    def __str__(self) -> str:
        what = f"{self.kind} {self.batch} × {self.context:,}"
        if self.kind == "chunk":
            what = f"chunk {self.batch} × {self.queries:,} of {self.context:,}"
        if self.beside:
            what = f"{what} and one of {self.beside:,}"
        heads = f"{self.shape.heads}/{self.shape.kv_heads}×{self.shape.head_dim}"
        what = f"{what}, {heads}, block {self.block_size}"
        return what if self.cache == AUTO else f"{what}, {self.cache}"


DECODE, SHORT, LONE = Case(BASE, 64, 1, 4096), Case(BASE, 64, 1, 1024), Case(BASE, 1, 1, LONG)
BESIDE = Case(BASE, 63, 1, 1024, beside=LONG)
WIDE = DECODE._replace(block_size=128)
PREFILL, SHORTER = Case(BASE, 1, 8192, 8192), Case(BASE, 1, 2048, 2048)


def eight(case: Case) -> Case:
    """The case with an 8-bit cache."""
    return case._replace(cache="fp8_e4m3")


HEADLINES: Mapping[str, Sequence[Case]] = {
    "eight": [eight(DECODE), eight(SHORT), eight(LONE)],
    "prefill": [PREFILL],
    "prefills": [SHORTER, eight(PREFILL), eight(SHORTER)],
    "mixed": [eight(BESIDE), BESIDE],
    "decode": [DECODE, SHORT, LONE, WIDE],
}
"""The cases in the table of GPUs, in the order in which they are measured."""


TINY_CASES = [
    *(Case("little", 3, 1, 40, size) for size in (8, 16)),
    *(Case("little", 2, queries, 24) for queries in (8, 24)),
    *(Case("little", 3, 1, 40, cache=cache) for cache in FORMATS),
    Case("little", 3, 1, 20, 8, beside=70),
]


class Problem:
    """A case with its tensors: blocks at random places in a cache of several layers."""

    def __init__(
        self, case: Case, dtype: torch.dtype, device: torch.device, attention: str = TRITON
    ) -> None:
        """Raises ConfigError if the attention of that name does not have the case."""
        self.case, shape = case, case.shape
        self._attention = case.attention(attention, dtype, device)
        counts = [-(-context // case.block_size) for context in case.contexts]
        kind: Any = {"dtype": dtype, "device": device}
        generator = torch.Generator(device).manual_seed(0)
        size = (case.block_size, shape.kv_heads, shape.head_dim)
        blocks, held = sum(counts), case.held(dtype)
        self.kv = torch.empty(blocks, LAYERS, 2, *size, dtype=held, device=device)
        values = torch.empty(blocks, 2, *size, **kind).normal_(generator=generator)
        self.kv[:, LAYER] = rounded(values, held)
        del values
        rows = (len(counts) * case.queries, shape.heads, shape.head_dim)
        self.q = torch.empty(rows, **kind).normal_(generator=generator)
        self.k_cache, self.v_cache = self.kv[:, LAYER, 0], self.kv[:, LAYER, 1]
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).split(counts)
        self.blocks = [blocks.to(device, torch.int32) for blocks in order]
        self.tables = torch.nn.utils.rnn.pad_sequence(self.blocks, batch_first=True)
        self.scale = shape.head_dim**-0.5
        self.allowed = 1.5 * torch.finfo(dtype).eps + 1e-5
        """The error explained by rounding of weights and result."""
        ints: Any = {"dtype": torch.int32, "device": device}
        decodes = case.queries == 1
        self.batch = AttentionBatch(  # as `build` makes it, without lists as long as the contexts
            self.tables,
            torch.arange(len(counts) + 1, **ints) * case.queries,
            torch.tensor(case.contexts, **ints),
            torch.empty(0, dtype=torch.int64, device=device),  # no slots: nothing is written
            len(counts) if decodes else 0,
            () if decodes else tuple((case.queries, context) for context in case.contexts),
        )

    def attend(self) -> torch.Tensor:
        """The attention; what it plans for a step it plans once."""
        return self._attention(self.q, self.k_cache, self.v_cache, self.batch, scale=self.scale)

    def error(self, out: torch.Tensor) -> float:
        """|out - reference| / |reference| of the first and last sequence, the worst stretch.

        The reference is plain torch in fp64 on the CPU; a stretch is some query tokens in a row,
        at the beginning, in the middle and at the end.
        """
        worst = 0.0
        for where, expected in self._answers:
            off = norm_error(out[where : where + len(expected)].cpu(), expected)
            worst = max(worst, math.inf if math.isnan(off) else off)
        return worst

    @cached_property
    def _answers(self) -> list[tuple[int, torch.Tensor]]:
        """First row and reference of each stretch."""
        queries, last = self.case.queries, len(self.case.contexts) - 1
        rows = min(ROWS, queries)
        return [
            (sequence * queries + begin, self._reference(sequence, begin, rows))
            for sequence in sorted({0, last})
            for begin in sorted({0, (queries - rows) // 2, queries - rows})
        ]

    def _reference(self, sequence: int, begin: int, rows: int) -> torch.Tensor:
        case = self.case
        context = case.contexts[sequence] - case.queries + begin + rows
        blocks = self.blocks[sequence].long()
        caches = (self.k_cache, self.v_cache)
        k, v = (raw(cache)[blocks].cpu().view(cache.dtype).double() for cache in caches)
        where = sequence * case.queries + begin
        batch = AttentionBatch.build(
            [range(len(blocks))], [context - rows], [rows], block_size=k.shape[1]
        )
        q = self.q[where : where + rows].cpu().double()
        return reference.attention(q, k, v, batch, scale=self.scale)

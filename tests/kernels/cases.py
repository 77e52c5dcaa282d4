"""Cases for paged attention, and the answer in fp64, worked out row by row without any paging.

Every slot of the cache that no token of the case lives in holds NaN, and so do the other layers;
what a block table holds past a sequence's last block is out of range. A kernel that reads what it
should not is found.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.float8 import AUTO, FORMATS, is_float8, raw, rounded

LAYERS, LAYER = 3, 1
NOWHERE = 2**30


@dataclass(frozen=True)
class Case:
    """A batch: (query tokens, context length) a sequence; the context counts the query tokens."""

    sequences: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache: str = AUTO
    """What the cache holds: elements in the dtype, or in one of `float8.FORMATS`."""
    window: int | None = None
    softcap: float | None = None
    tail: int = 0
    """Tokens after the last sequence, which are padding."""
    spread: float = 1.0
    """Scores are about this large; a large one makes the softmax peaked."""
    device: str = "cpu"
    reach: float = 1.0
    """Queries are about this large; scores stay what they are."""
    wide: bool = False
    """The result is looked at in fp32, before it is rounded to the dtype."""
    seats: bool = False
    """Tables stand anywhere in a store, and rows say where."""
    seed: int = 0

    def __str__(self) -> str:
        sequences = "_".join(f"{length}of{context}" for length, context in self.sequences)
        name = f"{sequences}-h{self.kv_heads}x{self.group}-d{self.head_dim}-b{self.block_size}"
        name += f"-{str(self.dtype).removeprefix('torch.')}"
        name += f"-{self.cache}" if self.cache != AUTO else ""
        name += f"-reach{self.reach:g}" if self.reach != 1 else ""
        name += "-wide" * self.wide + "-seats" * self.seats
        name += f"-w{self.window}" if self.window is not None else ""
        return name + (f"-cap{self.softcap:g}" if self.softcap is not None else "")

    @property
    def scale(self) -> float:
        return self.spread * self.head_dim**-0.5 / self.reach

    @property
    def held(self) -> torch.dtype:
        """The cache's dtype."""
        return FORMATS.get(self.cache, self.dtype)

    @property
    def written(self) -> torch.dtype:
        """The result's dtype."""
        return torch.float32 if self.wide else self.dtype

    @property
    def eps(self) -> float:
        """Of the coarsest rounding: that of the result or of the weights."""
        halves = is_float8(self.held) and self.dtype.itemsize == 2
        rounded_to = (torch.float16 if halves else self.dtype), self.written
        return max(torch.finfo(dtype).eps for dtype in rounded_to)

    @cached_property
    def inputs(self) -> Inputs:
        return _inputs(self)

    @property
    def batch(self) -> AttentionBatch:
        """The same for the engine's front door; decodes must come first."""
        i = self.inputs
        lengths = [length for length, _ in self.sequences]
        decodes = next((n for n, length in enumerate(lengths) if length != 1), len(lengths))
        chunks = self.sequences[decodes:]
        return AttentionBatch(
            i.block_tables, i.query_start, i.context_lens, i.slots, decodes, chunks, i.rows
        )


def for_a_graph(batch: AttentionBatch, tokens: int) -> AttentionBatch:
    """The same batch of so many tokens, with places for more decodes and chunks than it has."""
    decodes, chunks = batch.num_decodes, len(batch.chunks)
    seqs = min(tokens, max(decodes, chunks) + 2)
    contexts, starts, rows = batch.context_lens, batch.query_start[decodes:], batch.rows
    if rows is None:
        rows = torch.arange(decodes + chunks, dtype=torch.int32, device=contexts.device)

    def placed(column: torch.Tensor) -> torch.Tensor:
        blank = column.new_zeros(2 * seqs + 1)
        blank[:decodes], blank[seqs : seqs + chunks] = column[:decodes], column[decodes:]
        return blank

    ends = starts.new_full((2 * seqs + 2,), tokens)
    ends[seqs : seqs + chunks + 1] = starts
    return AttentionBatch(
        batch.block_tables, ends, placed(contexts), batch.slots, seqs, rows=placed(rows),
        longest=tokens,
    )  # fmt: skip


class Inputs(NamedTuple):
    """What a kernel gets, and what it should have written."""

    q: torch.Tensor
    kv: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    slots: torch.Tensor
    new_k: torch.Tensor
    new_v: torch.Tensor
    answer: torch.Tensor
    """fp64, on the CPU."""
    allowed: torch.Tensor
    """How far each element may be from the answer."""
    rows: torch.Tensor | None

    @property
    def k_cache(self) -> torch.Tensor:
        return self.kv[:, LAYER, 0]

    @property
    def v_cache(self) -> torch.Tensor:
        return self.kv[:, LAYER, 1]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two caches hold the same, NaN for NaN."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.dtype.itemsize]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def forget(kv: torch.Tensor, slots: torch.Tensor) -> None:
    """Put NaN into the layer's keys and values there."""
    size, live = kv.shape[3], slots[slots >= 0]
    # 0x7F is NaN in both 8-bit formats, whose bytes can be written everywhere.
    blank = 0x7F if is_float8(kv.dtype) else torch.nan
    raw(kv)[live // size, LAYER, :, live % size] = blank


def check(out: torch.Tensor, case: Case) -> None:
    """Fail unless `out` is the case's answer, as exactly as its dtype allows."""
    found, inputs = out.double().cpu(), case.inputs
    assert out.dtype == case.written
    assert found.shape == inputs.answer.shape
    assert not found.isnan().any(), f"NaN in rows {found.isnan().any((1, 2)).nonzero().flatten()}"
    excess = ((found - inputs.answer).abs() / inputs.allowed).flatten(1).amax(1)
    worse = [f"row {i}: {x:.3g} × what is allowed" for i, x in enumerate(excess.tolist()) if x > 1]
    assert not worse, (str(case), worse)


def _inputs(case: Case) -> Inputs:
    torch.manual_seed(case.seed)
    rng = random.Random(case.seed)
    size, heads = case.block_size, case.kv_heads * case.group
    tables, slots = _blocks(case, rng)
    blocks = 1 + max((block for table in tables for block in table), default=0)
    kv = torch.full((blocks, LAYERS, 2, size, case.kv_heads, case.head_dim), torch.nan)
    kv = kv.to(case.held)
    tokens = sum(length for length, _ in case.sequences) + case.tail
    # As a fused projection gives it: a view into something wider, so that strides matter.
    fused = (torch.randn(tokens, heads + 1, case.head_dim) * case.reach).to(case.dtype)
    q = fused[:, :-1]
    new_k, new_v = torch.randn(2, tokens, case.kv_heads, case.head_dim).to(case.dtype)
    starts, answers, allowances = [0], [], []
    for (length, context), table in zip(case.sequences, tables, strict=True):
        k, v = _held(case, torch.randn(2, context, case.kv_heads, case.head_dim))
        begin, end = starts[-1], starts[-1] + length
        if context:
            k[context - length :] = _held(case, new_k[begin:end])
            v[context - length :] = _held(case, new_v[begin:end])
        for position in range(context):
            block, offset = table[position // size], position % size
            kv[block, LAYER, 0, offset] = k[position].to(case.held)
            kv[block, LAYER, 1, offset] = v[position].to(case.held)
        answer, allowed = _answer(case, q[begin:end], k, v)
        answers.append(answer)
        allowances.append(allowed)
        starts.append(end)
    blank = torch.zeros(case.tail, heads, case.head_dim, dtype=torch.float64)
    width = 2 + max((len(table) for table in tables), default=0)
    padded = [table + [NOWHERE] * (width - len(table)) for table in tables]
    to, rows = case.device, None
    if case.seats:
        seats = rng.sample(range(len(tables) + 2), len(tables))
        store = [[NOWHERE] * width for _ in range(len(tables) + 2)]
        for seat, table in zip(seats, padded, strict=True):
            store[seat] = table
        padded, rows = store, torch.tensor(seats, dtype=torch.int32, device=to)
    return Inputs(
        fused.to(to)[:, :-1],
        kv.to(to),
        torch.tensor(padded, dtype=torch.int32, device=to),
        torch.tensor(starts, dtype=torch.int32, device=to),
        torch.tensor([c for _, c in case.sequences], dtype=torch.int32, device=to),
        torch.tensor(slots + [-1] * case.tail, dtype=torch.int64, device=to),
        new_k.to(to),
        new_v.to(to),
        torch.cat([*answers, blank]),
        torch.cat([*allowances, blank]) + torch.finfo(torch.float32).tiny,
        rows,
    )


def _held(case: Case, values: torch.Tensor) -> torch.Tensor:
    """Keys or values as attention gets them from the cache."""
    return rounded(values.to(case.dtype), case.held).to(case.dtype)


def _blocks(case: Case, rng: random.Random) -> tuple[list[list[int]], list[int]]:
    """Block tables with nothing in order, and the slots of the tokens of this step."""
    size = case.block_size
    needs = [-(-context // size) for _, context in case.sequences]
    ids = rng.sample(range(sum(needs) + 3), sum(needs))
    tables, slots = [], []
    for (length, context), need in zip(case.sequences, needs, strict=True):
        table, ids = ids[:need], ids[need:]
        tables.append(table)
        for position in range(context - length, context):
            slots.append(table[position // size] * size + position % size if context else -1)
    return tables, slots


def _answer(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence's queries in fp64, and how far off each element may be.

    Weights are rounded before they meet the values, and the result is rounded: an eps of
    Σ weight × |value| for the two. Scores are fp32 sums of head_dim products, and a score
    that is off by x makes its weight off by a factor 1 + x: some eps of fp32 times the largest.
    """
    q, k, v = q.double(), k.double(), v.double()
    length, context = len(q), len(k)
    answer, magnitude = torch.zeros_like(q), torch.zeros_like(q)
    largest = 0.0
    for i in range(length if context else 0):
        position = context - length + i
        first = 0 if case.window is None else max(0, position - case.window + 1)
        for head in range(q.shape[1]):
            keys = k[first : position + 1, head // case.group]
            values = v[first : position + 1, head // case.group]
            products = (keys * q[i, head]).abs().sum(1) * case.scale
            scores = keys @ q[i, head] * case.scale
            largest = max(largest, float(products.max()))
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
                largest = max(largest, case.softcap)
            weights = torch.softmax(scores, 0)
            answer[i, head] = weights @ values
            magnitude[i, head] = weights @ values.abs()
    eps = case.eps + 4 * torch.finfo(torch.float32).eps * (2 + largest)
    return answer, eps * magnitude

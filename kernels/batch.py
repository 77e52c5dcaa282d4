"""What kernels take besides tensors: a step's attention metadata, built once and shared by all
layers, a norm, and sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """The sequences of one step and where their keys and values lie.

    The tokens of a step stand flat, sequence after sequence, **decodes first**: the first
    `num_decodes` sequences have one token each, so that the query of decode i is row i; the
    chunks (prefills whole or in part) follow. A context length counts the tokens of this step,
    and their keys and values must be in the cache before attention reads it (`attend` sees to it).

    Padding, for CUDA graphs: a decode with context 0 and slot -1 reads and writes nothing and
    gets zeros; so do tokens after the last sequence, and those of a chunk with context 0.

    With `longest` the batch is one that a graph repeats with other sequences: it has `num_decodes`
    places for decodes, of which those not taken have context 0, and behind them places for chunks,
    which begin where the decodes that there are end, go on to the last token, and may be empty.

    The tensors are on the device that computes. To reuse them over steps, as CUDA graphs must,
    fill them in place and make a new AttentionBatch around them; on the CPU what is derived from
    them is kept here, so one batch is good for one step.
    """

    block_tables: torch.Tensor
    """[rows, most blocks] int32; what stands past a sequence's last block is never read."""
    query_start: torch.Tensor
    """[sequences + 1] int32: where each sequence's tokens begin, and the end of the last."""
    context_lens: torch.Tensor
    """[sequences] int32."""
    slots: torch.Tensor
    """[tokens] int64: block × block size + offset for each token's key and value; -1: nowhere."""
    num_decodes: int
    chunks: tuple[tuple[int, int], ...] = ()
    """(tokens in this step, context length) of each sequence after the decodes, in their order."""
    rows: torch.Tensor | None = None
    """[sequences] int32: the row of `block_tables` that each sequence's blocks stand in, some row
    for padding; None: sequence i has row i. So tables may stay on the device, in places of their
    own, and row numbers are all that a step brings along."""
    longest: int = 0
    """Of a batch for a graph, with no `chunks`: the most tokens of a chunk."""
    decode_contexts: Sequence[int] | None = None
    """Context lengths of the decodes on the host, if it knows them."""
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def build(
        cls,
        tables: Sequence[Sequence[int]],
        computed: Sequence[int],
        lengths: Sequence[int],
        *,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """A batch from plain lists, one entry a sequence.

        `tables` are block tables, at least as long as needed; `computed` how many tokens are in
        the cache already; `lengths` how many this step computes. The leading sequences of length
        1 are taken as decodes.

        >>> batch = AttentionBatch.build([[7, 2], [5]], [4, 0], [1, 3], block_size=4)
        >>> batch.num_decodes, batch.chunks, batch.slots.tolist()
        (1, ((3, 3),), [8, 20, 21, 22])
        """
        starts, slots, padded = [0], list[int](), list[list[int]]()
        contexts = [done + length for done, length in zip(computed, lengths, strict=True)]
        width = max((-(-context // block_size) for context in contexts), default=0)
        for table, done, context in zip(tables, computed, contexts, strict=True):
            starts.append(starts[-1] + context - done)
            slots += _slots(table, done, context, block_size)
            row = list(table[:width])
            padded.append(row + [0] * (width - len(row)))
        decodes = next((i for i, length in enumerate(lengths) if length != 1), len(lengths))
        return cls(
            torch.tensor(padded, dtype=torch.int32, device=device).view(len(padded), width),
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(contexts, dtype=torch.int32, device=device),
            torch.tensor(slots, dtype=torch.int64, device=device),
            decodes,
            tuple(zip(lengths[decodes:], contexts[decodes:], strict=True)),
        )

    def tables(self, part: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`block_tables` and `rows` of some of the sequences."""
        if self.rows is None:
            return self.block_tables[part], None
        return self.block_tables, self.rows[part]

    @cached_property
    def decodes(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`block_tables`, `context_lens` and `rows` of the decodes."""
        part = slice(0, self.num_decodes)
        tables, rows = self.tables(part)
        return tables, self.context_lens[part], rows

    @cached_property
    def spans(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`block_tables`, `query_start`, `context_lens` and `rows` of the chunks."""
        part = slice(self.num_decodes, None)
        tables, rows = self.tables(part)
        return tables, self.query_start[part], self.context_lens[part], rows

    @cached_property
    def known_decode_contexts(self) -> Sequence[int]:
        """Context lengths of the decodes on the host; where they are not known they are read back,
        for which the host waits."""
        if self.decode_contexts is None:
            known: list[int] = self.decodes[1].tolist()
            return known
        return self.decode_contexts

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the sequences; the flat batch may be longer, with padding."""
        return self.num_decodes + sum(length for length, _ in self.chunks)

    @cached_property
    def chunked(self) -> bool:
        """Whether there are chunks, or may be."""
        return bool(self.chunks or self.longest)

    @cached_property
    def max_query_len(self) -> int:
        """Tokens of the longest chunk."""
        return self.longest or max((length for length, _ in self.chunks), default=1)

    @cached_property
    def max_context(self) -> int | None:
        """The longest context of a chunk; None for a graph's batch, as its next one may differ."""
        return max((context for _, context in self.chunks), default=None)

    def covers(self, tokens: int) -> bool:
        """Whether each of so many tokens belongs to a sequence, or to padding with a place."""
        return bool(self.longest) or tokens == self.num_tokens

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `make()`, computed once for each `key`."""
        if key not in self._memo:
            self._memo[key] = make()
        value: T = self._memo[key]
        return value


def _slots(table: Sequence[int], begin: int, end: int, block_size: int) -> list[int]:
    """The slots of positions [begin, end)."""
    if end - begin == 1:
        return [table[begin // block_size] * block_size + begin % block_size]
    slots: list[int] = []
    for i in range(begin // block_size, -(-end // block_size)):
        first, last = max(begin - i * block_size, 0), min(end - i * block_size, block_size)
        slots += range(table[i] * block_size + first, table[i] * block_size + last)
    return slots


class Attention(Protocol):
    """Kernels that attend: `ops.attend_cached`, ours, or another package's (`others.py`)."""

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """As `ops.attend_cached`."""


class RowNorm(NamedTuple):
    """An RMS norm of tokens whose squares are known: x / √(mean of x² + eps) × weight, token by
    token."""

    weight: torch.Tensor
    """[size]"""
    squares: torch.Tensor
    """[tokens, any number]: sums of x² in float32, which together are those of a token."""
    eps: float


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters, one value per row; a row without a filter has its neutral value.

    Applied in transformers' order: temperature, top-k, top-p of the remaining tokens, min-p.
    """

    temperature: torch.Tensor
    """[rows] float32; 0 for a greedy row, whose filters are ignored."""
    top_k: torch.Tensor
    """[rows] int32: the k largest stay, and what equals the last of them; 0 for all."""
    top_p: torch.Tensor
    """[rows] float64: the smallest set of most probable tokens that reaches p; 1 for all."""
    min_p: torch.Tensor
    """[rows] float32: the logarithm of a token's least probability relative to the most probable
    token's; -inf for all."""
    some_top_k: bool
    """Whether any row uses it, as with the other filters; known on the host, to skip launches."""
    some_top_p: bool
    some_min_p: bool

    @property
    def filtered(self) -> bool:
        """Whether any row has a filter."""
        return self.some_top_k or self.some_top_p or self.some_min_p

"""Step inputs on the device: block tables, packed copies, and the batch of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedsim.engine.step_inputs import (
    BatchColumns,
    Column,
    MixedLayout,
    TableChanges,
    store_rows,
)
from pagedsim.kernels.batch import AttentionBatch


def set_entries(tables: torch.Tensor, places: torch.Tensor, blocks: torch.Tensor) -> None:
    """Set entries of block tables by `TableChanges`; all are on one device."""
    if len(places):
        tables.view(-1).index_copy_(0, places, blocks)


ALIGNMENT = 16
"""Bytes: kernels are compiled for addresses that are multiples of it, which are read faster."""
CHANGE = 12
"""Bytes of a change: a place and a block."""
ROOM = 512
"""Table changes with room in the buffer of a step of decodes, beside one per sequence."""


class TransferBuffer:
    """A host buffer and its copy on the device, which is the same buffer on a CPU."""

    def __init__(self, device: torch.device, room: int) -> None:
        """`room` in bytes."""
        pinned = device.type == "cuda"
        self.host = torch.empty(room, dtype=torch.uint8, pin_memory=pinned)
        self.on_device = self.host
        self._copied = None
        if device.type != "cpu":
            self.on_device = torch.empty(room, dtype=torch.uint8, device=device)
        if pinned:
            self._copied = torch.cuda.Event()

    def wait(self) -> None:
        """Wait until the host buffer may be written: until the last copy is done."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, size: int) -> None:
        """Copy the first `size` bytes to the device asynchronously."""
        if self.on_device is not self.host:
            self.on_device[:size].copy_(self.host[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class PackedCopies:
    """Copies several tensors to the device at once, through a buffer that is kept."""

    def __init__(self, device: torch.device, room: int = 1 << 16) -> None:
        """`room`: initial bytes."""
        self.device = device
        self._crossing = TransferBuffer(device, room)

    def place(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the tensors in one asynchronous copy; the result is valid until the next call."""
        offsets, size = [], 0
        for tensor in tensors:
            offsets.append(size)
            size += aligned(tensor.nbytes)
        self._crossing.wait()
        if size > len(self._crossing.host):
            self._crossing = TransferBuffer(self.device, 2 * size)
        host, on_device = self._crossing.host, self._crossing.on_device
        for offset, tensor in zip(offsets, tensors, strict=True):
            _part(host, offset, tensor).copy_(tensor)
        self._crossing.send(size)
        return [_part(on_device, at, tensor) for at, tensor in zip(offsets, tensors, strict=True)]


class Batch(NamedTuple):
    """The inputs of one forward pass."""

    input_ids: torch.Tensor
    """[tokens] int64."""
    positions: torch.Tensor
    """[tokens] int64."""
    attention: AttentionBatch
    logits_at: torch.Tensor
    """[rows] int64: the tokens after which a token is sampled."""

    @classmethod
    def of(
        cls,
        computing: BatchColumns,
        mixed: MixedLayout,
        changes: TableChanges,
        tables: torch.Tensor,
        inputs: PackedCopies | None = None,
    ) -> Batch:
        """Make the batch on the device of `tables`, and set their `changes`.

        Copied through `inputs`, it is valid until their next use; without `inputs` all is on the
        host, over the same memory where types are equal.
        """
        columns = [
            *map(torch.from_numpy, (computing.ids, computing.positions, mixed.sampling)),
            torch.from_numpy(computing.rows),
            torch.from_numpy(mixed.starts).int(),
            torch.from_numpy(computing.contexts).int(),
            torch.from_numpy(computing.slots),
            *map(torch.from_numpy, changes),
        ]
        if inputs is not None:
            columns = inputs.place(columns)
        ids, positions, at, rows, starts, contexts, slots, *changed = columns
        set_entries(tables, *changed)
        attention = AttentionBatch(
            tables, starts, contexts, slots, mixed.decodes, mixed.chunks, rows,
            decode_contexts=computing.contexts[: mixed.decodes].tolist(),
        )  # fmt: skip
        return cls(ids, positions, attention, at)


class Columns:
    """Columns of numbers at fixed addresses on the device, which cross in one copy, together with
    changes of block tables."""

    def __init__(
        self, tables: torch.Tensor, room: int, columns: Sequence[tuple[int, torch.dtype]]
    ) -> None:
        """Of so many elements each; most steps have `room` changes of `tables` or fewer."""
        self._tables, self._room = tables, room
        sizes = [count * dtype.itemsize for count, dtype in columns]
        *begins, self._packed = np.cumsum([0, *map(aligned, sizes)]).tolist()
        self._crossing = TransferBuffer(tables.device, self._packed + aligned(CHANGE * room))
        self._crossing.host.zero_()
        self._many = PackedCopies(tables.device)  # table changes beyond the room
        host, self.on_device = (
            [
                buffer[begin : begin + size].view(dtype)
                for begin, size, (_, dtype) in zip(begins, sizes, columns, strict=True)
            ]
            for buffer in (self._crossing.host, self._crossing.on_device)
        )
        self.host = [column.numpy() for column in host]
        # Behind them table changes: first all places, of 8 bytes, then all blocks, of 4.
        host, self._changed = (
            [buffer[self._packed :].view(dtype) for dtype in (torch.int64, torch.int32)]
            for buffer in (self._crossing.host, self._crossing.on_device)
        )
        self._places, self._blocks = (column.numpy() for column in host)

    @property
    def nbytes(self) -> int:
        return self._crossing.on_device.nbytes

    def wait(self) -> None:
        """Wait until the host's columns may be written."""
        self._crossing.wait()

    def send(self, changes: TableChanges) -> None:
        """Copy all columns to the device, and set the `changes` of the tables."""
        changed = len(changes.places)
        if not 0 < changed <= self._room:
            self._crossing.send(self._packed)
            if changed:
                set_entries(self._tables, *self._many.place([*map(torch.from_numpy, changes)]))
            return
        blocks = slice(2 * changed, 3 * changed)
        self._places[:changed], self._blocks[blocks] = changes
        self._crossing.send(self._packed + CHANGE * changed)
        places, block_ids = self._changed
        set_entries(self._tables, places[:changed], block_ids[blocks])


NO_CHANGES = TableChanges(np.zeros(0, np.int64), np.zeros(0, np.int32))


class DecodeInputs:
    """The inputs of steps of decodes alone, at fixed addresses for CUDA graphs.

    Rows behind those that decode are padding, which reads and writes nothing: context 0, slot -1.
    """

    def __init__(self, device: torch.device, seqs: int, blocks: int) -> None:
        """For `seqs` sequences of `blocks` blocks at most."""
        self.tables = torch.zeros(store_rows(seqs), blocks, dtype=torch.int32, device=device)
        """[sequences, blocks]: rows as `TableRows` assigns them."""
        long, short = (seqs, torch.int64), (seqs, torch.int32)
        self._columns = Columns(self.tables, seqs + ROOM, [long, long, long, short, short])
        self._columns.host[2][:] = -1
        self._columns.send(NO_CHANGES)
        self._starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)
        self._wanted = torch.arange(seqs, device=device)
        self._views: dict[int, list[torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return self._columns.nbytes + self.tables.nbytes

    def put(
        self, decoding: BatchColumns, changes: TableChanges, picked: torch.Tensor | None = None
    ) -> None:
        """Write the rows of a step, and padding behind them; `picked` as in `feed`."""
        count = len(decoding.ids)
        self._columns.wait()
        ids, positions, slots, contexts, rows = self._columns.host
        ids[:count], ids[count:] = decoding.ids, 0
        positions[:count] = decoding.positions
        slots[:count], slots[count:] = decoding.slots, -1
        contexts[:count], contexts[count:] = decoding.contexts, 0
        rows[:count] = decoding.rows
        self._columns.send(changes)
        feed(self._columns.on_device[0][:count], decoding.ids, picked)

    def batch(self, count: int, decoding: BatchColumns | None = None) -> Batch:
        """The first `count` rows, all of which need logits; `decoding` as in `put`, if known."""
        if count not in self._views:
            columns = [column[:count] for column in (*self._columns.on_device, self._wanted)]
            self._views[count] = [*columns, self._starts[: count + 1]]
        ids, positions, slots, contexts, rows, wanted, starts = self._views[count]
        known = None if decoding is None else decoding.contexts.tolist()
        batch = AttentionBatch(
            self.tables, starts, contexts, slots, count, rows=rows, decode_contexts=known
        )
        return Batch(ids, positions, batch, wanted)


class Shape(NamedTuple):
    """The most that a graph of steps with prompts holds."""

    tokens: int
    seqs: int
    """Sequences, no more than tokens: there are so many places for decodes and for chunks."""

    def __str__(self) -> str:
        return f"{self.tokens} tokens of {self.seqs} sequences"


class PromptInputs:
    """The inputs of steps with chunks, at fixed addresses for CUDA graphs (`AttentionBatch`).

    Behind a step's tokens is padding, a chunk with context 0; places for chunks behind that are
    empty, at the end of all tokens.
    """

    def __init__(self, tables: torch.Tensor, tokens: int, seqs: int) -> None:
        """For so many tokens and sequences at most; `tables` are those of `DecodeInputs`."""
        self._tables = tables
        places = 2 * seqs + 1
        long, short = [(tokens, torch.int64)] * 3, [(n, torch.int32) for n in (places + 1, places)]
        columns = [*long, (seqs, torch.int64), *short, short[1]]
        self._columns = Columns(tables, seqs + ROOM, columns)

    @property
    def nbytes(self) -> int:
        return self._columns.nbytes

    def put(
        self,
        shape: Shape,
        computing: BatchColumns,
        mixed: MixedLayout,
        changes: TableChanges,
        picked: torch.Tensor | None = None,
    ) -> None:
        """Write a step that `shape` holds; `picked` as in `feed`."""
        tokens, seqs = shape
        count, decodes, wanted = len(computing.ids), mixed.decodes, len(mixed.sampling)
        end = seqs + len(computing.contexts) - decodes  # of the places for chunks that are taken
        self._columns.wait()
        ids, positions, slots, sampling, starts, contexts, rows = self._columns.host
        ids[:count], ids[count:tokens] = computing.ids, 0
        positions[:count], positions[count:tokens] = computing.positions, 0
        slots[:count], slots[count:tokens] = computing.slots, -1
        sampling[:wanted], sampling[wanted:seqs] = mixed.sampling, 0
        starts[seqs : end + 1], starts[end + 1 :] = mixed.starts[decodes:], tokens
        contexts[:decodes], contexts[decodes:seqs] = computing.contexts[:decodes], 0
        contexts[seqs:end], contexts[end:] = computing.contexts[decodes:], 0
        rows[:decodes], rows[seqs:end] = computing.rows[:decodes], computing.rows[decodes:]
        self._columns.send(changes)
        feed(self._columns.on_device[0][:count], computing.ids, picked)

    def clear(self, shape: Shape) -> None:
        """Write padding alone."""
        none, row = np.zeros(0, np.int64), np.zeros(0, np.int32)
        layout = MixedLayout(np.zeros(1, np.int64), none, 0, ())
        self.put(shape, BatchColumns(none, none, none, none, row), layout, NO_CHANGES)

    def batch(self, shape: Shape) -> Batch:
        """The batch of a graph."""
        tokens, seqs = shape
        ids, positions, slots, sampling, starts, contexts, rows = self._columns.on_device
        places = 2 * seqs + 1
        attention = AttentionBatch(
            self._tables, starts[: places + 1], contexts[:places], slots[:tokens], seqs,
            rows=rows[:places], longest=tokens,
        )  # fmt: skip
        return Batch(ids[:tokens], positions[:tokens], attention, sampling[:seqs])


def feed(ids: torch.Tensor, known: Column, picked: torch.Tensor | None) -> None:
    """Put tokens that are on the device alone into `ids`: `picked[i]` where `known`, the ids on the
    host, has ~i."""
    if not len(known) or known.min() >= 0:
        return
    if picked is None:
        raise ValueError("the last step has picked no tokens to go on from")
    if np.array_equal(
        known, ~np.arange(len(known))
    ):  # as in most steps: the same in the same order
        ids.copy_(picked[: len(known)])
        return
    new = picked[(~ids).clamp_(min=0)]
    torch.where(ids < 0, new, ids, out=ids)


def aligned(size: int) -> int:
    """`size` bytes, rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _part(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes from `offset` on as a tensor of another's type and shape."""
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)

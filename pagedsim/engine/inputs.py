"""Step inputs on the device: block tables, packed copies, and the batch of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedsim.engine.step_inputs import BatchColumns, Column, MixedLayout, TableChanges, store_rows
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


class DecodeInputs:
    """The inputs of steps of decodes alone, at fixed addresses for CUDA graphs.

    Rows behind those that decode are padding, which reads and writes nothing: context 0, slot -1.
    """

    def __init__(self, device: torch.device, seqs: int, blocks: int) -> None:
        """For `seqs` sequences of `blocks` blocks at most."""
        self.tables = torch.zeros(store_rows(seqs), blocks, dtype=torch.int32, device=device)
        """[sequences, blocks]: rows as `TableRows` assigns them."""
        dtypes = (torch.int64, torch.int64, torch.int64, torch.int32, torch.int32)
        sizes = [seqs * dtype.itemsize for dtype in dtypes]
        ends = np.cumsum([aligned(size) for size in sizes]).tolist()
        self._packed = ends[-1]
        self._room = seqs + ROOM
        self._crossing = TransferBuffer(device, self._packed + aligned(CHANGE * self._room))
        self._many = PackedCopies(device)  # table changes beyond the room
        host_columns, columns = (
            [
                buffer[begin : begin + size].view(dtype)
                for begin, size, dtype in zip([0, *ends], sizes, dtypes, strict=False)
            ]
            for buffer in (self._crossing.host, self._crossing.on_device)
        )
        self._ids, self._positions, self._slots, self._contexts, self._rows = (
            column.numpy() for column in host_columns
        )
        self._crossing.host.zero_()
        self._slots[:] = -1
        self._crossing.send(self._packed)
        self._columns = columns
        # Behind them table changes: first all places, of 8 bytes, then all blocks, of 4.
        host_columns, self._changed = (
            [buffer[self._packed :].view(dtype) for dtype in (torch.int64, torch.int32)]
            for buffer in (self._crossing.host, self._crossing.on_device)
        )
        self._places, self._blocks = (column.numpy() for column in host_columns)
        self._starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)
        self._wanted = torch.arange(seqs, device=device)
        self._views: dict[int, list[torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return self._crossing.on_device.nbytes + self.tables.nbytes

    def put(
        self, decoding: BatchColumns, changes: TableChanges, picked: torch.Tensor | None = None
    ) -> None:
        """Write the rows of a step, and padding behind them; `picked` as in `feed`."""
        count, changed = len(decoding.ids), len(changes.places)
        fits = changed <= self._room
        if not fits:
            set_entries(self.tables, *self._many.place([*map(torch.from_numpy, changes)]))
        self._crossing.wait()
        self._ids[:count], self._ids[count:] = decoding.ids, 0
        self._positions[:count] = decoding.positions
        self._slots[:count], self._slots[count:] = decoding.slots, -1
        self._contexts[:count], self._contexts[count:] = decoding.contexts, 0
        self._rows[:count] = decoding.rows
        if changed and fits:
            blocks = slice(2 * changed, 3 * changed)
            self._places[:changed], self._blocks[blocks] = changes
            self._crossing.send(self._packed + CHANGE * changed)
            places, block_ids = self._changed
            set_entries(self.tables, places[:changed], block_ids[blocks])
        else:
            self._crossing.send(self._packed)
        feed(self._columns[0][:count], decoding.ids, picked)

    def batch(self, count: int) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch, torch.Tensor]:
        """The first `count` rows for `LoadedModel.forward`: ids, positions, the batch, and the rows
        that need logits, which are all."""
        if count not in self._views:
            columns = [column[:count] for column in (*self._columns, self._wanted)]
            self._views[count] = [*columns, self._starts[: count + 1]]
        ids, positions, slots, contexts, rows, wanted, starts = self._views[count]
        batch = AttentionBatch(self.tables, starts, contexts, slots, count, rows=rows)
        return ids, positions, batch, wanted


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
            tables, starts, contexts, slots, mixed.decodes, mixed.chunks, rows
        )
        return cls(ids, positions, attention, at)

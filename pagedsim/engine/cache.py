"""The KV cache: blocks on the GPU and in pinned host memory, and copies of whole blocks.

On a GPU both directions of the bus share one queue beside the computation's:

    computation  ── step n ──●(a)                   copies ── step n+1 ──  wait(c) ── step n+2
    bus                       └ wait(a) ── out ──────────────────────●(c)

Copies read after the step that wrote has ended (a). Swapping out goes on beside the computation,
and a block is overwritten after it was read: a step waits (c) if it writes to a block that is still
going out. So blocks that the same step frees and writes go first, and it waits for these alone. The
step waits for blocks that come in, since it reads them at once.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch

from pagedsim.core import StepPlan
from pagedsim.core.memory import Pairs
from pagedsim.engine.runtime import require_host, sent
from pagedsim.engine.step_inputs import StepInputs
from pagedsim.kernels.float8 import FORMATS
from pagedsim.kernels.ops import copy_blocks


def cache_dtype(name: str, model: torch.dtype) -> torch.dtype:
    """Resolve `kv_cache_dtype` for a model that computes in `model`."""
    return FORMATS.get("fp8_e4m3" if name == "fp8" else name, model)


@dataclass(frozen=True)
class CacheShape:
    """The layout of one block.

    All layers' keys and values of `block_size` tokens lie in one contiguous run, so that a swap
    is one copy a block.
    """

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    planes: int = 2
    """Keys and values; 1 where both are one vector a token (MLA)."""

    @property
    def block(self) -> tuple[int, int, int, int, int]:
        return self.layers, self.planes, self.block_size, self.kv_heads, self.head_dim

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block) * self.dtype.itemsize

    def blank(self, blocks: int, device: torch.device) -> torch.Tensor:
        """`blocks` blocks of zeros.

        Zeros, since unwritten elements are masked by a factor of 0, and 0 × NaN is NaN. They are
        made as bytes: torch does not fill 8-bit floats everywhere.
        """
        bytes_of_them = torch.zeros(blocks * self.block_bytes, dtype=torch.uint8, device=device)
        return bytes_of_them.view(self.dtype).view(blocks, *self.block)


class Cache:
    """Two block pools: `gpu`, read by attention, and `cpu`, for swapped requests or a host tier.

    Without a GPU both are in host memory, and attention still reads `gpu`.
    """

    def __init__(
        self, shape: CacheShape, blocks: int, cpu_blocks: int, device: torch.device
    ) -> None:
        self.shape = shape
        self.gpu = shape.blank(blocks, device)
        # Uninitialised: blocks are written whole before they are read, and clearing gigabytes would
        # delay the start.
        room = cpu_blocks, *shape.block
        if device.type == "cuda":
            self.cpu = pinned(room, shape.dtype, device, owner=self)
        else:
            self.cpu = torch.empty(room, dtype=shape.dtype)


def pinned(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, owner: object
) -> torch.Tensor:
    """An uninitialised pinned host tensor, registered for as long as `owner` lives.

    Falls back to torch's pinned allocator if CUDA cannot register memory and enough is available.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype)
    if not tensor.nbytes:
        return tensor
    if int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0:
        weakref.finalize(owner, _release, tensor, device)
        return tensor
    _forget(device)
    taken = 1 << (tensor.nbytes - 1).bit_length()
    del tensor
    what = "blocks on the host, in pinned memory of a power of two,"
    require_host(what, taken, "lower swap_space_gib, cpu_blocks or the host tier of offload")
    return _of_torch(shape, dtype)


def _forget(device: torch.device) -> None:
    """Clear CUDA's sticky error, which the next call would report."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


def _release(tensor: torch.Tensor, device: torch.device) -> None:
    """Unregister, once no copy is in flight."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


def _of_torch(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


class Mark(Protocol):
    """A position in a copy queue, at the end of some work."""

    def query(self) -> bool:
        """Whether all earlier work is done; does not block."""

    def wait(self) -> None:
        """Block until it is done."""

    @property
    def seconds(self) -> float:
        """How long the work took, once it is done."""


@dataclass(frozen=True)
class _Passed:
    seconds: float

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        """It is done."""


class CudaMark:
    """Two events on a stream, around the work."""

    def __init__(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        self._begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            self._begin.record()
            work()
            self.end.record()

    def query(self) -> bool:
        return self.end.query()

    def wait(self) -> None:
        self.end.synchronize()

    @property
    def seconds(self) -> float:
        return self._begin.elapsed_time(self.end) / 1000


class Bus:
    """A queue of block copies, here within host memory: all work is done at once."""

    def follow(self) -> None:
        """Order following copies after all computation queued so far."""

    def queue(self, work: Callable[[], None]) -> Mark:
        """Queue `work` and mark its end."""
        begin = time.perf_counter()
        work()
        return _Passed(time.perf_counter() - begin)

    def hold(self, mark: Mark) -> None:
        """Order following computation after a mark."""


class CudaBus(Bus):
    """A CUDA stream for copies."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.stream = torch.cuda.Stream(pool.device)
        pool.record_stream(self.stream)  # copies may outlive the pool

    def follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def queue(self, work: Callable[[], None]) -> Mark:
        return CudaMark(self.stream, work)

    def hold(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        torch.cuda.current_stream(self.stream.device).wait_event(mark.end)


def bus_of(cache: Cache) -> Bus:
    """A new queue for copies from and to a cache."""
    return CudaBus(cache.gpu) if cache.gpu.is_cuda else Bus()


class Mover:
    """Executes the block moves of a step, in this order."""

    def __init__(self, cache: Cache, layout: str = "block", bus: Bus | None = None) -> None:
        """`layout`: the unit of one copy over the bus, a key of `LAYOUTS`."""
        self.cache = cache
        self.copy = LAYOUTS[layout]
        self._bus = bus or bus_of(cache)
        self._going: list[tuple[Mark, set[int]]] = []
        """Blocks that may still be read by a swap-out, in the order of the bus."""

    def move(
        self, moves: StepPlan | StepInputs, written: Callable[[], Collection[int]] | None = None
    ) -> None:
        """Execute the moves; computation that is queued next is ordered after those it depends on.

        `written` returns the blocks that it writes to; without it these may be any.
        """
        if moves.swap_out or self._going:
            writes = None if written is None else {*written(), *moves.copies}
            if moves.swap_out:
                self._out(moves.swap_out, writes)
            self._wait(writes)
        if moves.copies:
            device = self.cache.gpu.device
            sources, targets = list(moves.copies.values()), list(moves.copies)
            copy_blocks(
                self.cache.gpu,
                sent(torch.tensor(sources), device),
                sent(torch.tensor(targets), device),
            )
        if moves.swap_in:
            self._bus.follow()
            copy = partial(self.copy, self.cache.cpu, self.cache.gpu, moves.swap_in)
            self._bus.hold(self._bus.queue(copy))
            self._going.clear()  # earlier swap-outs are done by then

    def _out(self, pairs: Pairs, writes: set[int] | None) -> None:
        self._bus.follow()
        soon = pairs if writes is None else [pair for pair in pairs if pair[0] in writes]
        later = [] if writes is None else [pair for pair in pairs if pair[0] not in writes]
        for some in (soon, later):
            if some:
                copy = partial(self.copy, self.cache.gpu, self.cache.cpu, some)
                self._going.append((self._bus.queue(copy), {block for block, _ in some}))

    def _wait(self, writes: set[int] | None) -> None:
        """Order the computation after swap-outs of blocks that it overwrites, and all before."""
        while self._going and self._going[0][0].query():
            del self._going[0]
        for place in range(len(self._going) - 1, -1, -1):
            mark, blocks = self._going[place]
            if writes is None or not writes.isdisjoint(blocks):
                self._bus.hold(mark)
                del self._going[: place + 1]
                return


def copy_runs(source: torch.Tensor, target: torch.Tensor, pairs: Pairs) -> None:
    """Copy blocks; those that are consecutive on both sides in one copy."""
    for begin, end in runs(pairs):
        (origin, place), count = pairs[begin], end - begin
        target[place : place + count].copy_(source[origin : origin + count], non_blocking=True)


def copy_pieces(source: torch.Tensor, target: torch.Tensor, pairs: Pairs) -> None:
    """Copy keys and values of each layer separately, as engines with a pool a layer do (vLLM)."""
    for origin, place in pairs:
        for piece, room in zip(
            source[origin].flatten(0, 1), target[place].flatten(0, 1), strict=True
        ):
            room.copy_(piece, non_blocking=True)


LAYOUTS: Mapping[str, Callable[[torch.Tensor, torch.Tensor, Pairs], None]] = {
    "block": copy_runs,
    "layer": copy_pieces,
}


def runs(pairs: Pairs) -> list[tuple[int, int]]:
    """Ranges [begin, end) of pairs that are consecutive on both sides.

    >>> runs([(4, 0), (5, 1), (9, 2), (3, 7)])
    [(0, 2), (2, 3), (3, 4)]
    """
    cuts = [
        i + 1
        for i, (pair, other) in enumerate(pairwise(pairs))
        if (other[0] - pair[0], other[1] - pair[1]) != (1, 1)
    ]
    bounds = [0, *cuts, len(pairs)]
    return list(pairwise(bounds))

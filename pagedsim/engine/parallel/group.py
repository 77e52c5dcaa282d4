"""Collectives among the ranks of a model: all-reduce, gather of logits, broadcast of tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

TIMEOUT = timedelta(minutes=10)
"""Of a collective."""


class RankLost(RuntimeError):
    """Another rank has exited or does not respond."""


class RankGroup:
    """One rank among `size`; NCCL between GPUs, gloo between CPUs.

    torch's default process group stays free for other uses. All ranks must call the same methods in
    the same order, with tensors of the same shapes. On a GPU what they do is queued on the current
    stream, and may be captured.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        """Usable once all ranks have called `meet`."""
        self.rank, self.size = rank, size
        self._sum, self._broadcast, self._gather = (
            dist.AllreduceOptions(),
            dist.BroadcastOptions(),
            dist.GatherOptions(),
        )
        self._sum.asyncOp = self._broadcast.asyncOp = self._gather.asyncOp = False
        self._broadcast.rootRank = self._gather.rootRank = 0
        with _as_rank_lost():
            self._group: Any = (_nccl if device.type == "cuda" else _gloo)(store, rank, size)

    def meet(self, device: torch.device) -> None:
        """Wait for all ranks. Libraries allocate for each collective now, neither from the memory
        that is shared out later nor while a graph is captured."""
        x = torch.zeros(1, 1, device=device)
        self.sum(x)
        self.broadcast(x)
        self.gather(x, self.size)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce x in place."""
        if x.numel():  # a step may sample nothing
            with _as_rank_lost():
                self._group.allreduce([x], self._sum).wait()
        return x

    def broadcast(self, x: torch.Tensor) -> None:
        """Broadcast x from rank 0, in place."""
        with _as_rank_lost():
            self._group.broadcast([x], self._broadcast).wait()

    def gather(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """All ranks' columns side by side, `width` in all, on rank 0.

        The last ranks may have fewer columns than the others. Other ranks get a tensor of the same
        shape with undefined content.
        """
        if not len(part):
            return part.new_empty(0, width)
        columns = -(-width // self.size)
        if part.shape[1] < columns:
            part = torch.nn.functional.pad(part, (0, columns - part.shape[1]))
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        with _as_rank_lost():
            self._group.gather([parts] if parts else [], [part], self._gather).wait()
        if not parts:
            return part.new_empty(len(part), width)
        return torch.cat(parts, 1)[:, :width]

    def abort(self) -> None:
        """Abort pending collectives, from any thread; the group is unusable afterwards."""
        self._group.abort()


@contextmanager
def _as_rank_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(str(error).splitlines()[0]) from error


def _gloo(store: Store, rank: int, size: int) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    # All ranks are on this machine, whatever its host name resolves to.
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout, options._threads = TIMEOUT, 2
    return gloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int) -> Any:
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # where torch has it

    options = ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"):
        return ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Within, these variables are set. torch would end the whole process if a rank does not
    respond; instead a listener thread reports it (`ranks.py`)."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

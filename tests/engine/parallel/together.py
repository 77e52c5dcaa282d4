"""The ranks of a model as threads of one process, for what needs no processes to be tried."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import HashStore

from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.models.shard import Shard
from pagedsim.engine.parallel.group import RankGroup
from pagedsim.engine.parallel.worker import SILENT, Worker

T = TypeVar("T")


@contextmanager
def groups(size: int) -> Iterator[list[RankGroup]]:
    """A group for each rank."""
    store, cpu = HashStore(), torch.device("cpu")
    yield at_once(lambda rank: RankGroup(store, rank, size, cpu), size)


def at_once(work: Callable[[int], T], size: int) -> list[T]:
    """What all ranks do, side by side."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def shards(model: Any, made: list[RankGroup], **settings: Any) -> list[LoadedModel]:
    """The model, split over groups."""
    models = []
    for group in made:
        shard = load_model(model, shard=Shard(group.rank, group.size), **settings)
        assert shard.native is not None
        shard.native.group = group
        models.append(shard)
    return models


class OneProcess:
    """As `Ranks`, with one other rank that is a thread: what it does can be looked at."""

    gone = False

    def __init__(self, model: Any, made: list[RankGroup], **settings: Any) -> None:
        here, there = shards(model, made, **settings)
        self.worker = Worker(1)
        self.worker.model, self.worker.device = there, torch.device("cpu")
        self.model = replace(here, ranks=self)  # type: ignore[arg-type]
        self._told: SimpleQueue[Any] = SimpleQueue()
        self._said: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (told := self._told.get()) is not None:
            result = self.worker.execute(*told)
            if told[0] not in SILENT:
                self._said.put(result)

    @contextmanager
    def together(self, name: str, *values: Any, **settings: Any) -> Iterator[None]:
        self._told.put((name, values, settings))
        yield

    def replies(self) -> list[Any]:
        return [self._said.get()]

    def check(self) -> None: ...

    def close(self) -> None:
        self._told.put(None)

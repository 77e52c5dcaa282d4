"""The ranks of a model as threads of one process, for what needs no processes to be tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import HashStore

from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.models.share import Share
from pagedsim.engine.parallel.group import Group

T = TypeVar("T")


@contextmanager
def groups(size: int) -> Iterator[list[Group]]:
    """A group for each rank."""
    store, cpu = HashStore(), torch.device("cpu")
    yield at_once(lambda rank: Group(store, rank, size, cpu), size)


def at_once(work: Callable[[int], T], size: int) -> list[T]:
    """What all ranks do, side by side."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def shares(model: Any, made: list[Group], **settings: Any) -> list[LoadedModel]:
    """The model, split over groups."""
    models = []
    for group in made:
        share = load_model(model, share=Share(group.rank, group.size), **settings)
        assert share.native is not None
        share.native.group = group
        models.append(share)
    return models

"""The process of a rank other than 0: executes rank 0's commands, and exits with it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore

from pagedsim.core import PagedsimError
from pagedsim.engine.assemble import load_on, new_cache
from pagedsim.engine.cache import CacheShape
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.models.shard import Shard
from pagedsim.engine.parallel.group import RankGroup, RankLost
from pagedsim.engine.parallel.ranks import CONNECT_TIMEOUT, EXIT_LOST, HOST, Failure
from pagedsim.engine.profile import fitting_blocks
from pagedsim.engine.runner import Runner
from pagedsim.engine.step_inputs import StepInputs

POLL_S = 0.5
"""Between two checks that the parent process exists."""


class Worker:
    """The commands of rank 0 beside those of `Runner`; a method's result is its reply, except for
    those in `SILENT`."""

    model: LoadedModel
    runner: Runner | None = None

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def execute(self, name: str, values: Sequence[Any], settings: Mapping[str, Any]) -> Any:
        """Execute a command; returns its result."""
        executor = self if hasattr(self, name) else self.runner
        return getattr(executor, name)(*values, **settings)

    def start(self, device: str, threads: int) -> None:
        """Set the device and the threads."""
        self.device = torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(self.rank)
            self.device = torch.device(device, self.rank)
        torch.set_num_threads(threads)

    def join(self, size: int, port: int) -> None:
        """Connect to the other ranks."""
        store = TCPStore(HOST, port, size, False, CONNECT_TIMEOUT)
        self.group = RankGroup(store, self.rank, size, self.device)
        self.group.meet(self.device)

    def load(self, model: Any, settings: dict[str, Any]) -> None:
        """Load a shard of a model."""
        shard = Shard(self.rank, self.group.size)
        self.model = load_on(model, self.device, {**settings, "shard": shard})
        assert self.model.native is not None
        self.model.native.group = self.group

    def fit(self, shape: CacheShape, **settings: Any) -> int:
        """The number of blocks that fit on this rank."""
        self.drop()
        return fitting_blocks(self.model, shape, **settings)

    def make(self, shape: CacheShape, blocks: int, cpu_blocks: int, **settings: Any) -> None:
        """Make a cache, and a runner over it."""
        self.drop()
        cache = new_cache(shape, blocks, cpu_blocks, self.device)
        self.runner = Runner(self.model, cache, **settings)

    def drop(self) -> None:
        """Free the runner and its cache."""
        self.runner = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def carry_out(self, inputs: StepInputs) -> None:
        """`Runner.carry_out`; rank 0 broadcasts the tokens."""
        assert self.runner is not None, "a step before `make`"
        if (computing := inputs.computing) is not None:
            ids = np.zeros_like(computing.positions)
            inputs = replace(inputs, computing=computing._replace(ids=ids))
        self.runner.carry_out(inputs)
        self.runner.copies.refuse_failures()


SILENT = ("dummy_step", "carry_out")


def main() -> NoReturn:
    """Execute the parent process's commands until it is gone."""
    rank, descriptor = map(int, sys.argv[2:])
    threading.Thread(target=_exit_with, args=[os.getppid()], daemon=True).start()
    connection = Connection(descriptor)
    logging.disable(logging.WARNING)  # rank 0 logs
    code = 0
    try:
        _serve(connection, rank)
    except EOFError:
        pass
    except RankLost:
        code = EXIT_LOST
    except BaseException as error:
        code, ours = 1, isinstance(error, PagedsimError)
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        with suppress(OSError):  # rank 0 may be gone
            connection.send(Failure(ours, (text.splitlines() or [""])[0]))
    os._exit(code)  # at once: libraries may wait for other ranks


def _serve(connection: Connection, rank: int) -> NoReturn:
    from transformers.utils import logging as progress

    progress.disable_progress_bar()
    worker = Worker(rank)
    while True:
        name, values, settings = connection.recv()
        result = worker.execute(name, values, settings)
        if name not in SILENT:
            connection.send((result,))


def _exit_with(parent: int) -> None:
    """End this process when its parent has ended, whatever it is waiting for."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(0)

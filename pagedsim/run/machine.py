"""The machine that an engine runs on: one engine at a time, its threads, and what it is."""

from __future__ import annotations

import gc
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedsim.engine.engine import LLMEngine
    from pagedsim.run.backend import Settings


def facts_of(engine: LLMEngine, name: str) -> Settings:
    """What a run's results do not show: device, versions, sizes, and limits that were chosen."""
    import torch
    import transformers

    device = engine.model.device
    cuda = device.type == "cuda"
    return {
        "backend": "engine",
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU",
        "threads": torch.get_num_threads(),
        "model": name,
        "model_impl": "transformers" if engine.model.native is None else "native",
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "vocab_size": engine.model.vocab_size,
        **engine.server.sizes(),
        "block_bytes": engine.runner.cache.shape.block_bytes,
        "prices": {"prefill": engine.prices.prefill, "transfer": engine.prices.transfer},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
    }


def give_back() -> None:
    """What an engine held on the GPU; a model refers to itself in circles."""
    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for what a CPU computes."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


NAP = 0.1
"""Seconds between two looks at whether another engine is done."""


@contextmanager
def the_machine(stopping: Callable[[], bool]) -> Iterator[None]:
    """Wait until no other run of an engine is under way here: each would slow the other down.

    Once `stopping` says yes, nobody is waited for.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    path = Path(tempfile.gettempdir()) / f"pagedsim-engine-{os.getuid()}.lock"
    with path.open("a") as file:
        told = False
        while not stopping():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    print("waiting for another engine on this machine", file=sys.stderr)
                told = True
                time.sleep(NAP)
        yield

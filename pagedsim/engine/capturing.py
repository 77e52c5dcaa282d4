"""What is seen to around the capture of a CUDA graph.

A capture that fails is not undone by torch 2.11: it goes on believing that one is under way, and
the next `empty_cache` ends in an assertion. So it is found out without a capture whether work can
be captured, and nothing else calls CUDA meanwhile in the thread that captures.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Unrecordable(RuntimeError):
    """Work that waits for the GPU, which a graph cannot do."""


@contextmanager
def watched() -> Iterator[None]:
    """Raise Unrecordable if what is done inside waits for the GPU, as far as torch sees it.

    It sees what reads a tensor (`item`, `tolist`, `nonzero`, masks as indices) or copies one from
    the host and waits. It sees neither `synchronize` of a device or an event, nor a copy from
    memory that is not pinned if it was asked not to wait, nor what a library does by itself.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # that it does not see everything
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" in str(error):
            raise Unrecordable(str(error)) from error
        raise
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect garbage before what is done inside, and none meanwhile: a graph or a tensor that is
    given back may call CUDA, which would end a capture."""
    if not gc.isenabled():  # by whoever is outside, who has seen to it
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

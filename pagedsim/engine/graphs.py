"""CUDA graphs: a step launched as one.

A graph repeats the launches of its capture: the same kernels over the same memory. So there is one
for each of a few sizes, and a batch of another size is padded with rows that read and write
nothing. Kernels read each step's values from `DecodeInputs`, or with prompts from `PromptInputs`,
and all graphs write their logits to one tensor. No launch depends on a length: parts of contexts
are listed on the GPU (`kernels/parts.py`, for chunks `attention.py`), the tiles of chunks are found
there, and tables are as wide as the longest request needs.

Graphs never run side by side, so they share one memory pool for temporaries: the largest is
captured first, and the others reuse its memory.
"""

from __future__ import annotations

import gc
import logging
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Protocol

import torch

from pagedsim.core import ConfigError
from pagedsim.engine.inputs import Batch, DecodeInputs, PromptInputs, Shape
from pagedsim.engine.models import LoadedModel


class Unrecordable(RuntimeError):
    """Work that synchronises with the GPU, which a graph cannot contain."""


@contextmanager
def watched() -> Iterator[None]:
    """Raise Unrecordable if the block synchronises with the GPU, as far as torch detects it.

    Detected are reads of a tensor (`item`, `tolist`, `nonzero`, masks as indices) and blocking
    copies from the host; not `synchronize` of a device or an event, non-blocking copies from
    pageable memory, or what a library does by itself.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # that not everything is detected
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
    """Collect garbage before the block and none within: freeing a graph or a tensor may call CUDA,
    which would end a capture."""
    if not gc.isenabled():  # already disabled by an outer block
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


log = logging.getLogger(__name__)

LARGEST = 512
"""Sequences. In a larger batch the GPU takes longer than the host's launches."""
FEW_SEQS = 16
"""Sequences of the smaller graphs of steps with prompts."""


def sizes(most: int) -> list[int]:
    """The batch sizes that have a graph, of at most `most` sequences.

    From 8 on less than a quarter of a batch is padding, or less than 8 rows.

    >>> sizes(100)
    [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]
    """
    most = min(most, LARGEST)
    smaller, size = [], 1
    while size < most:
        smaller.append(size)
        power = 1 << (size.bit_length() - 1)
        size += size if size < 8 else max(8, power // 4)
    return [*smaller, most]


def shapes(tokens: int, seqs: int) -> list[Shape]:
    """The graphs of steps with prompts, of at most so many tokens and sequences, ascending.

    >>> [tuple(shape) for shape in shapes(70, 100)]
    [(16, 16), (32, 16), (32, 32), (64, 16), (64, 64), (70, 16), (70, 70)]
    """
    steps = [16, 32, *range(64, 512, 64), *range(512, tokens, 128)]
    return [
        Shape(size, count)
        for size in [*(size for size in steps if size < tokens), tokens]
        for count in sorted({min(size, seqs, few) for few in (FEW_SEQS, LARGEST)})
    ]


class Recorder(Protocol):
    """Records work, to repeat it."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Execute `work` at least once without a graph; returns a function that repeats it.

        Raises Unrecordable if a check beforehand finds that it cannot be recorded. Another
        RuntimeError means that the recording failed, and that nothing can be recorded any more.
        """


class CudaRecorder:
    """Captures on a side stream; all its graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        if ":" not in str(device):  # "cuda" is the current one of cuda:0, cuda:1, ...
            device = torch.device(device.type, torch.cuda.current_device())
        self._stream = _stream_of(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            # The stream is left also if a capture ends in an error.
            with torch.cuda.stream(self._stream), uncollected():
                work()  # what is compiled or allocated at first use must not be captured
                with watched():
                    work()
                with torch.cuda.graph(
                    graph, self._pool, self._stream, capture_error_mode="thread_local"
                ):
                    work()
        finally:
            current.wait_stream(self._stream)
        return graph.replay


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One stream for all recorders, since libraries keep memory per stream."""
    return torch.cuda.Stream(device)


def recorder_of(device: torch.device) -> Recorder | None:
    """The recorder of a device, if it has one."""
    return CudaRecorder(device) if device.type == "cuda" else None


class Graphs:
    """The graphs of one model over one cache."""

    def __init__(
        self,
        model: LoadedModel,
        cache: torch.Tensor,
        places: DecodeInputs,
        seqs: int,
        tokens: int,
        recorder: Recorder,
    ) -> None:
        """For at most `seqs` sequences, whose inputs stand in `places`: so far padding alone, so
        that nothing is written while graphs are made; for at most `tokens` tokens."""
        self.sizes, self.shapes = sizes(min(seqs, tokens)), shapes(tokens, seqs)
        self.prompts = PromptInputs(places.tables, *map(max, zip(*self.shapes, strict=True)))
        self._model, self._cache, self._places = model, cache, places
        self._recorder = recorder
        self._replays: dict[int | Shape, Callable[[], None]] = {}
        self._logits = torch.empty(
            self.sizes[-1], model.vocab_size, dtype=torch.float32, device=cache.device
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the logits, and of the inputs of prompts."""
        return self._logits.nbytes + self.prompts.nbytes

    @property
    def keys(self) -> list[int | Shape]:
        """Of all graphs, the largest first: sizes of batches of decodes, and shapes."""
        return [*reversed(self.shapes), *reversed(self.sizes)]

    def capture(self, key: int | Shape) -> None:
        """Capture one graph.

        Raises Unrecordable if the model synchronises with the GPU, and ConfigError if the capture
        fails for another reason: torch 2.11 does not recover from a failed capture, so the
        engine does not start.
        """
        if isinstance(key, Shape):
            self.prompts.clear(key)
        try:
            self._replays[key] = self._recorder.record(partial(self._compute, key))
        except Unrecordable:
            raise
        except RuntimeError as error:
            size = key if isinstance(key, Shape) else f"{key} sequences"
            raise ConfigError(
                f"a step of {self._model.name} for {size} cannot be captured in a CUDA graph: "
                f"{_reason(error)}; give enforce_eager=True"
            ) from error

    def capture_all(self) -> bool:
        """Capture all graphs; if the model synchronises with the GPU, log it and return False."""
        try:
            with uncollected():
                for key in self.keys:
                    self.capture(key)
        except Unrecordable as error:
            log.warning(
                "%s cannot be captured in a CUDA graph, so its steps are launched kernel by "
                "kernel: %s",
                self._model.name,
                _reason(error),
            )
            return False
        return True

    def size_of(self, count: int) -> int | None:
        """The size of the graph for `count` decodes, if there is one."""
        return None if count > self.sizes[-1] else self.sizes[bisect_left(self.sizes, count)]

    def shape_of(self, tokens: int, seqs: int) -> Shape | None:
        """The shape of the graph for a step with prompts, if there is one."""
        fitting = (one for one in self.shapes if one.tokens >= tokens and one.seqs >= seqs)
        return next(fitting, None)

    def batch(self, key: int | Shape) -> Batch:
        """The inputs of a graph."""
        return self.prompts.batch(key) if isinstance(key, Shape) else self._places.batch(key)

    def run(self, key: int | Shape, rows: int) -> torch.Tensor:
        """The first `rows` rows of logits, valid until the next run."""
        self._replays[key]()
        return self._logits[:rows]

    def _compute(self, key: int | Shape) -> None:
        ids, positions, batch, rows = self.batch(key)
        self._model.forward(ids, positions, batch, self._cache, rows, self._logits[: len(rows)])


def _reason(error: BaseException) -> str:
    """The first line of the first error; a failed capture raises another at its end."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]

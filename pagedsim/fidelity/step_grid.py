"""A designed grid of steps, carried out by an engine: what a workload would bring by chance."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from pagedsim.backends.engine import Serving
from pagedsim.core import ConfigError, Request, StepPlan
from pagedsim.engine.drive import Filler
from pagedsim.fidelity.engine_model import replica_of
from pagedsim.fidelity.recorded import StepLog, samples_of
from pagedsim.metrics.recorder import Recorder
from pagedsim.run.pool import on_terminal
from pagedsim.sim.cost import Sample
from pagedsim.spec.run import RunSpec, Settings

if TYPE_CHECKING:
    from pagedsim.engine.engine import LLMEngine

ROUNDS = 3
"""Rounds over the whole grid, so that a change of the machine affects all cells alike."""
TOKENS = 8
"""Tokens that each sequence of a cell generates."""
LATE = 3
"""Steps after which another prompt joins a cell: under some batchings, in a mixed step."""


class Cell(NamedTuple):
    """A number of sequences with prompts of one length."""

    sequences: int
    prompt: int


def profiled(config: Settings, seed: int) -> StepLog:
    """The steps of the grid; raises ConfigError for a backend that is no engine."""
    stage = RunSpec(config, seed).prepare()
    if not isinstance(stage, Serving):
        raise ConfigError("backend=sim: a profile is of backend=engine")
    recorder, moves = Recorder(), list[Sample]()

    def work(engine: LLMEngine) -> None:
        fill, numbers = Filler(engine.model.vocab_size, seed), count()
        cells = list(grid(engine))
        for at in range(ROUNDS):
            for number, cell in enumerate(cells, 1 + at * len(cells)):
                _say(f"cell {number} of {ROUNDS * len(cells)}")
                _serve(engine, cell, fill, numbers)
            moves.extend(_moved(engine))
        _say("")

    stage.use(recorder, work)
    machine = stage.facts()
    samples = [*samples_of(recorder.steps_table()), *moves]
    return StepLog(samples, replica_of(config, machine), machine, "a profile of the engine")


def _say(text: str) -> None:
    """In a terminal's last line; no thread redraws it, which would take the steps' time."""
    if on_terminal():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def grid(engine: LLMEngine) -> Iterator[Cell]:
    """Batches of powers of two up to the largest, each with short to long prompts."""
    scheduler = engine.scheduler
    slots = scheduler.memory.total * scheduler.memory.block_size
    longest = min(scheduler.max_model_len - TOKENS, scheduler.max_batched_tokens)
    for sequences in _doubling(1, max(scheduler.max_seqs - 1, 1)):
        room = slots // (sequences + 1) - TOKENS - scheduler.memory.block_size
        for prompt in _doubling(8, min(longest, room), by=4):
            yield Cell(sequences, prompt)


def _doubling(low: int, high: int, by: int = 2) -> Iterator[int]:
    """From `low`, each a multiple of the one before, up to `high`, which is the last."""
    while low < high:
        yield low
        low *= by
    if high > 0:
        yield high


def _serve(engine: LLMEngine, cell: Cell, fill: Filler, numbers: Iterator[int]) -> None:
    """Serve a cell's requests, which arrive together, and one that arrives later."""
    engine.restart_clock()

    def submit() -> None:
        engine.submit(fill(Request(next(numbers), cell.prompt)), TOKENS, now=engine.end)

    for _ in range(cell.sequences):
        submit()
    for step in count():
        if step == LATE:
            submit()
        if not engine.has_unfinished_requests():
            return
        engine.step(since=engine.end)
        if engine.times is None:
            raise ConfigError(
                f"a step of {cell.sequences} × {cell.prompt} tokens: {engine.failure}"
            )


def _moved(engine: LLMEngine) -> Iterator[Sample]:
    """Blocks out and in again by themselves, a few to many."""
    import torch

    memory = engine.scheduler.memory
    for blocks in _doubling(1, min(memory.total, memory.cpu_total)):
        pairs = [(block, block) for block in range(blocks)]
        for name in ("swap_out", "swap_in"):
            plan = StepPlan(number=0, now=0.0)
            setattr(plan, f"_{name}", pairs)
            begin = engine.now
            engine.runner.carry_out(engine.runner.inputs_of(plan))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            yield Sample(engine.now - begin, **{name: blocks})

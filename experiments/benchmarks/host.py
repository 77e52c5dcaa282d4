"""Time of the engine's host in a decode step, with a model that computes nothing.

    python -m pagedsim.experiments.benchmarks.host [--device cuda]
    python -m pagedsim.experiments.benchmarks.host tables

A full batch decodes greedily. Each figure is the median over the steps of a round, of the best
round, since the machine may be shared. On a CPU it is the time for which a GPU would wait; on a GPU
inputs are sent, a graph is launched, and tokens come back. Tokens are first compared with the
model's. With `--out`, or on a GPU, results go to host.json.

`tables` measures block tables: bytes sent a step and the host's time, with ordinary contexts, and
with a very long one among them. Bytes are the mean over all steps, since tables grow now and then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product, starmap
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch

from pagedsim.core import SamplingParams
from pagedsim.engine.engine import LLMEngine, StepTimes
from pagedsim.engine.inputs import TransferBuffer
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.experiments.benchmarks.device import Results, parse_device
from pagedsim.experiments.benchmarks.harness import columns, main_of, table
from pagedsim.experiments.benchmarks.timing import TIMED, Line

OPTIONS = {"--device": ("cpu", "cuda"), "--running": [1, 16, 64, 256]}
LONGEST = 1024
"""Tokens of a request, prompt and output."""
CHECKED = 4
"""Steps whose tokens are compared."""
PARTS = ("plan", "launch", "sample", "commit")


class Nothing:
    """Stands in for a model's own forward pass."""

    group = None

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.logits = torch.rand(LONGEST, vocab).to(device)

    def forward(self, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        """The same logits for every request at any time."""
        return self.logits[: len(rest[-1])]


def idle_model(device: torch.device) -> LoadedModel:
    """The tiny model with the forward pass `Nothing`."""
    torch.set_num_threads(1)
    model = load_model("tiny", dtype="float32", device=device, max_model_len=LONGEST)
    return replace(model, native=cast(Any, Nothing(model.vocab_size, device)))


def round_of(engine: LLMEngine, steps: int) -> StepTimes:
    """The median of each part of `steps` steps."""
    times = []
    for _ in range(steps):
        engine.step()
        assert engine.times is not None
        times.append(engine.times)
    return StepTimes(*(median(part) for part in zip(*times, strict=True)))


def full_batch(
    model: LoadedModel, prompts: Sequence[list[int]], params: SamplingParams, **settings: Any
) -> LLMEngine:
    """An engine whose requests all decode."""
    engine = LLMEngine(model=model, device=model.device.type, max_seqs=len(prompts), **settings)
    for number, prompt in enumerate(prompts):
        engine.add_request(number, prompt, params)
    while engine.scheduler.clock.requests < len(prompts):
        engine.step()
    return engine


def greedy(tokens: int) -> SamplingParams:
    """The parameters of requests for so many tokens."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


# -- a step ----------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """What is measured."""

    requests: int
    async_scheduling: bool

    def __str__(self) -> str:
        return f"{self.requests}{', ahead' * self.async_scheduling}"


def step(words: Sequence[str]) -> None:
    """Print the time of each part of a step."""
    asked = parse_device(__doc__, words, {**OPTIONS, "--steps": 100, "--rounds": 4, "--out": Path})
    results = Results("host", "host", words, asked, "float32")
    model = idle_model(asked.device)
    results.sweep(
        {str(case): case for case in starmap(Batch, product(asked.running, (False, True)))},
        lambda batch: measure(model, batch, asked.steps, asked.rounds),
    )
    timed = {one["case"]: one for one in results.timed()}
    parts: list[tuple[str, bool, str]] = [
        *(("plan", False, "plan"), ("inputs and launch", False, "launch")),
        *(("sample", False, "sample"), ("commit", False, "commit"), ("µs in all", False, TIMED)),
        ("µs with async_scheduling", True, TIMED),
    ]

    def cell(running: int, ahead: bool, part: str) -> str:
        found = timed.get(str(Batch(running, ahead)))
        return "–" if found is None else f"{found[part] * 1e6:.1f}"

    cells: dict[str, Callable[[int], str]] = {"requests": str}
    cells |= {head: partial(cell, ahead=ahead, part=part) for head, ahead, part in parts}
    title = f"a step of decodes, prefill_first, paged, blocks of 16, on {results.heading()}"
    results.close(f"{title}\n{columns(asked.running, cells)}")


def measure(model: LoadedModel, batch: Batch, steps: int, rounds: int) -> Line:
    """Seconds of each part of a step, if its tokens are right."""
    rng, most = random.Random(0), steps * rounds + 64
    prompts = [
        [rng.randrange(250) for _ in range(rng.randint(64, LONGEST - most))]
        for _ in range(batch.requests)
    ]
    engine = full_batch(model, prompts, greedy(most), async_scheduling=batch.async_scheduling)
    found: Line = {"right": right(engine)}
    if not found["right"]:
        return found
    best = min((round_of(engine, steps) for _ in range(rounds)), key=sum)
    parts = {part: getattr(best, part) for part in PARTS}
    return {**found, **parts, TIMED: sum(parts.values())}


def right(engine: LLMEngine) -> bool:
    """Whether the tokens of some steps are the most likely ones of the model's logits."""
    nothing = cast(Nothing, engine.model.native)
    requests = list(engine.scheduler.requests.values())
    wanted = sorted(nothing.logits[: len(requests)].argmax(1).tolist())
    engine.step()  # its tokens, or with async_scheduling the next ones, may be of a prefill
    for _ in range(CHECKED):
        engine.step()
        if sorted(request.outputs[0][-1] for request in requests) != wanted:
            return False
    return True


# -- block tables ----------------------------------------------------------------------------------

BLOCK = 16
PROMPT = 300
"""Tokens of an ordinary prompt."""


def tables(words: Sequence[str]) -> None:
    """Print bytes and times without and with a context of `--blocks` blocks."""
    options = {**OPTIONS, "--steps": 64, "--rounds": 3, "--blocks": 8193}
    asked = parse_device(__doc__, words, options)
    model = replace(idle_model(asked.device), max_model_len=(asked.blocks + 64) * BLOCK)
    rows = []
    for running in asked.running:
        for blocks in (0, asked.blocks):
            engine = batch_with_long(model, running, blocks, asked.steps * (asked.rounds + 1))
            round_of(engine, asked.steps)
            with sent_bytes() as sizes:
                times = [round_of(engine, asked.steps) for _ in range(asked.rounds)]
            best = min(times, key=lambda one: one.launch)
            sent = sum(sizes) / (asked.steps * asked.rounds)
            seconds = best.launch, sum(getattr(best, part) for part in PARTS)
            counts = [str(running), f"{blocks:,}" if blocks else "–", f"{sent:,.0f}"]
            rows.append([*counts, *(f"{one * 1e6:,.0f}" for one in seconds)])
    head = ["requests", "blocks of a long one", "bytes a step", "inputs and launch, µs"]
    print(f"a step of decodes, blocks of {BLOCK}, on {asked.device.type}")
    print(table([*head, "µs in all"], rows))


@contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """The sizes of all transfers to the device in the block."""
    send, sizes = TransferBuffer.send, list[int]()

    def counted(crossing: TransferBuffer, size: int) -> None:
        sizes.append(size)
        send(crossing, size)

    with patch.object(TransferBuffer, "send", counted):
        yield sizes


def batch_with_long(model: LoadedModel, running: int, blocks: int, steps: int) -> LLMEngine:
    """A batch for more than `steps` steps; the last has a context of `blocks` blocks, if any."""
    longest = max(blocks * BLOCK, PROMPT + steps + 64)
    lengths = [PROMPT + number % BLOCK for number in range(running)]
    if blocks:
        lengths[-1] = longest - steps - 32
    return full_batch(
        model,
        [[7] * length for length in lengths],
        greedy(steps + 32),
        block_size=BLOCK,
        max_model_len=longest,
        blocks=running * (-(-(PROMPT + steps + 64) // BLOCK)) + blocks + 64,
        preemption="recompute",
    )


main = main_of(__name__, step, tables)

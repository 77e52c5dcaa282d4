"""Time of the engine's host in a decode step, with a model that computes nothing.

    python -m pagedsim.experiments.benchmarks.host [--device cuda]

A full batch decodes greedily. Each figure is the median over the steps of a round, of the best
round, since the machine may be shared. On a CPU it is the time for which a GPU would wait; on a GPU
inputs are sent, a graph is launched, and tokens come back. Tokens are first compared with the
model's. With `--out`, or on a GPU, results go to host.json.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product, starmap
from statistics import median
from typing import Any, NamedTuple, cast

import torch

from pagedsim.core import SamplingParams
from pagedsim.engine.engine import LLMEngine, StepTimes
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.experiments.benchmarks.device import TIMED, Line, Run
from pagedsim.experiments.benchmarks.harness import main_of

LONGEST = 1024
"""Tokens of a request, prompt and output."""
CHECKED = 4
"""Steps whose tokens are compared."""
PARTS = {"plan": "plan", "inputs and launch": "launch", "sample": "sample", "commit": "commit"}


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


class Batch(NamedTuple):
    """What is measured."""

    requests: int
    async_scheduling: bool

    def __str__(self) -> str:
        return f"{self.requests}{', ahead' * self.async_scheduling}"


def host(words: Sequence[str]) -> None:
    """Print the time of each part of a step."""
    more = {"--device": ("cpu", "cuda"), "--rounds": 4, "--running": [1, 16, 64, 256]}
    run = Run("host", __doc__, words, {**more, "--steps": 100})
    model, asked = idle_model(run.device), run.asked
    batches = starmap(Batch, product(asked.running, (False, True)))
    run.sweep(batches, lambda batch: measure(model, batch, asked.steps, asked.rounds))
    cells: dict[str, Callable[[Line], str]] = {"requests": lambda line: line["case"]}
    for head, part in {**PARTS, "µs in all": TIMED}.items():
        cells[head] = partial(lambda line, part: f"{line[part] * 1e6:.1f}", part=part)
    run.close(cells, "a step of decodes, prefill_first, paged, blocks of 16")


def measure(model: LoadedModel, batch: Batch, steps: int, rounds: int) -> Line:
    """Seconds of each part of a step, if its tokens are right."""
    rng, most = random.Random(0), steps * rounds + 64
    prompts = [
        [rng.randrange(250) for _ in range(rng.randint(64, LONGEST - most))]
        for _ in range(batch.requests)
    ]
    greedy = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    engine = full_batch(model, prompts, greedy, async_scheduling=batch.async_scheduling)
    if not right(engine):
        return {"right": False}
    best = min((round_of(engine, steps) for _ in range(rounds)), key=sum)
    parts = {part: getattr(best, part) for part in PARTS.values()}
    return {"right": True, **parts, TIMED: sum(parts.values())}


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


main = main_of(__name__, host)

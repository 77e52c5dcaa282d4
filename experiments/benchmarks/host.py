"""What the host does in a step of the engine, with a model that computes nothing.

    python -m experiments.benchmarks.host

A full batch decodes greedily. Each figure is the median over the steps of a round, of the best
round: others may use the machine. A GPU waits while this is done; its launches come on top.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from statistics import median
from typing import Any, cast

import torch

from pagedsim.core import SamplingParams
from pagedsim.engine.engine import LLMEngine, StepTimes
from pagedsim.engine.models import LoadedModel, load_model

LONGEST = 1024
"""Tokens of a request, prompt and output."""


class Nothing:
    """Stands where a model's own forward pass does."""

    def __init__(self, vocab: int) -> None:
        self._logits = torch.rand(LONGEST, vocab)

    def forward(self, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Logits, the same for everybody at any time."""
        return self._logits[: len(rest[-1])]


def idle_model() -> LoadedModel:
    """The tiny model, whose forward pass is `Nothing`."""
    model = load_model("tiny", dtype="float32", device=torch.device("cpu"), max_model_len=LONGEST)
    return replace(model, native=cast(Any, Nothing(model.vocab_size)))


def full_batch(running: int, steps: int) -> LLMEngine:
    """An engine whose `running` requests will all decode for longer than `steps` steps."""
    engine = LLMEngine(model=idle_model(), device="cpu", max_num_seqs=running)
    params = SamplingParams(temperature=0, max_tokens=steps + 64, ignore_eos=True)
    rng = random.Random(0)
    for number in range(running):
        length = rng.randint(64, LONGEST - steps - 64)
        engine.add_request(number, [rng.randrange(250) for _ in range(length)], params)
    while engine.scheduler.clock.riders < running:
        engine.step()
    return engine


def round_of(engine: LLMEngine, steps: int) -> StepTimes:
    """The median of each part of `steps` steps."""
    times = []
    for _ in range(steps):
        engine.step()
        assert engine.times is not None
        times.append(engine.times)
    return StepTimes(*(median(part) for part in zip(*times, strict=True)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=100, help="decode steps a round")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = ("plan", "launch", "sample", "commit")
    print("µs a step of decodes, prefill_first, paged, blocks of 16")
    print(f"{'running':>8}" + "".join(f"{part:>9}" for part in (*parts, "total")))
    for running in options.running:
        engine = full_batch(running, options.steps * options.rounds)
        rounds = [round_of(engine, options.steps) for _ in range(options.rounds)]
        best = min(rounds, key=sum)
        columns = [getattr(best, part) for part in parts]
        figures = "".join(f"{seconds * 1e6:9.1f}" for seconds in (*columns, sum(columns)))
        print(f"{running:8}{figures}")


if __name__ == "__main__":
    main()

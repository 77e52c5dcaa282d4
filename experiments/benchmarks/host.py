"""What the host does in a step of the engine, with a model that computes nothing.

    python -m experiments.benchmarks.host
    python -m experiments.benchmarks.host --device cuda

A full batch decodes greedily. Each figure is the median over the steps of a round, of the best
round: others may use the machine. On a CPU this is what a GPU would wait for; on a GPU the inputs
go there, a graph is launched, and the tokens come back. That they are the model's is looked at
before anything is timed. With `--out`, or on a GPU, results are kept in host.json.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

from experiments.benchmarks.device import Plain, facts, require_gpu, table
from experiments.benchmarks.results import folder_of, keep
from experiments.benchmarks.words import Parser, at_least_one
from pagedsim.core import SamplingParams
from pagedsim.engine.engine import LLMEngine, StepTimes
from pagedsim.engine.models import LoadedModel, load_model

LONGEST = 1024
"""Tokens of a request, prompt and output."""
LOOKED_AT = 4
"""Steps whose tokens are looked at."""
PARTS = ("plan", "launch", "sample", "commit")


class Nothing:
    """Stands where a model's own forward pass does."""

    group = None

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.logits = torch.rand(LONGEST, vocab).to(device)

    def forward(self, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Logits, the same for everybody at any time."""
        return self.logits[: len(rest[-1])]


def idle_model(device: torch.device) -> LoadedModel:
    """The tiny model, whose forward pass is `Nothing`."""
    model = load_model("tiny", dtype="float32", device=device, max_model_len=LONGEST)
    return replace(model, native=cast(Any, Nothing(model.vocab_size, device)))


def full_batch(model: LoadedModel, running: int, steps: int, ahead: bool) -> LLMEngine:
    """An engine whose `running` requests will all decode for longer than `steps` steps."""
    engine = LLMEngine(
        model=model, device=model.device.type, max_seqs=running, async_scheduling=ahead
    )
    params = SamplingParams(temperature=0, max_tokens=steps + 64, ignore_eos=True)
    rng = random.Random(0)
    for number in range(running):
        length = rng.randint(64, LONGEST - steps - 64)
        engine.add_request(number, [rng.randrange(250) for _ in range(length)], params)
    while engine.scheduler.clock.riders < running:
        engine.step()
    return engine


def right(engine: LLMEngine) -> bool:
    """Whether the tokens of some steps are those that the model's logits say."""
    nothing = cast(Nothing, engine.model.native)
    requests = list(engine.scheduler.requests.values())
    wanted = sorted(nothing.logits[: len(requests)].argmax(1).tolist())
    engine.step()  # its tokens, or with async_scheduling the next ones, may be a prefill's
    for _ in range(LOOKED_AT):
        engine.step()
        if sorted(request.outputs[0][-1] for request in requests) != wanted:
            return False
    return True


def round_of(engine: LLMEngine, steps: int) -> StepTimes:
    """The median of each part of `steps` steps."""
    times = []
    for _ in range(steps):
        engine.step()
        assert engine.times is not None
        times.append(engine.times)
    return StepTimes(*(median(part) for part in zip(*times, strict=True)))


def measure(
    model: LoadedModel, running: int, ahead: bool, steps: int, rounds: int
) -> dict[str, Any]:
    """One line: seconds of each part of a step."""
    engine = full_batch(model, running, steps * rounds, ahead)
    found: dict[str, Any] = {"requests": running, "async_scheduling": ahead}
    found["right"] = right(engine)
    if not found["right"]:
        return found
    best = min((round_of(engine, steps) for _ in range(rounds)), key=sum)
    parts = {part: getattr(best, part) for part in PARTS}
    return {**found, **parts, "seconds": sum(parts.values())}


def written(lines: Sequence[Mapping[str, Any]]) -> str:
    """The results as Markdown, in microseconds."""
    timed = {(one["requests"], one["async_scheduling"]): one for one in lines if "seconds" in one}
    rows = []
    for running in dict.fromkeys(one["requests"] for one in lines):
        here, ahead = (timed.get((running, way), {}) for way in (False, True))
        rows.append([
            str(running),
            *(_us(here.get(part)) for part in (*PARTS, "seconds")),
            _us(ahead.get("seconds")),
        ])  # fmt: skip
    head = ["requests", "plan", "inputs and launch", "sample", "commit", "µs in all"]
    return table([*head, "µs with async_scheduling"], rows)


def _us(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e6:.1f}"


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    words = sys.argv[1:] if words is None else words
    parser = Parser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--running", type=at_least_one, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=at_least_one, default=100, help="decode steps a round")
    parser.add_argument("--rounds", type=at_least_one, default=4)
    parser.add_argument("--out", type=Path, help="a folder for host.json")
    asked = parser.parse_args(words)
    if asked.device == "cuda":
        require_gpu()
    device = torch.device(asked.device)
    torch.set_num_threads(1)
    place = asked.out or (folder_of(device) if asked.device == "cuda" else None)
    result: dict[str, Any] = {**facts(device, "experiments.benchmarks.host", words), "steps": []}
    model = idle_model(device)
    for running in asked.running:
        for ahead in (False, True):
            result["steps"].append(measure(model, running, ahead, asked.steps, asked.rounds))
            keep(place, "host", result)
    print("a step of decodes, prefill_first, paged, blocks of 16, on", result["device"])
    print(written(result["steps"]))
    wrong = [str(one["requests"]) for one in result["steps"] if not one["right"]]
    if wrong:
        sys.exit(f"wrong tokens with so many requests, not timed: {', '.join(wrong)}")


if __name__ == "__main__":
    main()

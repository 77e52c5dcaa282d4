"""A whole decode step of the engine, against what its bytes take at the speed of a copy.

    python -m experiments.benchmarks.step
    python -m experiments.benchmarks.step --device cpu --quick    (the same way, without a GPU)

A model of Llama-3.1-8B's shape with random weights, 64 requests of about 1,024 tokens. Its limit is
the time that its weights, but for the embeddings, and all keys and values take to be read once, at
the speed of a device copy that is timed in the same run. *Forward* is the runner's part by the
GPU's clock; *step* is `engine.step` by the host's, many in a row, all that the host does included.

Both forward passes run with and without CUDA graphs, each with and without `async_scheduling`, with
keys and values in 16 and in 8 bits. First the logits of a step must be transformers' own, as near
to them in float32 as transformers is in the model's precision (judge.py), and tokens with
`async_scheduling` must be those without; what is wrong is not timed. Results go to
experiments/results/<GPU>/step.json.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch

from experiments.benchmarks.device import (
    Copy,
    before,
    device_of,
    facts,
    folder,
    keep,
    medians,
    options,
    table,
    told,
)
from experiments.benchmarks.judge import Judge, Verdict
from experiments.benchmarks.shapes import BASE, config_of, shape_of
from pagedsim.core import Request, SamplingParams, StepPlan
from pagedsim.engine import graphs
from pagedsim.engine.engine import LLMEngine, StepTimes
from pagedsim.engine.models import load_model
from pagedsim.kernels.float8 import AUTO
from pagedsim.run.machine import give_back
from pagedsim.sim.model import ModelShape

CACHES = (AUTO, "fp8_e4m3")
IMPLEMENTATIONS = ("native", "transformers")
WARM = 8
"""Steps before any is timed; their tokens are compared."""
RUN = 16
"""Steps that are timed as one: in each, everybody comes to a new block once."""
LATEST = 4
"""Timed runs by which the host's parts are told."""


@dataclass(frozen=True)
class Size:
    """How much there is to do."""

    shape: ModelShape
    batch: int
    context: int
    """Tokens of a request, on average over what is timed."""
    runs: int


TINY = Size(ModelShape("little", 2, 64, 4, 2, 16, 128, 512, 512), batch=3, context=60, runs=1)


class Arm(NamedTuple):
    """One way to compute a step."""

    cache: str
    model_impl: str
    graphs: bool
    ahead: bool = False

    def __str__(self) -> str:
        words = [self.model_impl, "graphs" if self.graphs else "kernel by kernel"]
        words += ["async_scheduling"] * self.ahead
        return ", ".join([*words, *([] if self.cache == AUTO else [self.cache])])

    def headline(self, graphs: bool) -> bool:
        """Whether bars are about it, where there are graphs or not."""
        return self.model_impl == "native" and self.graphs == graphs


def arms(graphs: bool) -> Iterator[Arm]:
    """All of them, those that bars are about first."""
    for cache in CACHES:
        for impl in IMPLEMENTATIONS:
            for graph in (True, False) if graphs else (False,):
                yield from (Arm(cache, impl, graph, ahead) for ahead in (False, True))


def main(words: Sequence[str] | None = None) -> None:
    """Measure all of them; print a table, and keep the results."""
    words = sys.argv[1:] if words is None else words
    parser = options(__doc__)
    parser.add_argument("--headlines", action="store_true", help="what bars are about, alone")
    asked = parser.parse_args(words)
    device = device_of(asked)
    torch.set_num_threads(1)
    place = folder(device, asked)
    size = TINY if asked.quick else Size(shape_of(BASE), batch=64, context=1024, runs=8)
    bench = Bench(size, device, asked.rounds, asked.quick)
    result: dict[str, Any] = {
        **facts(device, "experiments.benchmarks.step", words),
        "model": size.shape.name,
        "dtype": str(bench.model.dtype).removeprefix("torch."),
        "batch": size.batch,
        "rounds": asked.rounds,
        "quick": asked.quick,
    }
    wanted = list(arms(graphs=bench.has_graphs))
    if asked.headlines:
        wanted = [arm for arm in wanted if arm.headline(bench.has_graphs)]
    result["arms"] = whole(before(place, "step", result, "arms"), wanted) if asked.resume else []
    there = {one["arm"] for one in result["arms"]}
    for arm in wanted:
        if str(arm) in there:
            continue
        result["arms"].append(bench.measured(arm))
        keep(place, "step", result)
        print(line(result["arms"][-1]), file=sys.stderr, flush=True)
    print(written(result))
    told(place, "step")
    if failed := [one["arm"] for one in result["arms"] if "seconds" not in one]:
        sys.exit(f"not timed: {'; '.join(failed)}")


def whole(known: Sequence[dict[str, Any]], wanted: Sequence[Arm]) -> list[dict[str, Any]]:
    """Those of the known lines that need not be measured again.

    With async_scheduling tokens are held against those without: both are measured, or neither.
    """
    timed = {one["arm"]: one for one in known if "seconds" in one}
    for arm in wanted:
        if arm.ahead and str(arm) not in timed:
            timed.pop(str(arm._replace(ahead=False)), None)
    return list(timed.values())


class Bench:
    """A model, and what is needed to serve it and to judge what it says."""

    def __init__(self, size: Size, device: torch.device, rounds: int, tiny: bool) -> None:
        self.size, self.device, self.rounds = size, device, rounds
        self.longest = size.context + WARM + size.runs * RUN
        self.model = load_model(
            config_of(size.shape),
            dtype="bfloat16",
            device=device,
            model_impl="native",
            max_model_len=self.longest,
        )
        self._judge = Judge(self.model)
        give_back()
        self._copy = Copy(device, tiny)
        self._told: dict[Arm, dict[Any, list[int]]] = {}

    @property
    def has_graphs(self) -> bool:
        """Whether the device can capture any."""
        return graphs.recorder_of(self.device) is not None

    def measured(self, arm: Arm) -> dict[str, Any]:
        """One line; whatever goes wrong in it, the others are measured all the same."""
        found: dict[str, Any] = {"arm": str(arm), **arm._asdict()}
        try:
            return {**found, **self._measured(arm)}
        except Exception as problem:
            reason = (str(problem).strip().splitlines() or [""])[0]
            return {**found, "failed": f"{type(problem).__name__}: {reason}"[:200]}
        finally:
            give_back()

    def _measured(self, arm: Arm) -> dict[str, Any]:
        engine = self._engine(arm)
        if arm.graphs and engine.runner.graphs is None:
            raise RuntimeError("no graph was captured")
        found = {} if arm.ahead else self._forward(engine, arm)
        if not found.get("right", True):
            return found
        copy_s = self._copy.moved / medians({"copy": self._copy}, self.device, self.rounds)["copy"]
        for _ in range(WARM):
            engine.step()
        self._compare(engine, arm)
        before = tokens(engine)
        seconds, parts = self._steps(engine)
        read = self._bytes(engine, (before + tokens(engine)) / 2)
        limit = sum(read.values()) / copy_s
        return {
            **found,
            **read,
            "copy_gb_s": copy_s / 1e9,
            "limit_seconds": limit,
            "seconds": seconds,
            "to_limit": seconds / limit,
            "host": parts._asdict(),
        }

    def _engine(self, arm: Arm) -> LLMEngine:
        """One in which everybody is about to decode."""
        size = self.size
        native = self.model.native if arm.model_impl == "native" else None
        engine = LLMEngine(
            model=replace(self.model, native=native),
            enforce_eager=not arm.graphs,
            async_scheduling=arm.ahead,
            kv_cache_dtype=arm.cache,
            max_seqs=size.batch,
            blocks=size.batch * -(-self.longest // 16),
        )
        ahead = WARM + size.runs * RUN // 2
        params = SamplingParams(temperature=0, max_tokens=2 * ahead, ignore_eos=True)
        rng = random.Random(0)
        for number in range(size.batch):
            prompt = [rng.randrange(size.shape.vocab) for _ in range(size.context - ahead)]
            engine.add_request(number, prompt, params)
        while engine.scheduler.clock.riders < size.batch:
            engine.step()
        return engine

    def _forward(self, engine: LLMEngine, arm: Arm) -> dict[str, Any]:
        """Is one step right, and how long does the runner take for it? It is committed, too."""
        scheduler, runner = engine.scheduler, engine.runner
        plan = scheduler.plan(engine.now)
        inputs = runner.inputs_of(plan)
        logits = runner.carry_out(inputs).clone()
        verdict = self._verdict(plan, arm, logits)
        found: dict[str, Any] = {"error": verdict.error, "error_allowed": verdict.allowed}
        found["right"] = verdict.right
        if not verdict.right:
            return found
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda: runner.carry_out(inputs),
            "copy": self._copy,
        }
        seconds = medians(calls, self.device, self.rounds)
        read = sum(self._bytes(engine, tokens(engine)).values())
        limit = read / self._copy.moved * seconds["copy"]
        picked = logits.argmax(1).tolist()
        answers = {one.id: token for one, token in zip(plan.decodes, picked, strict=True)}
        scheduler.commit(plan, engine.now, answers)
        return {
            **found,
            "forward_seconds": seconds["forward"],
            "forward_to_limit": seconds["forward"] / limit,
        }

    def _verdict(self, plan: StepPlan, arm: Arm, logits: torch.Tensor) -> Verdict:
        """The worse of those on the first and on the last."""
        verdicts = []
        for row in (0, -1):
            request: Request = plan.decodes[row]
            assert request.prompt is not None
            said = [*request.prompt, *request.outputs[0]]
            verdicts.append(self._judge.verdict(said, arm.cache, logits[row]))
        return max(verdicts, key=lambda one: one.error / one.allowed)

    def _compare(self, engine: LLMEngine, arm: Arm) -> None:
        """Raise unless tokens with async_scheduling are those without."""
        said = {name: one.outputs[0] for name, one in engine.scheduler.requests.items()}
        if not arm.ahead:
            self._told[arm] = {name: list(own) for name, own in said.items()}
            return
        wanted = self._told.get(arm._replace(ahead=False))
        if wanted is None:
            raise RuntimeError("there is nothing to compare its tokens with")
        for name, own in said.items():
            if own[:WARM] != wanted[name][:WARM]:
                raise RuntimeError(f"request {name} got other tokens than without async_scheduling")

    def _bytes(self, engine: LLMEngine, context: float) -> dict[str, float]:
        """What a step reads at least, with so many tokens in the cache."""
        module: Any = engine.model.module
        weights = sum(weight.nbytes for weight in module.parameters())
        if not module.config.tie_word_embeddings:  # a few rows of it are read
            weights -= module.get_input_embeddings().weight.nbytes
        shape = engine.runner.cache.shape
        return {"weight_bytes": weights, "kv_bytes": context * shape.block_bytes / shape.block_size}

    def _steps(self, engine: LLMEngine) -> tuple[float, StepTimes]:
        """Seconds of a step, and of the host's parts of it."""
        seconds, times = [], []
        for _ in range(self.size.runs):
            begun = time.perf_counter()
            for _ in range(RUN):
                engine.step()
                assert engine.times is not None, engine.failure
                times.append(engine.times)
            seconds.append((time.perf_counter() - begun) / RUN)
        parts = zip(*times[-LATEST * RUN :], strict=True)
        return median(seconds), StepTimes(*(median(part) for part in parts))


def tokens(engine: LLMEngine) -> int:
    """All that a step attends to, those that it computes included."""
    return sum(request.num_tokens for request in engine.scheduler.requests.values())


def line(found: Mapping[str, Any]) -> str:
    """What is said of one while others go on."""
    if "failed" in found:
        return f"{found['arm']}: {found['failed']}, not timed"
    if "seconds" not in found:
        return f"{found['arm']}: off by {found['error']:.2g} of the norm, not timed"
    forward = found.get("forward_to_limit")
    said = "" if forward is None else f"forward {forward:.2f}, "
    return f"{found['arm']}: {said}step {found['to_limit']:.2f} times the limit"


def written(result: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    head = ["", "limit ms", "forward ms", "of it", "step ms", "of it"]
    rows = [
        [
            one["arm"],
            f"{one['limit_seconds'] * 1e3:.3g}",
            *_cells(one.get("forward_seconds"), one.get("forward_to_limit")),
            *_cells(one["seconds"], one["to_limit"]),
        ]
        for one in result["arms"]
        if "seconds" in one
    ]
    title = f"{result['model']}, {result['dtype']}, {result['batch']} requests, {result['device']}"
    return f"{title}, torch {result['torch']}, {result['date']}\n\n{table(head, rows)}"


def _cells(seconds: float | None, ratio: float | None) -> list[str]:
    if seconds is None or ratio is None:
        return ["", ""]
    return [f"{seconds * 1e3:.3g}", f"{ratio:.2f} ×"]


if __name__ == "__main__":
    main()

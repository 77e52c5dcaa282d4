"""Decode steps of the engine, one arm after the other: each is held against what is right before it
is timed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from experiments.benchmarks.arms import DRAWN, DTYPE, Arm, Size
from experiments.benchmarks.device import Copy, medians
from experiments.benchmarks.judge import Judge, Verdict, same_draws
from experiments.benchmarks.shapes import config_of
from pagedsim.core import Request, SamplingParams, StepPlan
from pagedsim.engine import graphs
from pagedsim.engine.engine import LLMEngine, StepTimes
from pagedsim.engine.models import load_model
from pagedsim.engine.noise import stream_key
from pagedsim.engine.sampler import Row, Sampler
from pagedsim.run.serving import give_back

WARM = 8
"""Steps before any is timed; their tokens are compared."""
RUN = 16
"""Steps that are timed as one: in each, everybody comes to a new block once."""
LATEST = 4
"""Timed runs by which the host's parts are told."""


def has_graphs(device: torch.device) -> bool:
    """Whether the device can capture any."""
    return graphs.recorder_of(device) is not None


class Bench:
    """A model, and what is needed to serve it and to judge what it says."""

    def __init__(self, size: Size, device: torch.device, rounds: int, tiny: bool) -> None:
        self.size, self.device, self.rounds = size, device, rounds
        self.longest = size.context + WARM + size.runs * RUN
        self.model = load_model(
            config_of(size.shape),
            dtype=DTYPE,
            device=device,
            model_impl="native",
            max_model_len=self.longest,
        )
        self._judge = Judge(self.model)
        give_back()
        self._copy = Copy(device, tiny)
        self._told: dict[Arm, dict[Any, list[int]]] = {}

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
        engine = self.engine(arm)
        if arm.graphs and engine.runner.graphs is None:
            raise RuntimeError("no graph was captured")
        found = {} if arm.ahead or arm.sampled else self._forward(engine, arm)
        if not found.get("right", True):
            return found
        copy_s = self._copy.moved / medians({"copy": self._copy}, self.device, self.rounds)["copy"]
        for _ in range(WARM):
            engine.step()
        self._compare(engine, arm)
        before = tokens(engine)
        seconds, parts = self._steps(engine)
        if arm.sampled and not arm.ahead:  # afterwards: here a step is planned and not told
            found = self._draws(engine)
            if not found["right"]:
                return found
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

    def engine(self, arm: Arm) -> LLMEngine:
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
        how = DRAWN if arm.sampled else SamplingParams(temperature=0)
        params = replace(how, max_tokens=2 * ahead, ignore_eos=True)
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
        verdict = self.verdict(plan, arm, logits)
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

    def _draws(self, engine: LLMEngine) -> dict[str, Any]:
        """Are the tokens of a step drawn as a CPU draws them, and how long does that take?"""
        runner, sampler = engine.runner, Sampler()
        inputs = runner.inputs_of(engine.scheduler.plan(engine.now))
        logits = runner.carry_out(inputs).clone()
        rows = [Row(DRAWN, stream_key(at), at, [], []) for at in range(len(logits))]
        left = (logits / DRAWN.temperature).softmax(1).sort(1, descending=True).values
        found: dict[str, Any] = {
            "right": same_draws(logits, rows),
            "vocab": logits.shape[1],
            "nucleus": float((left.cumsum(1) - left < DRAWN.top_p).sum(1).float().mean()),
        }
        if not found["right"]:
            return found
        calls = {"sample": lambda: sampler.draw(logits, rows)}
        return {**found, "sample_seconds": medians(calls, self.device, self.rounds)["sample"]}

    def verdict(self, plan: StepPlan, arm: Arm, logits: torch.Tensor) -> Verdict:
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

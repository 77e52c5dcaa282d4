"""A whole decode step of the engine, against the time of its bytes at the speed of a copy.

    python -m pagedsim.experiments.benchmarks.step
    python -m pagedsim.experiments.benchmarks.step profile
    python -m pagedsim.experiments.benchmarks.step --device cpu --quick  (without a GPU)

A model of Llama-3.1-8B's shape with random weights, 64 requests of about 1,024 tokens. The limit is
the time to read its weights, but for the embeddings, and all keys and values once, at the speed of
a device copy timed in the same run. *Forward* is the model runner's part by the GPU's clock; *step*
is `engine.step` by the host's, many in a row. Both forward passes run with and without CUDA graphs,
`async_scheduling` and an 8-bit cache, greedily; one arm samples with temperature and top-p.

First, logits of a step are compared with transformers' in float32 (the allowed error is twice that
of transformers in the model's precision), tokens with `async_scheduling` with those without, and
sampled tokens with those of a CPU from the same logits. What is wrong is not timed. Results go to
experiments/results/<GPU>/step.json.

`profile` gives the time of the greedy step by kernel, and launches a layer: its graph is replayed
under torch's profiler. Wrong logits are not profiled. A kernel belongs to a layer as often as each
layer launches it. The time of a step is measured without the profiler, over many in a row; *busy*
is the share of it in which kernels run. Results go to profile.json.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from pagedsim.core import Request, SamplingParams, StepPlan
from pagedsim.engine.engine import LLMEngine, StepTimes
from pagedsim.engine.graphs import recorder_of
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.models.probe import attention
from pagedsim.engine.sampler import Row, Sampler, stream_key
from pagedsim.experiments.benchmarks.device import OPTIONS, Results, parse_device
from pagedsim.experiments.benchmarks.harness import columns, main_of
from pagedsim.experiments.benchmarks.host import full_batch, round_of
from pagedsim.experiments.benchmarks.shapes import BASE, TINY, config_of, shape_of
from pagedsim.experiments.benchmarks.timing import (
    TIMED,
    Copy,
    Line,
    free_memory,
    medians,
    norm_error,
    wait,
)
from pagedsim.kernels.float8 import AUTO, FORMATS, rounded
from pagedsim.sim.model import ModelShape

# -- what is measured ------------------------------------------------------------------------------

DTYPE = "bfloat16"
CACHES = (AUTO, "fp8_e4m3")
IMPLEMENTATIONS = ("native", "transformers")
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
"""Random weights make flat distributions, of which top-p leaves more tokens than of a trained
model's."""


@dataclass(frozen=True)
class Size:
    """The model and the batch."""

    shape: ModelShape
    batch: int
    context: int
    """Tokens of a request, on average over the timed steps."""
    runs: int


def size_of(tiny: bool) -> Size:
    """The size for a GPU, or the tiny one."""
    if tiny:
        return Size(TINY, batch=3, context=60, runs=1)
    return Size(shape_of(BASE), batch=64, context=1024, runs=8)


class Arm(NamedTuple):
    """One way to compute a step."""

    cache: str
    model_impl: str
    graphs: bool
    ahead: bool = False
    sampled: bool = False
    """With `SAMPLED`; the others are greedy."""

    def __str__(self) -> str:
        words = [self.model_impl, "graphs" if self.graphs else "kernel by kernel"]
        words += ["sampled"] * self.sampled + ["async_scheduling"] * self.ahead
        return ", ".join([*words, *([] if self.cache == AUTO else [self.cache])])


def arms(graphs: bool) -> Iterator[Arm]:
    """All arms, those with a bar first."""
    for cache in CACHES:
        for impl in IMPLEMENTATIONS:
            for graph in (True, False) if graphs else (False,):
                arm = Arm(cache, impl, graph)
                yield from (arm, arm._replace(ahead=True))
                if (cache, impl, graph) == (AUTO, "native", graphs):
                    yield from (arm._replace(ahead=ahead, sampled=True) for ahead in (False, True))


# -- the command -----------------------------------------------------------------------------------


def step(words: Sequence[str]) -> None:
    """Measure all arms; print a table, and keep the results."""
    headlines = {"action": "store_true", "help": "only the arms with a bar"}
    asked = parse_device(__doc__, words, {**OPTIONS, "--headlines": headlines})
    torch.set_num_threads(1)
    size, graphs = size_of(asked.quick), recorder_of(asked.device) is not None
    about = {"model": size.shape.name, "batch": size.batch}
    results = Results("step", "step", words, asked, DTYPE, **about)
    wanted = [
        arm
        for arm in arms(graphs)
        if not asked.headlines or (arm.model_impl, arm.graphs) == ("native", graphs)
    ]
    results.known = complete(results.known, wanted)
    bench = lru_cache(lambda: Bench(size, asked.device, asked.rounds, asked.quick))
    results.sweep({str(arm): arm for arm in wanted}, lambda arm: bench().measured(arm))
    cells: dict[str, Callable[[Line], str]] = {
        "": lambda one: one["case"],
        "limit ms": lambda one: f"{one['limit_seconds'] * 1e3:.3g}",
        "forward ms": lambda one: _cell(one, "forward_seconds", 1e3, "{:.3g}"),
        "of it": lambda one: _cell(one, "forward_to_limit", 1, "{:.2f} ×"),
        "step ms": lambda one: f"{one[TIMED] * 1e3:.3g}",
        "times it": lambda one: f"{one['to_limit']:.2f} ×",
        "draw ms": lambda one: _cell(one, "sample_seconds", 1e3, "{:.3g}"),
    }
    title = results.heading(size.shape.name, DTYPE, f"{size.batch} requests")
    results.close(f"{title}\n\n{columns(results.timed(), cells)}")


def _cell(line: Line, key: str, times: float, text: str) -> str:
    return text.format(line[key] * times) if key in line else ""


def complete(known: Sequence[Line], wanted: Sequence[Arm]) -> list[Line]:
    """The known lines that are kept.

    Tokens with async_scheduling are compared with those without, so both are measured or neither.
    """
    timed = {one["case"]: one for one in known if TIMED in one}
    for arm in wanted:
        if arm.ahead and str(arm) not in timed:
            timed.pop(str(arm._replace(ahead=False)), None)
    return list(timed.values())


# -- the measurement -------------------------------------------------------------------------------

WARM_UP = 8
"""Steps before any is timed; their tokens are compared."""
RUN = 16
"""Steps timed as one, in which each request fills one block."""


class Bench:
    """A model, its judge, and the measurement of arms."""

    def __init__(self, size: Size, device: torch.device, rounds: int, tiny: bool) -> None:
        self.size, self.device, self.rounds = size, device, rounds
        self.longest = size.context + WARM_UP + size.runs * RUN
        self.model = load_model(
            config_of(size.shape),
            dtype=DTYPE,
            device=device,
            model_impl="native",
            max_model_len=self.longest,
        )
        self._judge = Judge(self.model)
        free_memory()
        self._copy = Copy(device, tiny)
        self._tokens: dict[Arm, dict[Any, list[int]]] = {}

    def measured(self, arm: Arm) -> Line:
        engine = self.engine(arm)
        if arm.graphs and engine.runner.graphs is None:
            raise RuntimeError("no graph was captured")
        found: Line = {}
        if not (arm.ahead or arm.sampled):
            found |= self._forward(engine, arm)
        if not found.get("right", True):
            return found
        copy_s = self._copy.moved / medians({"copy": self._copy}, self.device, self.rounds)["copy"]
        for _ in range(WARM_UP):
            engine.step()
        self._compare(engine, arm)
        before = context_tokens(engine)
        seconds, parts = self._steps(engine)
        if arm.sampled and not arm.ahead:  # last, since it plans a step that is not committed
            found |= self._sampling(engine)
            if not found["right"]:
                return found
        read = self._bytes(engine, (before + context_tokens(engine)) / 2)
        limit = sum(read.values()) / copy_s
        return {
            **found,
            **read,
            "copy_gb_s": copy_s / 1e9,
            "limit_seconds": limit,
            TIMED: seconds,
            "to_limit": seconds / limit,
            "host": parts._asdict(),
        }

    def engine(self, arm: Arm) -> LLMEngine:
        """An engine whose requests have all been prefilled."""
        size = self.size
        native = self.model.native if arm.model_impl == "native" else None
        ahead = WARM_UP + size.runs * RUN // 2
        how = SAMPLED if arm.sampled else SamplingParams(temperature=0)
        rng = random.Random(0)
        return full_batch(
            replace(self.model, native=native),
            [
                [rng.randrange(size.shape.vocab) for _ in range(size.context - ahead)]
                for _ in range(size.batch)
            ],
            replace(how, max_tokens=2 * ahead, ignore_eos=True),
            enforce_eager=not arm.graphs,
            async_scheduling=arm.ahead,
            kv_cache_dtype=arm.cache,
            blocks=size.batch * -(-self.longest // 16),
        )

    def _forward(self, engine: LLMEngine, arm: Arm) -> Line:
        """The error and time of the model runner in one step, which is committed."""
        scheduler, runner = engine.scheduler, engine.runner
        plan = scheduler.plan(engine.now)
        inputs = runner.inputs_of(plan)
        logits = runner.carry_out(inputs).clone()
        verdict = self.verdict(plan, arm, logits)
        found: Line = {**verdict._asdict(), "right": verdict.right}
        if not verdict.right:
            return found
        forward = partial(runner.carry_out, inputs)
        seconds = medians({"forward": forward, "copy": self._copy}, self.device, self.rounds)
        read = sum(self._bytes(engine, context_tokens(engine)).values())
        limit = read / self._copy.moved * seconds["copy"]
        picked = logits.argmax(1).tolist()
        answers = {one.id: token for one, token in zip(plan.decodes, picked, strict=True)}
        scheduler.commit(plan, engine.now, answers)
        return {
            **found,
            "forward_seconds": seconds["forward"],
            "forward_to_limit": seconds["forward"] / limit,
        }

    def _sampling(self, engine: LLMEngine) -> Line:
        """Whether a step samples the tokens of a CPU, and its time of sampling."""
        runner, sampler = engine.runner, Sampler()
        inputs = runner.inputs_of(engine.scheduler.plan(engine.now))
        logits = runner.carry_out(inputs).clone()
        rows = [Row(SAMPLED, stream_key(at), at, [], []) for at in range(len(logits))]
        left = (logits / SAMPLED.temperature).softmax(1).sort(1, descending=True).values
        found: Line = {
            "right": same_samples(logits, rows),
            "vocab": logits.shape[1],
            "nucleus": float((left.cumsum(1) - left < SAMPLED.top_p).sum(1).float().mean()),
        }
        if found["right"]:
            calls = {"sample_seconds": partial(sampler.draw, logits, rows)}
            found |= medians(calls, self.device, self.rounds)
        return found

    def verdict(self, plan: StepPlan, arm: Arm, logits: Tensor) -> Verdict:
        """The worse verdict on the first and the last request."""
        verdicts = []
        for row in (0, -1):
            request: Request = plan.decodes[row]
            assert request.prompt is not None
            tokens = [*request.prompt, *request.outputs[0]]
            verdicts.append(self._judge.verdict(tokens, arm.cache, logits[row]))
        return max(verdicts, key=lambda one: one.error / one.error_allowed)

    def _compare(self, engine: LLMEngine, arm: Arm) -> None:
        """Raise unless tokens with async_scheduling are those without."""
        tokens = {name: one.outputs[0] for name, one in engine.scheduler.requests.items()}
        if not arm.ahead:
            self._tokens[arm] = {name: list(own) for name, own in tokens.items()}
            return
        wanted = self._tokens.get(arm._replace(ahead=False))
        if wanted is None:
            raise RuntimeError("there is nothing to compare its tokens with")
        for name, own in tokens.items():
            if own[:WARM_UP] != wanted[name][:WARM_UP]:
                raise RuntimeError(f"request {name} got other tokens than without async_scheduling")

    def _bytes(self, engine: LLMEngine, context: float) -> dict[str, float]:
        """The bytes that a step must read, with so many tokens in the cache."""
        module: Any = engine.model.module
        weights = sum(weight.nbytes for weight in module.parameters())
        if not module.config.tie_word_embeddings:  # a few rows of it are read
            weights -= module.get_input_embeddings().weight.nbytes
        shape = engine.runner.cache.shape
        return {"weight_bytes": weights, "kv_bytes": context * shape.block_bytes / shape.block_size}

    def _steps(self, engine: LLMEngine) -> tuple[float, StepTimes]:
        """Seconds of a step, and of the host's parts of the last ones."""
        seconds = []
        for _ in range(self.size.runs):
            begun = time.perf_counter()
            parts = round_of(engine, RUN)
            seconds.append((time.perf_counter() - begun) / RUN)
        return median(seconds), parts


def context_tokens(engine: LLMEngine) -> int:
    """All tokens that a step attends to, its own included."""
    return sum(request.num_tokens for request in engine.scheduler.requests.values())


# -- the reference ---------------------------------------------------------------------------------

FACTOR = 2.0
"""The allowed error over that of transformers in the same precision."""


class Verdict(NamedTuple):
    """The error of logits, |logits - exact| / |exact|, and how much of it rounding explains."""

    error: float
    error_allowed: float

    @property
    def right(self) -> bool:
        """False for NaN."""
        return self.error <= self.error_allowed


class Judge:
    """Compares logits with those of transformers, without blocks, in float32.

    The error of transformers in the model's precision is what rounding explains. With an 8-bit
    cache, both get keys and values rounded to it.
    """

    def __init__(self, model: LoadedModel) -> None:
        """To be made before an engine uses the model, whose weights it copies."""
        self._own: Any = model.module
        self._exact = deepcopy(self._own).float()
        self._known: dict[tuple[str, tuple[int, ...]], tuple[Tensor, float]] = {}

    def verdict(self, tokens: Sequence[int], cache: str, logits: Tensor) -> Verdict:
        key = (cache, tuple(tokens))
        if key not in self._known:
            exact = _logits(self._exact, tokens, cache)
            self._known[key] = exact, norm_error(_logits(self._own, tokens, cache), exact)
        exact, usual = self._known[key]
        return Verdict(norm_error(logits, exact), FACTOR * usual + 1e-5)


def same_samples(logits: Tensor, rows: Sequence[Row]) -> bool:
    """Whether the tokens sampled from logits are those that a CPU samples."""
    here, there = (Sampler().sample(one, rows) for one in (logits, logits.cpu()))
    return [one.token for one in here] == [one.token for one in there]


@torch.no_grad()
def _logits(module: Any, tokens: Sequence[int], cache: str) -> Tensor:
    """The logits of the next token."""
    ids = torch.tensor([list(tokens)], device=module.device)
    with attention(module, _registered(cache)):
        output = module(input_ids=ids, use_cache=False, logits_to_keep=1, return_dict=True)
    last: Tensor = output.logits[0, -1]
    return last.float()


def _registered(cache: str) -> str:
    """The name of transformers' attention over keys and values rounded to the cache's dtype."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    if cache == AUTO:
        return "sdpa"

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
        k, v = (rounded(one, FORMATS[cache]).to(q.dtype) for one in (k, v))
        return sdpa_attention_forward(module, q, k, v, *rest, **named)

    AttentionInterface.register(cache, attend)
    AttentionMaskInterface.register(cache, sdpa_mask)
    return cache


# -- by kernel -------------------------------------------------------------------------------------

REPLAYS = 10
"""Profiled steps, timed as one."""
SHOWN, WIDTH = 30, 90
"""Kernels in the table, and characters of their names."""


def profile(words: Sequence[str]) -> None:
    """Profile one step; print a table, and keep the results."""
    asked = parse_device(__doc__, words)
    torch.set_num_threads(1)
    size = size_of(asked.quick)
    bench = Bench(size, asked.device, asked.rounds, asked.quick)
    arm = Arm(AUTO, "native", recorder_of(asked.device) is not None)
    about = {"model": size.shape.name, "batch": size.batch, "layers": size.shape.layers}
    results = Results("profile", "step", ["profile", *words], asked, DTYPE, arm=str(arm), **about)
    found = profiled(bench, bench.engine(arm), arm)
    results.content |= found
    if "failed" in found:
        results.keep()
        sys.exit(f"{arm}: {found['failed']}, not profiled")
    cells: dict[str, Callable[[Line], str]] = {
        "kernel": lambda one: f"`{one['name'][:WIDTH]}`",
        "ms a step": lambda one: f"{one[TIMED] * 1e3:.3f}",
        "": lambda one: f"{one[TIMED] / found['busy_seconds']:.1%}",
        "launches": lambda one: f"{one['launches']:g}",
        "a layer": lambda one: str(one["a_layer"] or ""),
    }
    title = results.heading(size.shape.name, DTYPE, f"{size.batch} requests", str(arm))
    results.close(
        f"{title}: a step takes {found[TIMED] * 1e3:.3f} ms, kernels run for {found['busy']:.0%} "
        f"of it, {found['launches_a_layer']} launches a layer, {found['launches']:g} in all\n\n"
        f"{columns(found['kernels'][:SHOWN], cells)}"
    )


def profiled(bench: Bench, engine: LLMEngine, arm: Arm) -> Line:
    """The time of a step by kernel, if its logits are right."""
    runner, device, layers = engine.runner, bench.device, bench.size.shape.layers
    if arm.graphs and runner.graphs is None:
        return {"failed": "no graph was captured"}
    plan = engine.scheduler.plan(engine.now)
    inputs = runner.inputs_of(plan)
    verdict = bench.verdict(plan, arm, runner.carry_out(inputs).clone())
    if not verdict.right:
        return {"failed": f"off by {verdict.error:.2g} of the norm"}

    def steps() -> None:
        for _ in range(REPLAYS):
            runner.carry_out(inputs)

    seconds = medians({"steps": steps}, device, bench.rounds, wall=True)["steps"] / REPLAYS
    by_name(steps, device)  # warms up the profiler
    kernels: list[Line] = [
        {
            "name": name,
            "launches": launches / REPLAYS,
            "a_layer": launches // (REPLAYS * layers),
            "seconds": total / REPLAYS,
        }
        for name, (launches, total) in by_name(steps, device).items()
    ]
    if not any(one["a_layer"] for one in kernels):  # its driver may not see into graphs
        return {"failed": "the profiler has seen no kernel of a layer"}
    kernels.sort(key=lambda one: one["seconds"], reverse=True)
    busy = sum(one["seconds"] for one in kernels)
    return {
        "seconds": seconds,
        "busy_seconds": busy,
        "busy": busy / seconds,
        "launches": sum(one["launches"] for one in kernels),
        "launches_a_layer": sum(one["a_layer"] for one in kernels),
        "kernels": kernels,
    }


def by_name(call: Callable[[], object], device: torch.device) -> dict[str, tuple[int, float]]:
    """Launches and total seconds of each kernel; on a CPU, of each of torch's operations without
    those that it calls."""
    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profiler(activities=[activity]) as found:
        call()
        wait(device)
    sums: dict[str, tuple[int, float]] = {}
    for event in found.events():
        if cuda and (event.device_type != DeviceType.CUDA or event.is_user_annotation):
            continue
        took = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        launches, seconds = sums.get(event.name, (0, 0.0))
        sums[event.name] = launches + 1, seconds + took / 1e6
    return sums


main = main_of(__name__, step, profile)

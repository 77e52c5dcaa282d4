"""A whole decode step of the engine, against the time of its bytes at the speed of a copy.

    python -m pagedsim.experiments.benchmarks.step
    python -m pagedsim.experiments.benchmarks.step profile

A model of Llama-3.1-8B's shape with random weights, 64 requests of about 1,024 tokens. The limit is
the time to read its weights, but for the embeddings, and all keys and values once, at the speed of
a device copy timed in the same run. A step is `engine.step` by the host's clock, many in a row, in
CUDA graphs where there are any, with and without `async_scheduling` and an 8-bit cache, greedily,
and sampled with temperature and top-p.

First, logits of a step are compared with transformers' in float32 (the allowed error is twice that
of transformers in the model's precision), and tokens with `async_scheduling` with those without.
What is wrong is not timed. Results go to step.json in experiments/results/<GPU>.

`profile` gives the time of the greedy step by kernel, and launches a layer: its graph is replayed
under torch's profiler. A kernel belongs to a layer as often as each layer launches it; *busy* is
the share of the time, measured without the profiler, in which kernels run. Results go to
profile.json.

`--attention flashinfer` or `fa` has another package's kernels attend; steps with FlashInfer's are
launched kernel by kernel. Results go to step-flashinfer.json and so on.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from pagedsim.core import Request, SamplingParams, StepPlan
from pagedsim.engine.attention import EAGER
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.graphs import recorder_of
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.models.probe import attention
from pagedsim.experiments.benchmarks.device import (
    BY_ATTENTION,
    TIMED,
    Copy,
    Line,
    Run,
    free_memory,
    medians,
    norm_error,
    wait,
)
from pagedsim.experiments.benchmarks.harness import main_of
from pagedsim.experiments.benchmarks.host import full_batch
from pagedsim.experiments.benchmarks.shapes import BASE, TINY, config_of, shape_of
from pagedsim.kernels.float8 import AUTO, FORMATS, rounded

# -- what is measured ------------------------------------------------------------------------------

DTYPE = "bfloat16"
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
"""Random weights make flat distributions, of which top-p leaves more tokens than of a trained
model's."""
WARM_UP = 8
"""Steps before any is timed; their tokens are compared."""
RUN = 16
"""Steps timed as one, in which each request fills one block."""
FACTOR = 2.0
"""The allowed error of logits over that of transformers in the same precision."""


class Arm(NamedTuple):
    """One way to compute a step."""

    cache: str
    graphs: bool
    ahead: bool = False
    sampled: bool = False

    def __str__(self) -> str:
        words = ["native", "graphs" if self.graphs else "kernel by kernel"]
        words += ["sampled"] * self.sampled + ["async_scheduling"] * self.ahead
        return ", ".join([*words, *([] if self.cache == AUTO else [self.cache])])


def arms(graphs: bool) -> list[Arm]:
    """All arms; tokens with async_scheduling are compared with those of the arm before."""
    kinds = ((AUTO, False), (AUTO, True), ("fp8_e4m3", False))
    return [Arm(cache, graphs, ahead, drawn) for cache, drawn in kinds for ahead in (False, True)]


def step(words: Sequence[str]) -> None:
    """Measure all arms; print a table, and keep the results."""
    run = Run("step", __doc__, words, BY_ATTENTION)
    bench = Bench(run)
    # FlashAttention reads no cache of 8 bits.
    each = [arm for arm in arms(bench.graphs) if arm.cache == AUTO or bench.attention != "fa"]
    run.sweep(each, bench.measured)
    cells: dict[str, Callable[[Line], str]] = {
        "": lambda line: line["case"],
        "limit ms": lambda line: f"{line['limit_seconds'] * 1e3:.3g}",
        "step ms": lambda line: f"{line[TIMED] * 1e3:.3g}",
        "times it": lambda line: f"{line['to_limit']:.2f} ×",
    }
    run.close(cells, bench.shape.name, DTYPE, f"{bench.batch} requests")


# -- the measurement -------------------------------------------------------------------------------


class Bench:
    """A model, and the measurement of arms."""

    def __init__(self, run: Run) -> None:
        torch.set_num_threads(1)
        self.device, self.rounds = run.device, run.asked.rounds
        self.attention: str = run.asked.attention
        self.graphs = recorder_of(self.device) is not None and self.attention not in EAGER
        self._block_size = run.asked.block_size or 16
        self.shape, self.batch, self._context, self._runs = (
            (TINY, 3, 60, 1) if run.tiny else (shape_of(BASE), 64, 1024, 8)
        )
        """The context is that of a request, on average over the timed steps."""
        run.content |= {"model": self.shape.name, "batch": self.batch, "dtype": DTYPE}
        self._longest = self._context + WARM_UP + self._runs * RUN
        self._tokens: dict[Arm, dict[Any, list[int]]] = {}
        """The first tokens of each request, by arm."""

    @cached_property
    def copy(self) -> Copy:
        """The limit of the device's memory."""
        return Copy(self.device)

    @cached_property
    def models(self) -> tuple[LoadedModel, Any]:
        """The engine's model, and transformers' in float32."""
        model = load_model(
            config_of(self.shape),
            dtype=DTYPE,
            device=self.device,
            model_impl="native",
            max_model_len=self._longest,
        )
        exact: Any = deepcopy(model.module)  # before an engine packs its weights
        exact.float()
        free_memory()
        return model, exact

    def engine(self, arm: Arm) -> LLMEngine:
        """An engine whose requests have all been prefilled."""
        rng, ahead = random.Random(0), WARM_UP + self._runs * RUN // 2
        params = SAMPLED if arm.sampled else SamplingParams(temperature=0)
        prompts = [
            [rng.randrange(self.shape.vocab) for _ in range(self._context - ahead)]
            for _ in range(self.batch)
        ]
        engine = full_batch(
            self.models[0],
            prompts,
            replace(params, max_tokens=2 * ahead, ignore_eos=True),
            enforce_eager=not arm.graphs,
            async_scheduling=arm.ahead,
            kv_cache_dtype=arm.cache,
            attention=self.attention,
            block_size=self._block_size,
            blocks=self.batch * -(-self._longest // self._block_size),
        )
        if arm.graphs and engine.runner.graphs is None:
            raise RuntimeError("no graph was captured")
        return engine

    def measured(self, arm: Arm) -> Line:
        """The line of an arm."""
        wanted = self._tokens.get(arm._replace(ahead=False))
        if arm.ahead and wanted is None:
            raise RuntimeError("there is nothing to compare its tokens with")
        engine = self.engine(arm)
        line: Line = {}
        if not (arm.ahead or arm.sampled):
            plan, run, line = self.next_step(engine, arm)
            if not line["right"]:
                return line
            best = run().argmax(1).tolist()
            answers = {request.id: token for request, token in zip(plan.decodes, best, strict=True)}
            engine.scheduler.commit(plan, engine.now, answers)
        copy_s = self.copy.moved / medians({"copy": self.copy}, self.device, self.rounds)["copy"]
        for _ in range(WARM_UP):
            engine.step()
        requests = engine.scheduler.requests
        tokens = {name: list(request.outputs[0][:WARM_UP]) for name, request in requests.items()}
        if arm.ahead and tokens != wanted:
            raise RuntimeError("other tokens than without async_scheduling")
        self._tokens[arm] = tokens
        before, seconds = context_tokens(engine), []
        for _ in range(self._runs):
            begun = time.perf_counter()
            for _ in range(RUN):
                engine.step()
            seconds.append((time.perf_counter() - begun) / RUN)
        read = step_bytes(engine, (before + context_tokens(engine)) / 2)
        limit = sum(read.values()) / copy_s
        return {
            **line,
            **read,
            "copy_gb_s": copy_s / 1e9,
            "limit_seconds": limit,
            TIMED: median(seconds),
            "to_limit": median(seconds) / limit,
        }

    def next_step(self, engine: LLMEngine, arm: Arm) -> tuple[StepPlan, Callable[[], Tensor], Line]:
        """The next step, a call that computes its logits, and their error: of the first or the last
        request, the worse one, beside what rounding explains."""
        plan, (model, exact) = engine.scheduler.plan(engine.now), self.models
        run = partial(engine.runner.carry_out, engine.runner.inputs_of(plan))
        logits, errors = run().clone(), []
        for row in (0, -1):
            request: Request = plan.decodes[row]
            tokens = [*(request.prompt or ()), *request.outputs[0]]
            wanted = logits_of(exact, tokens, arm.cache)
            usual = norm_error(logits_of(model.module, tokens, arm.cache), wanted)
            errors.append((norm_error(logits[row], wanted), FACTOR * usual + 1e-5))
        error, allowed = max(errors, key=lambda pair: (not pair[0] <= pair[1], pair[0] / pair[1]))
        return plan, run, {"error": error, "error_allowed": allowed, "right": error <= allowed}


def context_tokens(engine: LLMEngine) -> int:
    """All tokens that a step attends to, its own included."""
    return sum(request.num_tokens for request in engine.scheduler.requests.values())


def step_bytes(engine: LLMEngine, context: float) -> dict[str, float]:
    """The bytes that a step must read, with so many tokens in the cache."""
    module: Any = engine.model.module
    weights = sum(weight.nbytes for weight in module.parameters())
    if not module.config.tie_word_embeddings:  # a few rows of it are read
        weights -= module.get_input_embeddings().weight.nbytes
    shape = engine.runner.cache.shape
    return {"weight_bytes": weights, "kv_bytes": context * shape.block_bytes / shape.block_size}


@torch.no_grad()
def logits_of(module: Any, tokens: Sequence[int], cache: str) -> Tensor:
    """The logits of the next token by transformers, without blocks; with an 8-bit cache from keys
    and values rounded to it."""
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
        k, v = (rounded(values, FORMATS[cache]).to(q.dtype) for values in (k, v))
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
    run = Run("step profile", __doc__, words, BY_ATTENTION)
    bench = Bench(run)
    arm = Arm(AUTO, bench.graphs)
    sums = profiled(bench, arm)
    run.content |= {"layers": bench.shape.layers, "arm": str(arm), **sums}
    cells: dict[str, Callable[[Line], str]] = {
        "kernel": lambda line: f"`{line['name'][:WIDTH]}`",
        "ms a step": lambda line: f"{line[TIMED] * 1e3:.3f}",
        "": lambda line: f"{line[TIMED] / sums['busy_seconds']:.1%}",
        "launches": lambda line: f"{line['launches']:g}",
        "a layer": lambda line: str(line["a_layer"] or ""),
    }
    busy = f"a step takes {sums[TIMED] * 1e3:.3f} ms, kernels run for {sums['busy']:.0%} of it"
    launches = f"{sums['launches_a_layer']} launches a layer, {sums['launches']:g} in all"
    run.close(cells, bench.shape.name, str(arm), busy, launches, lines=sums["kernels"][:SHOWN])


def profiled(bench: Bench, arm: Arm) -> Line:
    """The time of a step by kernel; exits with a line if its logits are wrong."""
    _, run, line = bench.next_step(bench.engine(arm), arm)
    if not line["right"]:
        sys.exit(f"{arm}: off by {line['error']:.2g} of the norm, not profiled")

    def steps() -> None:
        for _ in range(REPLAYS):
            run()

    wall = medians({TIMED: steps}, bench.device, bench.rounds, wall=True)[TIMED] / REPLAYS
    by_name(steps, bench.device)  # warms up the profiler
    kernels: list[Line] = [
        {
            "name": name,
            "launches": launches / REPLAYS,
            "a_layer": launches // (REPLAYS * bench.shape.layers),
            "seconds": total / REPLAYS,
        }
        for name, (launches, total) in by_name(steps, bench.device).items()
    ]
    if not any(kernel["a_layer"] for kernel in kernels):  # its driver may not see into graphs
        sys.exit(f"{arm}: the profiler has seen no kernel of a layer")
    busy = sum(kernel["seconds"] for kernel in kernels)
    return {
        "seconds": wall,
        "busy_seconds": busy,
        "busy": busy / wall,
        "launches": sum(kernel["launches"] for kernel in kernels),
        "launches_a_layer": sum(kernel["a_layer"] for kernel in kernels),
        "kernels": sorted(kernels, key=lambda kernel: kernel["seconds"], reverse=True),
    }


def by_name(call: Callable[[], object], device: torch.device) -> dict[str, tuple[int, float]]:
    """Launches and total seconds of each kernel; on a CPU, of each of torch's operations without
    those that it calls."""
    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profiler(activities=[activity]) as trace:
        call()
        wait(device)
    sums: dict[str, tuple[int, float]] = {}
    for event in trace.events():
        if cuda and (event.device_type != DeviceType.CUDA or event.is_user_annotation):
            continue
        took = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        launches, seconds = sums.get(event.name, (0, 0.0))
        sums[event.name] = launches + 1, seconds + took / 1e6
    return sums


main = main_of(__name__, step, profile)

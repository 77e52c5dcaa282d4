"""Time of the host to prepare and launch one step, by kind: decodes, prompts, and both together.

    python -m pagedsim.experiments.benchmarks.launch [--device cpu]

A model of Llama-3.1-8B's shape. A step is that of `Runner`: inputs from the plan, and all launches,
kernel by kernel or as one CUDA graph; its end is waited for in the column "step" alone. Each figure
is the median of the steps of a round, of the best round. On a GPU the logits of a graph are first
compared with those of the same step without one; they may differ as much as bfloat16 explains. What
is wrong is not timed.

On a CPU tensors have shapes alone: kernels are looked up for their arguments, and nothing is
computed. What is missing is CUDA's part of a launch (2 to 5 µs each) and torch's of a product, for
which an empty tensor stands in: torch's own stand-ins take longer than a GPU's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn import functional

from pagedsim.core import Request, SamplingParams, Scheduler, StepPlan
from pagedsim.engine import runner
from pagedsim.engine.cache import Cache
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.models.loaded import StepContext
from pagedsim.engine.models.native import decoder
from pagedsim.engine.models.probe import probe
from pagedsim.engine.models.weights import skeleton
from pagedsim.engine.runner import Runner
from pagedsim.experiments.benchmarks.device import TIMED, Line, Run, norm_error, wait
from pagedsim.experiments.benchmarks.harness import main_of
from pagedsim.experiments.benchmarks.shapes import BASE, config_of, shape_of
from pagedsim.kernels import ops
from pagedsim.server import ServerSpec

META = torch.device("meta")
LONGEST, SEQS, BLOCKS = 4096, 64, 2048
STEPS = 10
ALLOWED = 0.05
"""The error of logits of a graph, whose kernels may have other tiles."""


class Kind(NamedTuple):
    """A step: so many decodes, and a prompt of so many tokens."""

    decodes: int
    prompt: int
    graph: bool

    def __str__(self) -> str:
        parts = [f"{self.decodes} decodes"] * bool(self.decodes)
        parts += [f"a prompt of {self.prompt:,}"] * bool(self.prompt)
        return f"{' and '.join(parts)}, {'with graphs' if self.graph else 'eager'}"


def kinds(prompts: Sequence[int]) -> Iterator[Kind]:
    """All steps that are measured."""
    for graph in (False, True):
        yield Kind(16, 0, graph)
        yield from (Kind(0, prompt, graph) for prompt in prompts)
        yield Kind(16, 128, graph)


def launch(words: Sequence[str]) -> None:
    """Measure all kinds; print a table, and keep the results."""
    run = Run("launch", __doc__, words, {"--layers": 32, "--prompts": [16, 128, 512, 2048]})
    with stubbed() if run.tiny else nullcontext(Counter[str]()) as launched:
        bench = Bench(run, launched)
        run.sweep(kinds(run.asked.prompts), bench.measured)
    cells: dict[str, Callable[[Line], str]] = {
        "": lambda line: line["case"],
        "graphs": lambda line: str(line["graphs"]),
        "kernels": lambda line: str(line["kernels"] or ""),
        "inputs µs": lambda line: f"{line['inputs_seconds'] * 1e6:.0f}",
        "host µs": lambda line: f"{line[TIMED] * 1e6:.0f}",
        "step µs": lambda line: f"{line['step_seconds'] * 1e6:.0f}",
        "error": lambda line: f"{line['error']:.1e}" if "error" in line else "",
    }
    known = run.content
    spent = f"{known['warm_up_seconds']:.1f} s and {known['warm_up_bytes'] / 2**20:.0f} MiB"
    run.close(cells, f"{BASE}, {run.asked.layers} layers", f"warm in {spent}")


class Bench:
    """A model and its runner, and the measurement of steps."""

    def __init__(self, run: Run, launched: Counter[str]) -> None:
        torch.set_num_threads(1)
        self.device, self.rounds = (META if run.tiny else run.device), run.asked.rounds
        self.model = model_on(self.device, run.asked.layers)
        self.launched = launched
        cache = Cache(self.model.cache_shape(16), BLOCKS, 0, self.device)
        self.runner = Runner(self.model, cache, seqs=SEQS, longest=LONGEST)
        free, start = self._free(), time.perf_counter()
        self.runner.warm_up(LONGEST, graphs=1024)
        run.content["warm_up_seconds"] = time.perf_counter() - start
        run.content["warm_up_bytes"] = free - self._free()
        self._graphs, self._names = self.runner.graphs, count()
        # The machine of a CPU may be shared.
        self._clock = time.thread_time if run.tiny else time.perf_counter

    def _free(self) -> int:
        """Bytes of the GPU that are left."""
        wait(self.device)
        return torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else 0

    def measured(self, kind: Kind) -> Line:
        """The line of a kind."""
        runner, scheduler, line = self.runner, self._serving(kind), dict[str, Any]()
        if kind.graph and self.device.type == "cuda":
            plan = self._next(scheduler, kind)
            inputs, logits = runner.inputs_of(plan), []
            for runner.graphs in (self._graphs, None):
                logits.append(runner.carry_out(inputs).clone())
            line["error"] = norm_error(*logits)
            self._end(scheduler, plan)
            if not line["error"] <= ALLOWED:
                return line
        runner.graphs = self._graphs if kind.graph else None
        times: list[list[tuple[float, float, float]]] = []
        for _ in range(self.rounds):
            times.append([])
            for _ in range(STEPS):
                plan = self._next(scheduler, kind)
                wait(self.device)
                self.launched.clear()
                runner.launched.clear()
                start = self._clock()
                inputs = runner.inputs_of(plan)
                prepared = self._clock()
                runner.carry_out(inputs)
                launched = self._clock()
                wait(self.device)
                times[-1].append((prepared - start, launched - start, self._clock() - start))
                self._end(scheduler, plan)
        inputs_s, seconds, whole = (
            min(median(part) for part in parts)
            for parts in zip(*(zip(*steps, strict=True) for steps in times), strict=True)
        )
        launches = {"graphs": runner.launched["graph"], "kernels": self.launched.total()}
        parts = {"inputs_seconds": inputs_s, TIMED: seconds, "step_seconds": whole}
        return {**line, **launches, **parts}

    def _serving(self, kind: Kind) -> Scheduler:
        """A scheduler with the decodes of a kind."""
        spec = ServerSpec(
            batching="unified", max_seqs=SEQS, max_batched_tokens=LONGEST, blocks=BLOCKS,
            cpu_blocks=0, max_model_len=LONGEST,
        )  # fmt: skip
        scheduler = spec.scheduler()
        for _ in range(kind.decodes):
            self._add(scheduler, 64, LONGEST)
        while scheduler.clock.requests < kind.decodes:
            self._end(scheduler, scheduler.plan(0))
        return scheduler

    def _add(self, scheduler: Scheduler, prompt: int, tokens: int) -> None:
        params = SamplingParams(max_tokens=min(tokens, LONGEST - prompt), ignore_eos=True)
        scheduler.add(Request(next(self._names), [7] * prompt, params), 0)

    def _next(self, scheduler: Scheduler, kind: Kind) -> StepPlan:
        if kind.prompt:
            self._add(scheduler, kind.prompt, 1)
        return scheduler.plan(0)

    def _end(self, scheduler: Scheduler, plan: StepPlan) -> None:
        sampling = [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)]
        scheduler.commit(plan, 0, {request.id: 7 for request in sampling})


def model_on(device: torch.device, layers: int) -> LoadedModel:
    """The model with random weights, or on `meta` with none."""
    config = config_of(shape_of(BASE))
    config.num_hidden_layers = layers
    if device != META:
        return load_model(
            config, dtype="bfloat16", device=device, model_impl="native", max_model_len=LONGEST
        )
    module = skeleton(config).to(torch.bfloat16)
    specs = probe(module, layers, LONGEST)
    with patch.object(decoder, "on_host", lambda part, host: part):
        native = decoder.Native(module, specs, LONGEST)
    return LoadedModel(
        BASE, module, config, layers, specs[0].kv_heads, specs[0].head_dim, config.vocab_size,
        LONGEST, torch.bfloat16, device, (), StepContext(), native=native,
    )  # fmt: skip


class Replays:
    """Stands in for a recorder of CUDA graphs."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return lambda: None


@contextmanager
def stubbed() -> Iterator[Counter[str]]:
    """Without a GPU: Triton's kernels are bound and looked up for a GPU of compute capability 9.0,
    and counted; tensors on `meta` count as those of a GPU."""
    import triton
    from triton.compiler import CompiledKernel

    from pagedsim.experiments.benchmarks.fake_gpu import Driver

    launched: Counter[str] = Counter()

    def empty(like: Any, shape: Any = None, *_: Any, **given: Any) -> Any:
        given.pop("memory_format", None)
        kind = {"dtype": like.dtype, "device": like.device, **given}
        return torch.empty(like.shape if shape is None else shape, **kind)

    def product(x: Any, weight: Any, *_: Any) -> Any:
        launched["product"] += 1
        return empty(x, (*x.shape[:-1], weight.shape[0]))

    def run(kernel: Any, *_: Any) -> None:
        launched["kernel"] += 1

    with (
        patch.object(triton.runtime.driver, "_active", Driver(90)),
        patch.object(CompiledKernel, "_init_handles", lambda kernel: None),
        patch.object(CompiledKernel, "run", run),
        patch.object(ops, "on_gpu", lambda tensor: tensor.is_meta),
        patch.object(functional, "linear", product),
        patch.object(torch, "empty_like", empty),
        patch.object(torch.Tensor, "new_empty", empty),
        patch.object(runner, "recorder_of", lambda device: Replays()),
    ):
        yield launched


main = main_of(__name__, launch)

"""Paged attention and swapping on a GPU, against the limits of the GPU.

    python -m pagedsim.experiments.benchmarks.kernels [--headlines eight prefill ...] [--tune]
    python -m pagedsim.experiments.benchmarks.kernels --attention flashinfer
    python -m pagedsim.experiments.benchmarks.kernels swap

Outputs are first compared with plain torch in fp64; a wrong one is not timed. The limit of a case
of attention is the time of its bytes at the speed of a device copy, or of its FLOP at that of a
matrix product, whichever is longer; both are timed in the same rounds. `--headlines` names groups
of cases. With `--tune` each group is timed with the tiles that there are, then others are tried
(`tune.py`), and it is timed again with the best. Results go to kernels.json and swap.json in
experiments/results/<GPU>.

`--attention flashinfer` or `fa` measures another package's kernels, for the cases that they have:
with what is planned once a step in hand, as ours. Results go to kernels-flashinfer.json and so on.

`swap` moves blocks out and in by block size and layout, between random places of both pools, so
that no two share a copy, the worst case. It is timed by the host's clock, until all copies are
done, in the same rounds as one large copy of pinned memory each way, its limit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product, starmap
from typing import Any, NamedTuple

import torch

from pagedsim.core import ConfigError, StepPlan
from pagedsim.core.memory import Pairs
from pagedsim.engine.attention import TRITON
from pagedsim.engine.cache import LAYOUTS, Cache, CacheShape, Mover
from pagedsim.experiments.benchmarks.device import (
    BY_ATTENTION,
    TIMED,
    Copy,
    Line,
    Run,
    medians,
    noise,
    wait,
)
from pagedsim.experiments.benchmarks.harness import main_of
from pagedsim.experiments.benchmarks.shapes import (
    BASE,
    HEADLINES,
    TINY,
    TINY_CASES,
    Case,
    Problem,
    shape_of,
)
from pagedsim.experiments.benchmarks.tune import Gpu, add, tuned_attention
from pagedsim.kernels import tuning

# -- attention -------------------------------------------------------------------------------------

SIDE, SHORT_SIDE = 8192, 256
"""The side of the limiting product's matrices, and at tiny sizes."""


def kernels(words: Sequence[str]) -> None:
    """Measure the grid; print a table, and keep the results."""
    names = {"nargs": "+", "choices": [*HEADLINES], "default": [*HEADLINES], "help": "groups"}
    tune = {"action": "store_true", "help": "tune tiles for these groups"}
    run = Run("kernels", __doc__, words, {"--headlines": names, "--tune": tune, **BY_ATTENTION})
    if run.asked.tune and run.asked.attention != TRITON:
        sys.exit(f"--tune: is for --attention {TRITON} alone, not {run.asked.attention}")
    limits, size = Limits(run), run.asked.block_size
    groups = [TINY_CASES] if run.tiny else [HEADLINES[name] for name in run.asked.headlines]
    for group in groups:
        sized = (case._replace(block_size=size) if size else case for case in group)
        cases = [*filter(limits.has, dict.fromkeys(sized))]
        run.sweep(cases, limits.line)
        if run.asked.tune and not run.tiny and tuned(run, cases):
            run.sweep(cases, limits.line)
    cells: dict[str, Callable[[Line], str]] = {
        "case": lambda line: line["case"],
        "µs": lambda line: f"{line[TIMED] * 1e6:,.1f}",
        "GB/s": lambda line: f"{line['gb_s']:,.0f}",
        "TFLOP/s": lambda line: f"{line['tflop_s']:,.3g}",
        "a copy's GB/s": lambda line: f"{line['copy_gb_s']:,.0f}",
        "a product's TFLOP/s": lambda line: f"{line['product_tflop_s']:,.3g}",
        "of the limit": lambda line: f"{line['of_limit']:.0%}",
    }
    run.close(cells)


def tuned(run: Run, cases: Sequence[Case]) -> bool:
    """Tune tiles for these cases, where this code has not done so: whether there are new ones. What
    fails leaves the old ones."""
    assert run.place is not None
    kept, new, about = run.place / tuning.PATH.name, False, dict(run.content)
    gpu = Gpu(about.pop("device"), tuning.capability(run.device), about, run.device)
    entries = tuning.read(kept) if kept.exists() else []
    done = {(e.kernel, e.heads.cache) for e in entries if e.measured["code"] == about["code"]}
    for kernel, cache in dict.fromkeys((case.kernel, case.cache) for case in cases):
        if (kernel, cache) in done:
            continue
        try:
            entry = tuned_attention(BASE, kernel, cache, gpu, run.asked.rounds)
        except Exception as problem:
            print(f"{kernel}, {cache}: {problem}; its tiles stay", file=sys.stderr, flush=True)
        else:
            add(entry, tuning.PATH)
            add(entry, kept)
            new = True
    return new


class Limits:
    """Measures an attention beside the limits of the device."""

    def __init__(self, run: Run) -> None:
        self._device, self._rounds = run.device, run.asked.rounds
        self._attention: str = run.asked.attention
        self._dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        side = SHORT_SIDE if run.tiny else SIDE
        kind: Any = {"dtype": self._dtype, "device": self._device}
        self._copy = Copy(self._device)
        left, right = torch.randn(2, side, side, **kind).unbind()
        self._product = partial(torch.matmul, left, right, out=torch.empty(side, side, **kind))
        self._flop = 2 * side**3

    def has(self, case: Case) -> bool:
        """Whether the attention has the case; says why not."""
        try:
            case.attention(self._attention, self._dtype, self._device)
        except ConfigError as error:
            print(f"{case}: left out, {error}", file=sys.stderr)
            return False
        return True

    def line(self, case: Case) -> Line:
        """The line of a case, without a time if its result is wrong."""
        problem = Problem(case, self._dtype, self._device, self._attention)
        moved, flop = case.moved(self._dtype), case.flop
        line: Line = {"kind": case.kind, "bytes": moved, "flop": flop}
        line |= {"error": problem.error(problem.attend()), "error_allowed": problem.allowed}
        if not line["error"] <= problem.allowed:
            return line
        calls: dict[str, Callable[[], object]] = {TIMED: problem.attend, "copy": self._copy}
        seconds = medians({**calls, "product": self._product}, self._device, self._rounds)
        ours, bytes_s = seconds[TIMED], self._copy.moved / seconds["copy"]
        flop_s = self._flop / seconds["product"]
        return {
            **line,
            TIMED: ours,
            "copy_gb_s": bytes_s / 1e9,
            "product_tflop_s": flop_s / 1e12,
            "bound": "bytes" if moved / bytes_s > flop / flop_s else "flop",
            "of_limit": max(moved / bytes_s, flop / flop_s) / ours,
            "gb_s": moved / ours / 1e9,
            "of_copy": moved / ours / bytes_s,
            "tflop_s": flop / ours / 1e12,
        }


# -- swapping --------------------------------------------------------------------------------------

SIZES, FEW_SIZES = (8, 16, 32, 64, 128), (8, 16)
"""Tokens a block."""
MOVED, LITTLE = 128 * 2**20, 64 * 2**10
"""Bytes of a swap and of the one large copy beside it; at tiny sizes."""
WAYS = ("out", "in")


class Swap(NamedTuple):
    """One line of the table."""

    model: str
    block_size: int
    layout: str

    def __str__(self) -> str:
        return f"{self.model}, blocks of {self.block_size}, a copy a {self.layout}"


def swap(words: Sequence[str]) -> None:
    """Measure every block size and layout; print a table, and keep the results."""
    run = Run("kernels swap", __doc__, words)
    model, sizes, moved = (TINY.name, FEW_SIZES, LITTLE) if run.tiny else (BASE, SIZES, MOVED)
    swaps = starmap(Swap, product([model], sizes, LAYOUTS))
    run.sweep(swaps, lambda case: swapped(case, run.device, moved, run.asked.rounds))
    cells: dict[str, Callable[[Line], str]] = {
        "case": lambda line: line["case"],
        "KiB a copy": lambda line: f"{line['copy_bytes'] / 1024:,.4g}",
        "GB/s out, in": lambda line: ", ".join(f"{line[way]['gb_s']:,.3g}" for way in WAYS),
        "of a pinned copy, out, in": of_pinned,
    }
    run.close(cells)


def of_pinned(line: Line) -> str:
    """The speed each way as a share of one large copy's."""
    return ", ".join(f"{line[way]['of_pinned']:.0%}" for way in WAYS)


def swapped(swap: Swap, device: torch.device, moved: int, rounds: int) -> Line:
    """Whether it moves the right bytes and, if so, its speed each way."""
    of = shape_of(swap.model)
    shape = CacheShape(of.layers, swap.block_size, of.kv_heads, of.head_dim, torch.bfloat16)
    blocks = max(2, moved // shape.block_bytes)
    cache = Cache(shape, 2 * blocks, 2 * blocks, device)
    mover = Mover(cache, swap.layout)
    pairs = scattered(blocks)
    line: Line = {
        "blocks": blocks,
        "copy_bytes": shape.block_bytes // (2 * of.layers if swap.layout == "layer" else 1),
        "right": right(cache, mover, pairs),
    }
    if not line["right"]:
        return line
    size = blocks * shape.block_bytes
    host = noise(size, torch.device("cpu"), pinned=device.type == "cuda")
    device_bytes = noise(size, device)
    # Pools contain random bytes, not zeros, as those of a server.
    for pool in (cache.gpu, cache.cpu):
        pool.view(torch.uint8).random_()
    calls: Mapping[str, Callable[[], object]] = {
        "swap out": lambda: mover.move(plan_of("out", pairs)),
        "swap in": lambda: mover.move(plan_of("in", pairs)),
        "copy out": lambda: host.copy_(device_bytes, non_blocking=True),
        "copy in": lambda: device_bytes.copy_(host, non_blocking=True),
    }
    seconds = medians(calls, device, rounds, wall=True)
    for way in WAYS:
        ours, pinned = seconds[f"swap {way}"], seconds[f"copy {way}"]
        line[way] = {"gb_s": size / ours / 1e9, "of_pinned": pinned / ours}
    return {**line, TIMED: seconds["swap out"] + seconds["swap in"]}


def scattered(blocks: int) -> Pairs:
    """(GPU block, CPU block); no two pairs are adjacent in both pools, of 2 × blocks each."""
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
    return [(2 * block, 2 * place + 1) for place, block in enumerate(order)]


def plan_of(way: str, pairs: Pairs) -> StepPlan:
    """A step that only swaps."""
    plan = StepPlan(number=0, now=0.0)
    if way == "out":
        plan._swap_out = tuple(pairs)
    else:
        plan._swap_in = tuple((place, block) for block, place in pairs)
    return plan


def right(cache: Cache, mover: Mover, pairs: Pairs) -> bool:
    """Whether swapped blocks come back unchanged, and no other block changes."""
    gpu, cpu = cache.gpu.view(torch.uint8), cache.cpu.view(torch.uint8)
    gpu.random_()
    cpu.zero_()
    before = gpu.cpu().clone()  # on a CPU it is the pool itself
    mover.move(plan_of("out", pairs))
    wait(gpu.device)
    gpu.zero_()
    mover.move(plan_of("in", pairs))
    wait(gpu.device)
    expected, blocks = torch.zeros_like(before), [block for block, _ in pairs]
    expected[blocks] = before[blocks]
    return torch.equal(gpu.cpu(), expected)


main = main_of(__name__, kernels, swap)

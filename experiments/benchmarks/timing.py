"""Times of calls on a device, and work beside the limits of the device."""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch

from pagedsim.experiments.benchmarks.harness import columns

K = TypeVar("K")
Line = dict[str, Any]
"""A case and its measurement."""
TIMED = "seconds"
"""The key of the time of a call, in the lines of calls that were right."""


def failure(problem: Exception) -> str:
    """An error in one line."""
    reason = (str(problem).strip().splitlines() or [""])[0]
    return f"{type(problem).__name__}: {reason}"[:200]


# -- timing ----------------------------------------------------------------------------------------

FLUSHED, READS = 2**30, 4
"""Bytes read before a call, so that none of its inputs is in the GPU's L2 cache, and how often: a
millisecond, in which the host queues the whole call, dozens of launches, before the GPU begins it.
They are read, not written: written lines would have to leave the cache during the call."""
WARM_UP = 2
"""Rounds that do not count."""
AWAKE = 0.1
"""Seconds of work before them, since the clocks of an idle GPU are low."""


def medians(
    calls: Mapping[K, Callable[[], object]],
    device: torch.device,
    rounds: int,
    wall: bool = False,
) -> dict[K, float]:
    """Device seconds of a call, by name, or with `wall` the host's, from idle device to idle.

    All calls take turns in every round, so that a change of clocks is in all of them; this is what
    `triton.testing.do_bench`, which times one function after another, does not do.
    """
    seconds: dict[K, list[float]] = {name: [] for name in calls}
    flushed = None
    if device.type == "cuda" and not wall:
        flushed = noise(FLUSHED, device).view(torch.int32)
        end = time.monotonic() + AWAKE
        while time.monotonic() < end:
            flushed.sum()
            wait(device)
    for number in range(rounds + WARM_UP):
        timed = {name: _timed(call, device, flushed) for name, call in calls.items()}
        if number >= WARM_UP:
            for name, read in timed.items():
                seconds[name].append(read())
    return {name: median(of) for name, of in seconds.items()}


def _timed(
    call: Callable[[], object], device: torch.device, flushed: torch.Tensor | None
) -> Callable[[], float]:
    """Make the call; the returned function waits for its end and returns its seconds."""
    if flushed is None:
        wait(device)
        begun = time.perf_counter()
        call()
        wait(device)
        taken = time.perf_counter() - begun
        return lambda: taken
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(READS):
        flushed.sum()
    start.record()
    call()
    end.record()

    def read() -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return read


def wait(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def lost(device: torch.device) -> bool:
    """Whether an error, such as an illegal address, made the device unusable in this process."""
    try:
        wait(device)
    except RuntimeError:
        return True
    return False


def free_memory() -> None:
    """Return a deleted engine's memory to the GPU; its model is in reference cycles."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def noise(size: int, device: torch.device, pinned: bool = False) -> torch.Tensor:
    """Random bytes: a GPU may compress zeros, and draws less power for them."""
    room = torch.empty(size // 8, dtype=torch.int64, device=device, pin_memory=pinned)
    generator = torch.Generator(device).manual_seed(0)
    return room.random_(-(2**63), None, generator=generator).view(torch.uint8)


def norm_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """|found - exact| / |exact|."""
    return float((found.double() - exact).norm() / exact.norm())


# -- work beside its limit -------------------------------------------------------------------------

COPIED, FEW_COPIED = 512 * 2**20, 4 * 2**20
"""Bytes that a `Copy` reads, and at tiny sizes."""
SIDE, SHORT_SIDE = 8192, 256
"""The side of the limiting product's matrices, and at tiny sizes."""


class Copy:
    """One large copy within the device: the limit of its memory."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self._source = noise(FEW_COPIED if tiny else COPIED, device)
        self._target = torch.empty_like(self._source)
        self.moved = 2 * self._source.nbytes
        """Bytes, read and written."""

    def __call__(self) -> None:
        self._target.copy_(self._source)


class Rival(NamedTuple):
    """A call to time beside ours."""

    call: Callable[[], Any]
    error: Callable[[Any], float] = lambda out: 0.0
    """Of its result."""


class Work(NamedTuple):
    """A call with the bytes that it must move and the FLOP that it must compute."""

    call: Callable[[], Any]
    error: Callable[[Any], float]
    """Of its result."""
    allowed: float
    """The error that rounding explains."""
    moved: int
    flop: int
    rivals: Mapping[str, Callable[[], Rival | None]] = {}
    """None where one cannot compute it."""
    timed: Callable[[], Callable[[], object]] | None = None
    """Gives what is timed in place of `call`, once its result is known to be right."""


class Bench:
    """Measures work beside the limits of the device: a copy within it, and a matrix product.

    The limit of a case is the time of its bytes or of its FLOP, whichever is longer.
    """

    def __init__(self, asked: Namespace, dtype: torch.dtype) -> None:
        self.device, self._rounds = asked.device, asked.rounds
        side = SHORT_SIDE if asked.quick else SIDE
        kind: Any = {"dtype": dtype, "device": self.device}
        self.copy = Copy(self.device, asked.quick)
        one, other = torch.randn(2, side, side, **kind).unbind()
        out = torch.empty(side, side, **kind)
        self._calls: dict[str, Callable[[], object]] = {
            "copy": self.copy,
            "product": lambda: torch.matmul(one, other, out=out),
        }
        self._flop = 2 * side**3

    def line(self, work: Work) -> Line:
        """The line of a case, without a time if its result is wrong."""
        found: Line = {"bytes": work.moved, "flop": work.flop}
        found |= {"error": work.error(work.call()), "error_allowed": work.allowed}
        if not found["error"] <= work.allowed:
            return found
        rivals, failures = self._rivals(work)
        ours = work.call if work.timed is None else work.timed()
        calls = {**self._calls, **{name: one.call for name, one in rivals.items()}}
        seconds = medians({TIMED: ours, **calls}, self.device, self._rounds)
        own, bytes_s = seconds[TIMED], self.copy.moved / seconds["copy"]
        flop_s = self._flop / seconds["product"]
        moving, computing = work.moved / bytes_s, work.flop / flop_s
        peers: Line = {
            name: {TIMED: seconds[name], "to_ours": seconds[name] / own} for name in rivals
        }
        return {
            **found,
            TIMED: own,
            "copy_gb_s": bytes_s / 1e9,
            "product_tflop_s": flop_s / 1e12,
            "bound": "bytes" if moving > computing else "flop",
            "of_limit": max(moving, computing) / own,
            "gb_s": work.moved / own / 1e9,
            "of_copy": work.moved / own / bytes_s,
            "tflop_s": work.flop / own / 1e12,
            "peers": {**peers, **{name: {"failed": why} for name, why in failures.items()}},
        }

    def _rivals(self, work: Work) -> tuple[dict[str, Rival], dict[str, str]]:
        """The rivals that are right, and the reasons why others are not timed."""
        able: dict[str, Rival] = {}
        failures: dict[str, str] = {}
        for name, make in work.rivals.items():
            try:
                if (rival := make()) is None:
                    continue
                error = rival.error(rival.call())
            except Exception as problem:  # any error: ours is timed
                failures[name] = failure(problem)
                continue
            if error <= work.allowed:
                able[name] = rival
            else:
                failures[name] = f"off by {error:.2g} of the norm"
        return able, failures


def limits_table(heading: str, timed: Sequence[Line]) -> str:
    """The timed lines of `Bench` as Markdown, with the rivals that were timed in any."""

    def ratio(line: Line, name: str) -> str:
        peer = line["peers"].get(name, {})
        return f"{peer['to_ours']:.2f}" if "to_ours" in peer else "–"

    shown = dict.fromkeys(name for one in timed for name in one["peers"] if ratio(one, name) != "–")
    cells: dict[str, Callable[[Line], str]] = {
        "case": lambda one: one["case"],
        "µs": lambda one: f"{one[TIMED] * 1e6:,.1f}",
        "GB/s": lambda one: f"{one['gb_s']:,.0f}",
        "TFLOP/s": lambda one: f"{one['tflop_s']:,.3g}",
        "bound by": lambda one: one["bound"],
        "of the limit": lambda one: f"{one['of_limit']:.0%}",
        **{f"{name} / ours": partial(ratio, name=name) for name in shown},
    }
    if not timed:
        return heading
    copy, product = (median(one[key] for one in timed) for key in ("copy_gb_s", "product_tflop_s"))
    what = f"a copy {copy:,.0f} GB/s, a product {product:,.3g} TFLOP/s"
    return f"{heading}: {what}\n\n{columns(timed, cells)}"

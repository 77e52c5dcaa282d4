"""Paged attention on a GPU against what the GPU can do, and against others that attend.

    python -m experiments.benchmarks.kernels
    python -m experiments.benchmarks.kernels --device cpu --quick    (the same way, without a GPU)

The limit of a case is what its bytes take at the speed of a device copy, or its FLOP at that of a
matrix product, whichever is longer; copy and product are timed in the same rounds as the kernels.
Before anything is timed its output is held against plain torch in fp64; what is wrong has no time,
and neither has what ends in an error: it is said, and the others are measured.
Results go to experiments/results/<GPU>/kernels.json, with a roofline beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from experiments.benchmarks.device import (
    Copy,
    device_of,
    facts,
    lost,
    medians,
    options,
    table,
)
from experiments.benchmarks.peers import PEERS, Contender
from experiments.benchmarks.results import before, end, folder, keep
from experiments.benchmarks.shapes import Case, Problem, grid, headlines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE, SHORT_SIDE = 8192, 256
"""Of the product that is a limit, and where sizes are tiny."""
FREE = 0.9
"""Of the memory that is free, how much a case may take."""


def main(words: Sequence[str] | None = None) -> None:
    """Measure the grid; print a table, and keep the results."""
    words = sys.argv[1:] if words is None else words
    parser = options(__doc__)
    parser.add_argument(
        "--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="none: just ours"
    )
    parser.add_argument("--name", default="kernels", help="of the files that are written")
    parser.add_argument("--headlines", action="store_true", help="what bars are about, alone")
    asked = parser.parse_args(words)
    device = device_of(asked)
    place = folder(device, asked)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    limits = Limits(device, dtype, asked.quick)
    result: dict[str, Any] = {
        **facts(device, "experiments.benchmarks.kernels", words),
        "dtype": str(dtype).removeprefix("torch."),
        "rounds": asked.rounds,
        "quick": asked.quick,
        "left_out": [],
    }
    known = before(place, asked.name, result, "cases") if asked.resume else []
    result["cases"] = [one for one in known if "of_limit" in one]
    there = {one["case"] for one in result["cases"]}
    failed = {one["case"] for one in known if "failed" in one}
    wanted = headlines(asked.quick) if asked.headlines else grid(asked.quick)
    for case in sorted(wanted, key=lambda case: str(case) in failed):  # it may fail for good
        if str(case) in there:
            continue
        if not _fits(case, dtype, device):
            result["left_out"].append(str(case))
            continue
        found = measure(case, dtype, asked.peers, limits, asked.rounds)
        result["cases"].append(found)
        keep(place, asked.name, result)
        print(line(found), file=sys.stderr, flush=True)
        if "failed" in found and lost(device):
            sys.exit("the GPU can be used no more in this process; --resume goes on")
    print(written(result, asked.peers))
    end(place, asked.name, result, draw)
    wrong = [one["case"] for one in result["cases"] if "of_limit" not in one]
    if wrong:
        sys.exit(f"not timed: {'; '.join(wrong)}")


def draw(result: Mapping[str, Any]) -> Figure:
    """A roofline; what draws is imported here alone."""
    from experiments.benchmarks import roofline

    return roofline.draw(result)


class Limits:
    """What the device does at best: a copy within it, and a matrix product."""

    def __init__(self, device: torch.device, dtype: torch.dtype, tiny: bool) -> None:
        self.device = device
        side = SHORT_SIDE if tiny else SIDE
        kind: Any = {"dtype": dtype, "device": device}
        self._copy = Copy(device, tiny)
        self._one, self._other = torch.randn(2, side, side, **kind).unbind()
        self._product = torch.empty(side, side, **kind)
        self._flop = 2 * side**3

    def calls(self) -> dict[str, Callable[[], object]]:
        """To be timed beside the kernels."""
        return {
            "copy": self._copy,
            "product": lambda: torch.matmul(self._one, self._other, out=self._product),
        }

    def of(self, case: Case, dtype: torch.dtype, seconds: Mapping[str, float]) -> dict[str, Any]:
        """What the case takes at least, from what these calls took."""
        bytes_s = self._copy.moved / seconds["copy"]
        flop_s = self._flop / seconds["product"]
        moving, computing = case.moved(dtype) / bytes_s, case.flop / flop_s
        return {
            "copy_gb_s": bytes_s / 1e9,
            "product_tflop_s": flop_s / 1e12,
            "bound": "bytes" if moving > computing else "flop",
            "seconds": max(moving, computing),
        }


def measure(
    case: Case, dtype: torch.dtype, peers: Iterable[str], limits: Limits, rounds: int
) -> dict[str, Any]:
    """One case, or why it could not be measured."""
    try:
        return _measured(case, dtype, peers, limits, rounds)
    except Exception as problem:  # whatever it is, the other cases are measured all the same
        reason = (str(problem).strip().splitlines() or [""])[0]
        return {"case": str(case), "failed": f"{type(problem).__name__}: {reason}"[:200]}


def _measured(
    case: Case, dtype: torch.dtype, peers: Iterable[str], limits: Limits, rounds: int
) -> dict[str, Any]:
    """Is it right, how long does it take, and how long do the others?"""
    problem = Problem(case, dtype, limits.device)
    found: dict[str, Any] = {
        "case": str(case),
        "kind": case.kind,
        "model": case.model,
        "batch": case.batch,
        "queries": case.queries,
        "context": case.context,
        "block_size": case.block_size,
        "cache": case.cache,
        "beside": case.beside,
        "flop": case.flop,
        "bytes": case.moved(dtype),
        "error": problem.error(problem.ours()),
        "error_allowed": problem.allowed,
        "peers": {},
    }
    if found["error"] > problem.allowed:
        return found
    others, failures = contenders(problem, peers)
    calls = {name: other.call for name, other in others.items()}
    seconds = medians({"ours": problem.ours, **limits.calls(), **calls}, limits.device, rounds)
    limit = limits.of(case, dtype, seconds)
    found["peers"] = {
        **{name: {"seconds": seconds[name], "to_ours": seconds[name] / seconds["ours"]}
           for name in others},
        **{name: {"failed": why} for name, why in failures.items()},
    }  # fmt: skip
    return {
        **found,
        "limit": limit,
        "seconds": seconds["ours"],
        "of_limit": limit["seconds"] / seconds["ours"],
        "gb_s": case.moved(dtype) / seconds["ours"] / 1e9,
        "tflop_s": case.flop / seconds["ours"] / 1e12,
    }


def contenders(
    problem: Problem, names: Iterable[str]
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The peers that can do it and do it right, and why others do not."""
    able: dict[str, Contender] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            contender = PEERS[name](problem)
            if contender is None:
                continue
            error = problem.error(contender.rows(contender.call()))
        except Exception as problem_of_theirs:  # whatever it is, ours are timed all the same
            failures[name] = str(problem_of_theirs).strip().partition("\n")[0][:200]
            continue
        if error > problem.allowed:
            failures[name] = f"off by {error:.2g} of the norm"
        else:
            able[name] = contender
    return able, failures


def line(found: Mapping[str, Any]) -> str:
    """What is said of a case while others go on."""
    if "failed" in found:
        return f"{found['case']}: {found['failed']}, not timed"
    if "of_limit" not in found:
        return f"{found['case']}: off by {found['error']:.2g} of the norm, not timed"
    others = "".join(
        f", {name} {one['to_ours']:.2f} ×" if "to_ours" in one else f", {name}: {one['failed']}"
        for name, one in found["peers"].items()
    )
    return f"{found['case']}: {found['of_limit']:.0%} of the limit{others}"


def written(result: Mapping[str, Any], peers: Sequence[str]) -> str:
    """The results as Markdown."""
    timed = [one for one in result["cases"] if "of_limit" in one]
    shown = [
        name for name in peers if any("to_ours" in one["peers"].get(name, {}) for one in timed)
    ]
    head = ["case", "µs", "GB/s", "TFLOP/s", "bound by", "of the limit"]
    rows = [
        [
            one["case"],
            f"{one['seconds'] * 1e6:,.0f}",
            f"{one['gb_s']:,.0f}",
            f"{one['tflop_s']:,.3g}",
            one["limit"]["bound"],
            f"{one['of_limit']:.0%}",
            *(_ratio(one["peers"].get(name, {})) for name in shown),
        ]
        for one in timed
    ]
    text = [f"{result['device']}, {result['dtype']}, torch {result['torch']}, {result['date']}"]
    if timed:
        copy = median(one["limit"]["copy_gb_s"] for one in timed)
        product = median(one["limit"]["product_tflop_s"] for one in timed)
        text[0] += f": a copy {copy:,.0f} GB/s, a product {product:,.3g} TFLOP/s"
        text += ["", table([*head, *(f"{name} / ours" for name in shown)], rows)]
    if result["left_out"]:
        text += ["", f"left out, for want of memory: {'; '.join(result['left_out'])}"]
    return "\n".join(text)


def _ratio(peer: Mapping[str, Any]) -> str:
    return f"{peer['to_ours']:.2f}" if "to_ours" in peer else "–"


def _fits(case: Case, dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    torch.cuda.empty_cache()
    return case.room(dtype) < FREE * torch.cuda.mem_get_info(device)[0]


if __name__ == "__main__":
    main()

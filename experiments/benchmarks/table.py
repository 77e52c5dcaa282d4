"""Results on GPUs beside bars and goals.

    python -m experiments.benchmarks.table

A Markdown table of experiments/results/*/*.json, for performance.md there: a row for each bar, a
column for each GPU. Cells of what was not measured are empty.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.benchmarks.device import RESULTS
from experiments.benchmarks.engine import PEER
from experiments.benchmarks.harness import main_of, parse
from experiments.benchmarks.harness import table as markdown
from experiments.benchmarks.servers import AHEAD as OURS_AHEAD
from experiments.benchmarks.shapes import BASE, BESIDE, DECODE, LONE, PREFILL, WIDE, Case

Kept = Mapping[str, Mapping[str, Any]]
"""Results of one GPU, by the name of the file."""

GPUS = ("H200", "H100")
"""GPUs with a column even without results."""
FAILED = "failed"
"""The cell of a measurement that was wrong or failed."""


class Row(NamedTuple):
    """A line of the table."""

    what: str
    bar: str
    goal: str
    cell: Callable[[Kept], str]
    """Empty where it was not measured."""


def table(words: Sequence[str]) -> None:
    """Print the table."""
    parse(__doc__, words, {})
    print(written(measured(RESULTS)))


def measured(results: Path) -> dict[str, Kept]:
    """All results of GPUs, by their names."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for path in sorted(results.glob("*/*.json")):
        if path.stem in FILES:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("capability") is not None:  # not a CPU
                name = content["device"].removeprefix("NVIDIA ")
                found.setdefault(name, {})[path.stem] = content
    return {name: found[name] for name in sorted(found, key=_place)}


def _place(name: str) -> tuple[int, str]:
    known = [at for at, gpu in enumerate(GPUS) if name.startswith(gpu)]
    return (known[0] if known else len(GPUS)), name


def written(kept: Mapping[str, Kept]) -> str:
    """The table."""
    unmeasured = [gpu for gpu in GPUS if not any(name.startswith(gpu) for name in kept)]
    columns = {**kept, **{gpu: {} for gpu in unmeasured}}
    names = sorted(columns, key=_place)
    rows = [
        [row.what, row.bar, row.goal, *(row.cell(columns[name]) for name in names)] for row in ROWS
    ]
    return markdown(["", "bar", "goal", *names], rows)


# -- cells -----------------------------------------------------------------------------------------

Line = Mapping[str, Any]
Cell = Callable[[Kept], str]
TIMED = ("seconds", "out", "rates")
"""Keys of what was right, and so was timed."""


def _cell(text: Callable[[Line], str], file: str, lines: str = "", **wanted: Any) -> Cell:
    """The text of a file, or of its line with these values; empty where there is none."""

    def cell(kept: Kept) -> str:
        if file not in kept:
            return ""
        every = kept[file][lines] if lines else [kept[file]]
        for one in every:
            if all(one[key] == value for key, value in wanted.items()):
                return text(one) if any(key in one for key in TIMED) else FAILED
        return ""

    return cell


def _attention(text: Callable[[Line], str], case: Case, cache: str = "auto") -> Cell:
    return _cell(text, "kernels", "cases", case=str(replace(case, cache=cache)))


_of_copy = partial(_attention, lambda one: f"{one['gb_s'] / one['limit']['copy_gb_s']:.0%}")
_product = partial(_attention, lambda one: f"{one['tflop_s']:.0f}")


def _lost(kept: Kept) -> str:
    """The time of small blocks over that of large ones."""
    small, large = (
        _attention(lambda one: str(one["seconds"]), case)(kept) for case in (DECODE, WIDE)
    )
    if "" in (small, large) or FAILED in (small, large):
        return "" if "" in (small, large) else FAILED
    return f"{float(small) / float(large) - 1:+.1%}"


def _peers(case: Case) -> Cell:
    """The time of the fastest peer over ours."""

    def text(line: Line) -> str:
        timed = [(one["to_ours"], name) for name, one in line["peers"].items() if "to_ours" in one]
        return "{:.2f} × ({})".format(*min(timed)) if timed else "none ran"

    return _cell(text, "peers", "cases", case=str(case))


def _swap(file: str) -> Cell:
    def text(one: Line) -> str:
        return ", ".join(f"{one[way]['of_pinned']:.0%}" for way in ("out", "in"))

    return _cell(text, file, "swaps", model=BASE, block_size=16, layout="block")


def _step(cache: str, ahead: bool, sampled: bool = False) -> Cell:
    line = {"cache": cache, "model_impl": "native", "graphs": True, "ahead": ahead}
    text = "{to_limit:.2f} ×".format_map
    return _cell(text, "step", "arms", **line, sampled=sampled)


def _engine(name: str) -> Cell:
    return _cell(lambda one: f"{one['rates'][name] / one['rates'][PEER]:.1f} ×", "engine")


def _server(kept: Kept, name: str) -> str:
    if "servers" not in kept or name in kept["servers"]["absent"]:
        return kept["servers"]["absent"][name] if "servers" in kept else ""
    rates = kept["servers"]["rates"]
    return f"{rates[OURS_AHEAD] / rates[name]:.2f} ×" if name in rates else FAILED


def _host(ahead: bool) -> Cell:
    line = {"requests": 64, "async_scheduling": ahead}
    return _cell(lambda one: f"{one['seconds'] * 1e6:.0f} µs", "host", "steps", **line)


FILES = (
    *("kernels", "swap", "swap-fp8_e4m3", "step", "profile", "engine", "servers", "host", "peers"),
)
AHEAD = "the same, `async_scheduling`"
EIGHT = "the same, 8-bit cache"
DRAWN = "the same, drawn"
ROWS = (
    Row("decode attention, 64 × 4,096, blocks of 16: of a copy's bandwidth", "≥ 75 %", "90 %",
        _of_copy(DECODE)),
    Row(EIGHT, "", "", _of_copy(DECODE, "fp8_e4m3")),
    Row("the same, blocks of 16 instead of 128: time", "≤ +10 %", "", _lost),
    Row("one context of 131,072: of a copy's bandwidth", "", "", _of_copy(LONE)),
    Row(EIGHT, "", "", _of_copy(LONE, "fp8_e4m3")),
    Row("63 contexts of 1,024 and one of 131,072: of a copy's bandwidth", "", "",
        _of_copy(BESIDE)),
    Row(EIGHT, "", "", _of_copy(BESIDE, "fp8_e4m3")),
    Row("prefill attention, 8,192: TFLOP/s", "≥ 300", "", _product(PREFILL)),
    Row(EIGHT, "", "", _product(PREFILL, "fp8_e4m3")),
    Row("decode attention, 64 × 4,096: the fastest peer's time over ours", "", "",
        _peers(DECODE)),
    Row("prefill attention, 8,192: the fastest peer's time over ours", "", "", _peers(PREFILL)),
    Row("swap out, in, blocks of 16: of one pinned copy", "≥ 80 %", "", _swap("swap")),
    Row(EIGHT, "", "", _swap("swap-fp8_e4m3")),
    Row("decode step, 64 × 1,024: times weights and cache at a copy's bandwidth", "≤ 1.3 ×",
        "1.1 ×", _step("auto", False)),
    Row(AHEAD, "≤ 1.3 ×", "1.1 ×", _step("auto", True)),
    Row(EIGHT, "", "", _step("fp8_e4m3", False)),
    Row(f"{EIGHT}, `async_scheduling`", "", "", _step("fp8_e4m3", True)),
    Row("the same, drawn with temperature 0.8 and top-p 0.95 of 128,256 tokens", "", "",
        _step("auto", False, True)),
    Row(f"{DRAWN}, `async_scheduling`", "", "", _step("auto", True, True)),
    Row("launches a layer of that step, greedy", "", "",
        _cell(lambda one: str(one["launches_a_layer"]), "profile")),
    Row("the share of it in which kernels run", "", "",
        _cell(lambda one: f"{one['busy']:.0%}", "profile")),
    Row("tokens a second: times transformers' `generate_batch`, a weak peer", "≥ 2 ×", "4 ×",
        _engine("pagedsim")),
    Row(AHEAD, "≥ 2 ×", "4 ×", _engine("pagedsim, async_scheduling")),
    Row("the same, `async_scheduling`: times vLLM's", "", "", partial(_server, name="vllm")),
    Row("the same, `async_scheduling`: times SGLang's", "", "", partial(_server, name="sglang")),
    Row("host's part of a decode step, 64 requests", "≤ 200 µs", "", _host(False)),
    Row(AHEAD, "≤ 200 µs", "", _host(True)),
)  # fmt: skip
"""All of Llama-3.1-8B's shape: 8 KV heads of 128."""


main = main_of(table)

if __name__ == "__main__":
    main()

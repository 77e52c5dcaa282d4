"""Results on GPUs beside bars and goals.

    python -m pagedsim.experiments.benchmarks.table

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

from pagedsim.experiments.benchmarks.device import RESULTS
from pagedsim.experiments.benchmarks.engine import PEER
from pagedsim.experiments.benchmarks.harness import main_of, parse
from pagedsim.experiments.benchmarks.harness import table as markdown
from pagedsim.experiments.benchmarks.kernels import of_pinned
from pagedsim.experiments.benchmarks.servers import AHEAD as OURS_AHEAD
from pagedsim.experiments.benchmarks.shapes import BASE, BESIDE, DECODE, LONE, PREFILL, WIDE, Case
from pagedsim.experiments.benchmarks.timing import TIMED, Line
from pagedsim.kernels.float8 import AUTO

Kept = Mapping[str, Line]
"""Results of one GPU, by the name of the file."""

GPUS = ("H200", "H100")
"""GPUs with a column even without results."""
FILES = (
    *("kernels", "swap", "swap-fp8_e4m3", "step", "profile", "engine", "servers", "host", "peers"),
)
FAILED = "failed"
"""The cell of a measurement that was wrong or failed."""


def table(words: Sequence[str]) -> None:
    """Print the table."""
    parse(__doc__, words, {})
    print(written(measured(RESULTS)))


def measured(results: Path) -> dict[str, Kept]:
    """All results of GPUs, by their names."""
    found: dict[str, dict[str, Line]] = {}
    for path in sorted(results.glob("*/*.json")):
        if path.stem in FILES:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("capability") is not None:  # not a CPU
                name = content["device"].removeprefix("NVIDIA ")
                found.setdefault(name, {})[path.stem] = content
    return {**found}


def written(kept: Mapping[str, Kept]) -> str:
    """The table."""
    unmeasured = [gpu for gpu in GPUS if not any(name.startswith(gpu) for name in kept)]

    def place(name: str) -> tuple[int, str]:
        known = [at for at, gpu in enumerate(GPUS) if name.startswith(gpu)]
        return (known[0] if known else len(GPUS)), name

    names = sorted([*kept, *unmeasured], key=place)
    rows = [[*row[:3], *(row.cell(kept.get(name, {})) for name in names)] for row in ROWS]
    return markdown(["", "bar", "goal", *names], rows)


# -- cells -----------------------------------------------------------------------------------------

Text = str | Callable[[Line], str]
"""A format of the keys of a line, or a function of it."""


def cell(kept: Kept, file: str, text: Text, wanted: Mapping[str, Any]) -> str:
    """The text of a file or, with wanted values, of its line with these; empty where there is
    none."""
    if file not in kept:
        return ""
    lines = kept[file]["cases"] if wanted else [kept[file]]
    for one in lines:
        if all(one[key] == value for key, value in wanted.items()):
            if not {TIMED, "rates"} & one.keys():
                return FAILED
            return text.format_map(one) if isinstance(text, str) else text(one)
    return ""


def lost(kept: Kept) -> str:
    """The time of small blocks over that of large ones."""
    times = [cell(kept, "kernels", f"{{{TIMED}}}", {"case": str(case)}) for case in (DECODE, WIDE)]
    if "" in times or FAILED in times:
        return "" if "" in times else FAILED
    small, large = map(float, times)
    return f"{small / large - 1:+.1%}"


def fastest(line: Line) -> str:
    """The time of the fastest peer over ours."""
    timed = [(one["to_ours"], name) for name, one in line["peers"].items() if "to_ours" in one]
    return "{:.2f} × ({})".format(*min(timed)) if timed else "none ran"


def over_peer(line: Line, name: str) -> str:
    """The rate over that of transformers."""
    return f"{line['rates'][name] / line['rates'][PEER]:.1f} ×"


def over_server(line: Line, name: str) -> str:
    """The rate over that of a serving engine, or why there is none."""
    rates = line["rates"]
    if name in line["absent"]:
        return str(line["absent"][name])
    return f"{rates[OURS_AHEAD] / rates[name]:.2f} ×" if name in rates else FAILED


def micros(line: Line) -> str:
    """The time of the host."""
    return f"{line[TIMED] * 1e6:.0f} µs"


# -- rows ------------------------------------------------------------------------------------------

TEXTS: Mapping[str, Text] = {
    "kernels": "{of_copy:.0%}",
    "peers": fastest,
    "swap": of_pinned,
    "swap-fp8_e4m3": of_pinned,
    "step": "{to_limit:.2f} ×",
    "host": micros,
}
"""What the rows of a file show, where they do not say."""
AHEAD = "the same, `async_scheduling`"
EIGHT = "the same, 8-bit cache"
DRAWN = "the same, drawn with temperature 0.8 and top-p 0.95 of 128,256 tokens"
DECODING, PREFILLING = "decode attention, 64 × 4,096", "prefill attention, 8,192"
FASTEST = "the fastest peer's time over ours"


class Row(NamedTuple):
    """A line of the table."""

    what: str
    bar: str
    goal: str
    cell: Callable[[Kept], str]


def row(what: str, file: str, bar: str = "", goal: str = "", text: Text = "", **wanted: Any) -> Row:
    """The row of a file or, with wanted values, of one of its lines."""
    show = partial(cell, file=file, text=text or TEXTS[file], wanted=wanted)
    return Row(what, bar, goal, show)


def attention(what: str, case: Case, bar: str = "", goal: str = "", text: Text = "") -> list[Row]:
    """The rows of a case and of the same with an 8-bit cache."""
    eight = replace(case, cache="fp8_e4m3")
    first = row(what, "kernels", bar, goal, text, case=str(case))
    return [first, row(EIGHT, "kernels", text=text, case=str(eight))]


def step(
    what: str, then: str, bar: str = "", goal: str = "", cache: str = AUTO, sampled: bool = False
) -> list[Row]:
    """The rows of a step without and with `async_scheduling`."""
    both = ((what, False), (then, True))
    same: dict[str, Any] = {"cache": cache, "model_impl": "native", "graphs": True}
    return [
        row(name, "step", bar, goal, **same, sampled=sampled, ahead=ahead) for name, ahead in both
    ]


def rate(what: str, name: str) -> Row:
    """The row of a rate of the engine."""
    return row(what, "engine", "≥ 2 ×", "4 ×", partial(over_peer, name=name))


SWAP: dict[str, Any] = {"model": BASE, "block_size": 16, "layout": "block"}
STEP = "decode step, 64 × 1,024: times weights and cache at a copy's bandwidth"
RATE = "tokens a second: times transformers' `generate_batch`, a weak peer"
HOST = "host's part of a decode step, 64 requests"
ROWS = (
    *attention(f"{DECODING}, blocks of 16: of a copy's bandwidth", DECODE, "≥ 75 %", "90 %"),
    Row("the same, blocks of 16 instead of 128: time", "≤ +10 %", "", lost),
    *attention("one context of 131,072: of a copy's bandwidth", LONE),
    *attention("63 contexts of 1,024 and one of 131,072: of a copy's bandwidth", BESIDE),
    *attention(f"{PREFILLING}: TFLOP/s", PREFILL, "≥ 300", text="{tflop_s:.0f}"),
    row(f"{DECODING}: {FASTEST}", "peers", case=str(DECODE)),
    row(f"{PREFILLING}: {FASTEST}", "peers", case=str(PREFILL)),
    row("swap out, in, blocks of 16: of one pinned copy", "swap", "≥ 80 %", **SWAP),
    row(EIGHT, "swap-fp8_e4m3", **SWAP),
    *step(STEP, AHEAD, "≤ 1.3 ×", "1.1 ×"),
    *step(EIGHT, f"{EIGHT}, `async_scheduling`", cache="fp8_e4m3"),
    *step(DRAWN, "the same, drawn, `async_scheduling`", sampled=True),
    row("launches a layer of that step, greedy", "profile", text="{launches_a_layer}"),
    row("the share of it in which kernels run", "profile", text="{busy:.0%}"),
    rate(RATE, "pagedsim"),
    rate(AHEAD, "pagedsim, async_scheduling"),
    row(f"{AHEAD}: times vLLM's", "servers", text=partial(over_server, name="vllm")),
    row(f"{AHEAD}: times SGLang's", "servers", text=partial(over_server, name="sglang")),
    row(HOST, "host", "≤ 200 µs", requests=64, async_scheduling=False),
    row(AHEAD, "host", "≤ 200 µs", requests=64, async_scheduling=True),
)
"""All of Llama-3.1-8B's shape: 8 KV heads of 128."""


main = main_of(__name__, table)

"""Results on GPUs beside bars and goals.

    python -m pagedsim.experiments.benchmarks.table

A Markdown table of experiments/results/*/*.json, for performance.md there: a row for each bar, a
column for each GPU. Cells of what was not measured are empty.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pagedsim.experiments.benchmarks.device import RESULTS, TIMED, Line
from pagedsim.experiments.benchmarks.engine import OURS, PEER
from pagedsim.experiments.benchmarks.harness import main_of, parse
from pagedsim.experiments.benchmarks.harness import table as markdown
from pagedsim.experiments.benchmarks.host import Batch
from pagedsim.experiments.benchmarks.kernels import Swap, of_pinned
from pagedsim.experiments.benchmarks.shapes import BASE, BESIDE, DECODE, LONE, PREFILL, WIDE, Case
from pagedsim.experiments.benchmarks.step import Arm
from pagedsim.kernels.float8 import AUTO


def table(words: Sequence[str]) -> None:
    """Print the table."""
    parse(__doc__, words, {})
    print(written(RESULTS))


def written(results: Path) -> str:
    """The table of a folder of results."""
    files: dict[str, dict[str, Line]] = {}
    for path in sorted(results.glob("*/*.json")):
        if path.stem in ROWS:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("capability") is not None:  # not a CPU
                name = content["device"].removeprefix("NVIDIA ")
                files.setdefault(name, {})[path.stem] = content
    names = sorted(files)
    rows = [
        [*words, *(cell(files.get(name, {}).get(file), text, cases) for name in names)]
        for file, lines in ROWS.items()
        for *words, text, cases in lines
    ]
    return markdown(["", "bar", "goal", *names], rows)


def cell(content: Line | None, text: Text, cases: Sequence[object]) -> str:
    """The text of some cases of a file, or of the whole file; empty where nothing was measured,
    "failed" where it was not timed."""
    if content is None:
        return ""
    lines = {line["case"]: line for line in content.get("cases", ())}
    if not lines.keys() >= {str(case) for case in cases}:
        return ""
    chosen = [lines[str(case)] for case in cases] or [content]
    if not all(TIMED in line for line in chosen):
        return "failed"
    return text.format_map(chosen[0]) if isinstance(text, str) else text(*chosen)


# -- rows ------------------------------------------------------------------------------------------


Text = str | Callable[..., str]
"""A format of the keys of a line, or a function of all lines of a row."""


def lost(small: Line, large: Line) -> str:
    """The time of small blocks over that of large ones."""
    return f"{small[TIMED] / large[TIMED] - 1:+.1%}"


def micros(line: Line) -> str:
    """The time of the host."""
    return f"{line[TIMED] * 1e6:.0f} µs"


def over_peer(ours: Line, peer: Line) -> str:
    """The rate over that of transformers."""
    return f"{ours['rate'] / peer['rate']:.1f} ×"


def eight(case: Case) -> Case:
    """The case with an 8-bit cache."""
    return case._replace(cache=FP8)


COPY, SAME, AHEAD = "of a copy's bandwidth", "the same", "the same, `async_scheduling`"
EIGHT, FP8 = "the same, 8-bit cache", "fp8_e4m3"
DRAWN = "drawn with temperature 0.8 and top-p 0.95 of 128,256 tokens"
OF_COPY, TFLOP_S, LIMIT = "{of_copy:.0%}", "{tflop_s:.0f}", "{to_limit:.2f} ×"
DECODING = f"decode attention, 64 × 4,096, blocks of 16: {COPY}"
STEP = "decode step, 64 × 1,024: times weights and cache at a copy's bandwidth"
RATE = "tokens a second: times transformers' `generate_batch`, a weak peer"
SWAPS = "swap out, in, blocks of 16: of one pinned copy"
HOST = "host's part of a decode step, 64 requests"
ROWS: Mapping[str, Sequence[tuple[str, str, str, Text, Sequence[object]]]] = {
    "kernels": [
        (DECODING, "≥ 75 %", "90 %", OF_COPY, [DECODE]),
        (EIGHT, "", "", OF_COPY, [eight(DECODE)]),
        (f"{SAME}, blocks of 16 instead of 128: time", "≤ +10 %", "", lost, [DECODE, WIDE]),
        (f"one context of 131,072: {COPY}", "", "", OF_COPY, [LONE]),
        (EIGHT, "", "", OF_COPY, [eight(LONE)]),
        (f"63 contexts of 1,024 and one of 131,072: {COPY}", "", "", OF_COPY, [BESIDE]),
        (EIGHT, "", "", OF_COPY, [eight(BESIDE)]),
        ("prefill attention, 8,192: TFLOP/s", "≥ 300", "", TFLOP_S, [PREFILL]),
        (EIGHT, "", "", TFLOP_S, [eight(PREFILL)]),
    ],
    "swap": [(SWAPS, "≥ 80 %", "", of_pinned, [Swap(BASE, 16, "block")])],
    "step": [
        (STEP, "≤ 1.3 ×", "1.1 ×", LIMIT, [Arm(AUTO, True)]),
        (AHEAD, "≤ 1.3 ×", "1.1 ×", LIMIT, [Arm(AUTO, True, ahead=True)]),
        (EIGHT, "", "", LIMIT, [Arm(FP8, True)]),
        (f"{EIGHT}, `async_scheduling`", "", "", LIMIT, [Arm(FP8, True, ahead=True)]),
        (f"{SAME}, {DRAWN}", "", "", LIMIT, [Arm(AUTO, True, sampled=True)]),
        (f"{SAME}, drawn, `async_scheduling`", "", "", LIMIT, [Arm(AUTO, True, True, True)]),
    ],
    "profile": [
        ("launches a layer of that step, greedy", "", "", "{launches_a_layer}", []),
        ("the share of it in which kernels run", "", "", "{busy:.0%}", []),
    ],
    "engine": [
        (RATE, "≥ 2 ×", "4 ×", over_peer, [OURS, PEER]),
        (AHEAD, "≥ 2 ×", "4 ×", over_peer, [f"{OURS}, async_scheduling", PEER]),
    ],
    "host": [
        (HOST, "≤ 200 µs", "", micros, [Batch(64, False)]),
        (AHEAD, "≤ 200 µs", "", micros, [Batch(64, True)]),
    ],
}
"""What is shown, bar, goal, text and cases, by file. All is of Llama-3.1-8B's shape: 8 KV heads of
128."""


main = main_of(__name__, table)

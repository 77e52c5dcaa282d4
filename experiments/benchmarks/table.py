"""Results on GPUs beside bars, goals and vLLM's kernels.

    python -m pagedsim.experiments.benchmarks.table
    python -m pagedsim.experiments.benchmarks.table peers

A Markdown table of the files in experiments/results/<GPU>, for performance.md there: a row for each
bar, a column for each GPU. Cells of what was not measured are empty.

`peers` writes peers.json: what vLLM's kernels take for the same cases in the tables of
aiconfigurator-core, which it needs. It takes no time between those that were measured. Their column
has these bytes and FLOP in that time, beside our copy on such a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pagedsim.experiments.benchmarks.device import RESULTS, TIMED, Line
from pagedsim.experiments.benchmarks.engine import OURS, PEER
from pagedsim.experiments.benchmarks.harness import keep, main_of, parse
from pagedsim.experiments.benchmarks.harness import table as markdown
from pagedsim.experiments.benchmarks.host import Batch
from pagedsim.experiments.benchmarks.kernels import Swap, of_pinned
from pagedsim.experiments.benchmarks.launch import Kind
from pagedsim.experiments.benchmarks.shapes import (
    BASE,
    BESIDE,
    DECODE,
    HEADLINES,
    LONE,
    PREFILL,
    SHORT,
    SHORTER,
    WIDE,
    Case,
    eight,
)
from pagedsim.experiments.benchmarks.step import Arm
from pagedsim.kernels.float8 import AUTO


def table(words: Sequence[str]) -> None:
    """Print the table."""
    parse(__doc__, words, {})
    print(written(RESULTS))


def written(results: Path) -> str:
    """The table of a folder of results."""
    every = [(file, text, of) for file, lines in ROWS.items() for *_, text, of in lines]
    columns: dict[str, list[str]] = {}
    for folder in sorted(results.iterdir()):
        paths = {name: folder / f"{name}.json" for name in (*ROWS, "peers")}
        files = {
            name: json.loads(path.read_text(encoding="utf-8"))
            for name, path in paths.items()
            if path.exists()
        }
        for gpu in [file["device"] for file in files.values() if file.get("capability")][:1]:
            name = gpu.removeprefix("NVIDIA ")
            columns[name] = [cell(files.get(file), text, of) for file, text, of in every]
            if "peers" in files and "kernels" in files:
                known = {"kernels": beside(files["peers"], files["kernels"])}
                column = [cell(known.get(file), text, of) for file, text, of in every]
                columns[files["peers"]["peer"]] = column
    words = [line[:3] for lines in ROWS.values() for line in lines]
    cells = zip(words, *columns.values(), strict=True)
    return markdown(["", "bar", "goal", *columns], [[*head, *rest] for head, *rest in cells])


def cell(content: Line | None, text: Text, cases: Sequence[object]) -> str:
    """The text of some cases of a file, or of the whole file; empty where nothing was measured,
    "failed" where it was not timed."""
    if content is None:
        return ""
    lines = {line["case"]: line for line in content.get("cases", ())}
    if not lines.keys() >= {str(case) for case in cases}:
        return ""
    chosen = [lines[str(case)] for case in cases]
    if not all(TIMED in line for line in chosen):
        return "failed"
    chosen = chosen or [content]
    return text.format_map(chosen[0]) if isinstance(text, str) else text(*chosen)


# -- vLLM's kernels --------------------------------------------------------------------------------

SYSTEMS = {"h100-80gb-hbm3": "h100", "h200": "h200"}
"""What conf/hardware calls a GPU, by the folder of its results. The tables have no attention of
vLLM's with heads of 128 but FlashAttention 3 for these."""


def peers(words: Sequence[str]) -> None:
    """Write peers.json for every GPU with results."""
    parse(__doc__, words, {})
    from pagedsim.sim.cost.tables import KernelTables, installed

    for name, gpu in SYSTEMS.items():
        if (RESULTS / name / "kernels.json").exists():
            tables = KernelTables(installed(), gpu, "vllm")
            known = {str(case): of_vllm(case, tables) for case in chain(*HEADLINES.values())}
            kept = {case: seconds for case, seconds in known.items() if seconds is not None}
            source = f"aiconfigurator-core {version('aiconfigurator-core')}, {tables.system}"
            label = tables.taken["attention"].replace("vllm", "vLLM")
            keep(RESULTS / name, "peers", {"peer": f"{label}, FA3 ({source})", "seconds": kept})


def of_vllm(case: Case, tables: Any) -> float | None:
    """The seconds of a case, where the newest table has just that."""
    name = "generation" if case.kernel == "decode" else "context"
    shape, dtype = case.shape, "bfloat16" if case.cache == AUTO else "fp8"
    heads = shape.heads, shape.kv_heads, shape.head_dim
    curve = tables.attention(f"{name}_attention_perf", *heads, dtype).curves.get(case.batch)
    alone = not case.beside and case.block_size == DECODE.block_size
    if not alone or curve is None or case.context not in curve.sizes:
        return None
    return float(curve(case.context))


def beside(peer: Line, ours: Line) -> Line:
    """Lines of a peer, with the shares of the copy that was timed beside our kernels."""
    copy = median(line["copy_gb_s"] for line in ours["cases"] if TIMED in line) * 1e9
    lines = []
    for case in chain(*HEADLINES.values()):
        if seconds := peer["seconds"].get(str(case)):
            of_copy, flop_s = case.moved(torch.bfloat16) / seconds / copy, case.flop / seconds
            line = {"of_copy": of_copy, "tflop_s": flop_s / 1e12}
            lines.append({"case": str(case), TIMED: seconds, **line})
    return {"cases": lines}


# -- rows ------------------------------------------------------------------------------------------


Text = str | Callable[..., str]
"""A format of the keys of a line, or a function of all lines of a row."""


def lost(small: Line, large: Line) -> str:
    """The time of small blocks over that of large ones."""
    return f"{small[TIMED] / large[TIMED] - 1:+.1%}"


def micros(line: Line) -> str:
    """The time of the host."""
    return f"{line[TIMED] * 1e6:.0f} µs"


def millis(line: Line) -> str:
    """The time of a step."""
    return f"{line['step_seconds'] * 1e3:.1f} ms"


def of_eager(graph: Line, eager: Line) -> str:
    """The time of a step in a graph over that kernel by kernel."""
    return f"{graph['step_seconds'] / eager['step_seconds']:.2f} ×"


def served(metric: str) -> Callable[[Line], str]:
    """A latency of the engine under each load."""

    def cell(result: Line) -> str:
        loads = result["data"]["regimes"].values()
        return ", ".join(f"{load['metrics'][metric]['engine'] * 1e3:.3g}" for load in loads) + " ms"

    return cell


def over_peer(ours: Line, peer: Line) -> str:
    """The rate over that of transformers."""
    return f"{ours['rate'] / peer['rate']:.1f} ×"


COPY, SAME, AHEAD = "of a copy's bandwidth", "the same", "the same, `async_scheduling`"
EIGHT, FP8 = "the same, 8-bit cache", "fp8_e4m3"
DRAWN = "drawn with temperature 0.8 and top-p 0.95 of 128,256 tokens"
OF_COPY, TFLOP_S, LIMIT = "{of_copy:.0%}", "{tflop_s:.0f}", "{to_limit:.2f} ×"
STEP = "decode step, 64 × 1,024: times weights and cache at a copy's bandwidth"
RATE = "tokens a second: times transformers' `generate_batch`, a weak peer"
SWAPS = "swap out, in, blocks of 16: of one pinned copy"
HOST = "host's part of a decode step, 64 requests"
ALONE, BOTH = Kind(0, 128, True), Kind(16, 128, True)
LOADS = "at half load, at the knee, in overload"
ROWS: Mapping[str, Sequence[tuple[str, str, str, Text, Sequence[object]]]] = {
    "kernels": [
        (f"decode attention, 64 × 4,096: {COPY}", "≥ 75 %", "90 %", OF_COPY, [DECODE]),
        (EIGHT, "≥ 80 %", "", OF_COPY, [eight(DECODE)]),
        (f"{SAME}, blocks of 16 instead of 128: time", "≤ +10 %", "", lost, [DECODE, WIDE]),
        (f"64 × 1,024: {COPY}", "", "", OF_COPY, [SHORT]),
        (EIGHT, "≥ 80 %", "", OF_COPY, [eight(SHORT)]),
        (f"one context of 131,072: {COPY}", "", "", OF_COPY, [LONE]),
        (EIGHT, "≥ 80 %", "", OF_COPY, [eight(LONE)]),
        (f"63 contexts of 1,024 and one of 131,072: {COPY}", "", "", OF_COPY, [BESIDE]),
        (EIGHT, "", "", OF_COPY, [eight(BESIDE)]),
        ("prefill attention, 8,192: TFLOP/s", "≥ 440", "", TFLOP_S, [PREFILL]),
        (EIGHT, "", "", TFLOP_S, [eight(PREFILL)]),
        ("prefill attention, 2,048: TFLOP/s", "", "", TFLOP_S, [SHORTER]),
        (EIGHT, "", "", TFLOP_S, [eight(SHORTER)]),
    ],
    "launch": [
        ("a step of a prompt of 128 tokens, one graph", "≤ 8 ms", "", millis, [ALONE]),
        ("with 16 decodes", "", "", millis, [BOTH]),
        ("the same, times kernel by kernel", "", "", of_eager, [BOTH, BOTH._replace(graph=False)]),
    ],
    "swap": [(SWAPS, "≥ 80 %", "", of_pinned, [Swap(BASE, 16, "block")])],
    "step": [
        (STEP, "≤ 1.3 ×", "1.1 ×", LIMIT, [Arm(AUTO, True)]),
        (AHEAD, "≤ 1.15 ×", "1.1 ×", LIMIT, [Arm(AUTO, True, ahead=True)]),
        (EIGHT, "", "", LIMIT, [Arm(FP8, True)]),
        (f"{EIGHT}, `async_scheduling`", "", "", LIMIT, [Arm(FP8, True, ahead=True)]),
        (f"{SAME}, {DRAWN}", "", "", LIMIT, [Arm(AUTO, True, sampled=True)]),
        (f"{SAME}, drawn, `async_scheduling`", "", "", LIMIT, [Arm(AUTO, True, True, True)]),
    ],
    "profile": [
        ("launches a layer of that step, greedy", "", "", "{launches_a_layer}", []),
        ("the share of it in which kernels run", "", "", "{busy:.0%}", []),
    ],
    "validate/result": [
        (f"first token, mean, {LOADS}", "≤ 14 ms at half load", "", served("ttft_mean"), []),
        (f"a token after it, mean, {LOADS}", "", "", served("tpot_mean"), []),
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


main = main_of(__name__, table, peers)

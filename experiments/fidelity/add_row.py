"""Add results of a benchmark to a table that `experiment=truth` reads.

    python -m pagedsim.experiments.fidelity.add_row TABLE.csv RESULT.json [RESULT.json ...] \\
        gpu=h100 tensor_parallel=8 precision=fp8 server=vllm-0.33 shortest=1 [column=value ...]

A result is the file of `vllm bench serve --save-result --max-concurrency N`, or vllm_bench.json of
`python -m pagedsim bench` with workload.arrivals=closed. What it does not state is asked for, and
`--metadata gpu=h100 ...` states it, too. A result that the table has is not added again.

shortest=1 says that lengths are fixed. Where they are drawn, it is the shortest by the longest:
(1 - r) / (1 + r) with `vllm bench serve --random-range-ratio r`.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown
from pagedsim.fidelity.rows import Row, read_rows
from pagedsim.fidelity.step_tables.protocol import COLUMNS, OPTIONAL
from pagedsim.fidelity.step_tables.tables import LAYOUTS, cell_of
from pagedsim.user_error import UserError, guarded
from pagedsim.workload.traces.results import results_in
from pagedsim.workload.traces.rows import existing, readable

(LOOP,) = (layout for layout in LAYOUTS if "ttft" in layout.measured)
ASKED = {
    "model": "a name of conf/model or of a checkpoint, or the path of a config.json",
    "gpu": "a name of conf/hardware, such as h100",
    "tensor_parallel": "a whole number from 1",
    **{name: COLUMNS[name] for name in ("server", "shortest")},
}
"""What a row must have and a result may not state."""
GIVEN = (*ASKED, "precision", "version", *OPTIONAL)
HEADER = list(dict.fromkeys(["id", *LOOP.columns, "backend", *COLUMNS, *GIVEN]))
FIXED = 0.98
"""Shortest by longest of lengths that count as fixed: tokenizers add or take a few tokens."""


def results_of(path: str) -> Iterator[Row]:
    """The results in a file, which has one or several, one after another."""
    file = existing(path, "result")
    with readable(file):
        results = results_in(file)
    for values in results:
        if "mean_ttft_ms" not in values:
            known = "vllm bench serve --save-result, or vllm_bench.json of bench"
            raise ConfigError(f"{path}: has no mean_ttft_ms: must be a result of {known}")
        yield Row(path, values)


def row_of(result: Row, given: Mapping[str, str]) -> dict[str, str]:
    """The row of a result, in which what is `given` comes before what the result states."""
    if result.text("request_rate") != "inf" or result.text("ramp_up_strategy"):
        other = "of other loads experiment=calibrate and experiment=predict take logs, by requests="
        raise result.wrong("request_rate", f"inf, without a ramp, as of a closed loop; {other}")
    lengths = [result.values.get(f"{name}_lens") for name in ("input", "output")]
    fixed = all(each and min(each) >= FIXED * max(each) for each in lengths)
    stated = {"model": result.text("model_id"), "shortest": "1" if fixed else ""}
    stated |= {name: text for name in GIVEN if (text := result.text(name))} | dict(given)
    if lacking := [name for name in ASKED if not stated.get(name)]:
        raise UserError(
            [f"{result.place}: {name}= must be given: {ASKED[name]}" for name in lacking]
        )
    requests = result.number("completed", "a whole number from 1", low=1, whole=True)
    if requests < result.number("num_prompts"):
        all_of = f"num_prompts={result.text('num_prompts')}: failed requests make another load"
        raise result.wrong("completed", all_of)
    at_once = requests  # without a limit all are sent at the beginning
    if result.text("max_concurrency"):
        limit = result.number("max_concurrency", "a whole number from 1", low=1, whole=True)
        at_once = min(requests, limit)
    share = Row(result.place, stated).number(
        "shortest", "a share above 0, 1 at most", above=0, high=1
    )
    row = {**dict.fromkeys(HEADER, ""), **stated}
    for name in ("input", "output"):  # a row has the longest
        mean = result.number(f"total_{name}_tokens", "a number above 0", above=0) / requests
        row[f"{name}_tokens"] = f"{2 * mean / (1 + share):.0f}"
    for name in ("ttft", "tpot"):
        row[f"{name}_ms"] = f"{result.number(f'mean_{name}_ms', 'a time above 0', above=0):.6g}"
    row |= {"concurrency": f"{at_once:.0f}", "rounds": f"{max(1, requests / at_once):.0f}"}
    row["id"] = f"{result.text('date') or Path(result.place).stem}-c{row['concurrency']}"
    return row | {"backend": row["server"].partition("-")[0]}


def main(words: Sequence[str] | None = None) -> None:
    """Add the rows."""
    words = sys.argv[1:] if words is None else words
    if {"-h", "--help"} & {*words}:
        print(__doc__)
        return
    pairs = [word.split("=", 1) for word in words if re.match(r"\w+=", word)]
    paths = [word for word in words if not re.match(r"\w+=", word)]
    for name, _ in pairs:
        if name not in GIVEN:
            raise unknown("column", name, GIVEN)
    if len(paths) < 2 or not paths[0].endswith(".csv"):
        raise ConfigError(f"{' '.join(paths) or 'no file'}: must be TABLE.csv RESULT.json ...")
    table = Path(paths[0])
    rows = [dict(row.values) for row in read_rows(table, "table")] if table.exists() else []
    if rows and (lacking := [name for name in (*LOOP.columns, *COLUMNS) if name not in rows[0]]):
        raise ConfigError(f"{table}: has no column {', '.join(lacking)}: must be of closed loops")
    same = ("id", "ttft_ms", "tpot_ms")
    for result in (result for path in paths[1:] for result in results_of(path)):
        row = row_of(result, dict(pairs))
        cell = cell_of(table.stem, Row(result.place, row), LOOP, None, ())
        if any(all(row[name] == old.get(name) for name in same) for old in rows):
            print(f"{result.place}: {table} has this result, as {row['id']}")
            continue
        rows.append(row)
        print(f"{result.place}: {cell}, {row['rounds']} rounds")
    written = table.with_suffix(".part")
    with written.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys([*rows[0], *HEADER])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    written.replace(table)
    print(f"python -m pagedsim experiment=truth 'study.tables=[{table}]'")


if __name__ == "__main__":
    sys.exit(guarded(main))

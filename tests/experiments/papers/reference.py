"""Studies of papers with few requests, and what they find: the numbers in reference.json.

    python -m tests.experiments.papers.reference

writes them anew, after a change of the simulator or of the papers' arithmetic that is meant to
change numbers.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.run.studies import carried_out

FILE = Path(__file__).with_name("reference.json")
REDUCED: Mapping[str, tuple[str, ...]] = {
    # reserved and paged memory, slot by slot, where requests wait
    "paper_fig2": (
        *("workload.requests=60", "workload.rate=40", "seeds=1", "backend.every=16"),
        *("study.figures.memory.options.warm_up=1", "~study.figures.memory.variants"),
    ),
    # swap and recompute, and what a sequence costs
    "paper_fig19": (
        *("workload.requests=60", "workload.rate=20"),
        "study.figures.preemption.values=[16]",
    ),
    # orders, two seeds and their confidence intervals, a bound on latency, published curves
    "size_based": (
        *("workload.requests=90", "server.max_seqs=4", "seeds=2", "study.only=[Alpaca]"),
        "study.figures.load.cases.Alpaca.values=[1,80]",
    ),
}
"""By experiment, the words that reduce it."""


def numbers(name: str, folder: Path) -> dict[str, Any]:
    """What a reduced study finds: numbers and differences of the rows, and all data."""
    words = (f"experiment={name}", "jobs=1", "report=false", *REDUCED[name])
    with contextlib.redirect_stdout(None):
        result = carried_out(folder, *words)
    rows = [[row["ours"], row["difference"]] for row in result["rows"]]
    return {"rows": rows, "data": result["data"]}


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as scratch:
        found = {name: numbers(name, Path(scratch) / name) for name in REDUCED}
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""The committed findings, made again from their commands.

    python -m pagedsim.experiments.regenerate [experiment ...]     (none: all of them)

Runs each as a user would, and keeps its result.json and pictures in experiments/results/<name>, of
some the rows of comparison.csv, and in experiments/results/README.md what all of them found.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pagedsim.metrics.files import COMPARISON, RESULT, read_json, write_json
from pagedsim.run.cite import run_again

RESULTS = Path(__file__).parent / "results"
STUDIES = (
    *("paper_fig2", "paper_fig12", "paper_fig13", "paper_fig14_15", "paper_fig16"),
    *("paper_fig18", "paper_fig19"),
    *("chunk_budget", "past_future", "size_based", "policy_zoo", "agents", "kv_tiers"),
    *("fcfs_vs_priority", "preemption", "swap_vs_recompute", "offload_or_recompute"),
    *("offload_policies", "offload_gains", "block_sizes", "capacity", "tune"),
    *("placement", "early_rejection", "cheapest_fleet", "prefix_routing", "staleness", "migration"),
    *("servers", "fairness", "truth"),
)
"""Experiments whose results are committed, in the order of the index."""
SENTENCES = 2
"""Of each finding in the index."""
TRACED = ("offload_or_recompute", "offload_policies")
"""Studies that read traces/, which the folder must have in which they are made."""
RECORDS = ("truth",)
"""Studies whose rows are kept, too, in comparison.csv.gz."""
_HEAD = """# Findings
Each is what one command printed; `python -m pagedsim.experiments.regenerate` makes them all
again, and this page. Beside them: `front_door`, `serve` and `report` have the README's pictures,
and a folder named after a machine what was measured on it.
"""


def main(words: Sequence[str] | None = None) -> None:
    """Make some or all of them again, then the index."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", nargs="*", help=f"any of {', '.join(STUDIES)}")
    chosen = parser.parse_args(words).experiment
    for name in chosen:
        if name not in STUDIES:
            parser.error(f"{name}: must be one of {', '.join(STUDIES)}")
    for name in chosen or STUDIES:
        if name in TRACED and not Path("traces").is_dir():
            print(f"{name}: stays as it is: there is no traces/, see conf/experiment/{name}.yaml")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = run(name, Path(scratch) / "run")
            keep(folder, RESULTS / name)
    (RESULTS / "README.md").write_text(index(committed()), encoding="utf-8")


def run(name: str, folder: Path) -> Path:
    """Run an experiment by its command, in `folder`."""
    return run_again([f"experiment={name}"], folder)


def keep(folder: Path, place: Path) -> None:
    """Replace the committed result.

    The version and commit are left out, so that the file is equal from one commit to the next.
    """
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    result = read_json(folder / RESULT)
    del result["pagedsim"]
    write_json(place / RESULT, result)
    for name in result["pictures"]:
        shutil.copy(folder / "plots" / f"{name}.png", place)
    if place.name in RECORDS:
        rows = gzip.compress((folder / COMPARISON).read_bytes(), mtime=0)
        (place / f"{COMPARISON}.gz").write_bytes(rows)


def committed() -> list[str]:
    """The studies whose results are committed."""
    return [name for name in STUDIES if (RESULTS / name / RESULT).exists()]


def index(names: Iterable[str]) -> str:
    """The page of all findings, each with a picture and its command."""
    return "\n".join([_HEAD, *(_entry(name) for name in names)])


def _entry(name: str) -> str:
    result: dict[str, Any] = read_json(RESULTS / name / RESULT)
    picture = "".join(f"![{result['title']}]({name}/{plot}.png)\n\n" for plot in result["pictures"])
    return (
        f"## {name}: {result['title']}\n{' '.join(result['finding'][:SENTENCES])}\n\n{picture}"
        f"`{result['command']}` → [{RESULT}]({name}/{RESULT})\n"
    )


if __name__ == "__main__":
    main()

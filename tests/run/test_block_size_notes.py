"""What a study over block sizes says of simulated kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.studies import carried_out

pytestmark = pytest.mark.usefixtures("hydra")

QUICK = ("workload.requests=10", "seeds=1", "report=false", "jobs=1")
SAME = "simulated kernels take the same time with any block size"
PRICED = "simulated attention takes as long to find a block as to read 3.68 tokens"


def notes(folder: Path, *words: str) -> list[str]:
    told = carried_out(folder, *words, *QUICK).get("notes", [])
    return [note for note in told if note.startswith((SAME, PRICED))]


@pytest.mark.parametrize(
    "words",
    [
        ("experiment=block_sizes", "study.sizes=[8,16]"),
        ("experiment=sweep", "study.over=memory.block_size", "study.values=[8,16]"),
        ("experiment=compare", 'study.arms={a: [], b: ["memory.block_size=1"]}'),
    ],
)
def test_a_table_over_block_sizes_says_that_kernels_do_not_depend_on_them(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    [note] = notes(tmp_path, *words)
    assert note.startswith(f"{SAME}; on an A100") and "fewer than 16 tokens" in note


@pytest.mark.parametrize("experiment", ["paper_fig18", "paper_fig19"])
def test_a_study_with_and_without_a_price_of_blocks_says_both(
    experiment: str, tmp_path: Path
) -> None:
    words = [f"experiment={experiment}", "study.sizes=[16,64]"]
    if experiment == "paper_fig18":
        words += [
            f"study.loads.{load}.{key}"
            for load in ("ShareGPT", "Alpaca")
            for key in ("requests=10", "best=[16,64]")
        ]
    same, priced = notes(tmp_path, *words)
    assert same.startswith(f"{SAME} where cost.block_tokens=0;")
    assert priced.startswith(PRICED)


def test_one_block_size_wants_no_note(tmp_path: Path) -> None:
    arms = 'study.arms={a: [], b: ["memory=prefix"], c: ["memory=reserved_max"]}'
    assert notes(tmp_path, "experiment=compare", arms) == []


def test_blocks_that_cost_time_are_said_to_be_assumed(tmp_path: Path) -> None:
    over = ("study.over=memory.block_size", "study.values=[8,16]")
    [note] = notes(tmp_path, "experiment=sweep", *over, "cost.block_tokens=3.68")
    assert note.startswith(PRICED)

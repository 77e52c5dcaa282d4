"""The numbers of reduced studies are those in reference.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.experiments.papers.reference import FILE, REDUCED, numbers

KNOWN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", REDUCED)
def test_a_reduced_study_finds_the_numbers_of_the_reference(name: str, tmp_path: Path) -> None:
    found = numbers(name, tmp_path)
    assert found == KNOWN[name], (
        "the simulator or the papers' arithmetic gives other numbers; if that is meant: "
        "python -m tests.experiments.papers.reference, and pagedsim.experiments.regenerate"
    )

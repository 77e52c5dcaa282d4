"""Models of power and of all-to-all transfers against published measurements."""

from __future__ import annotations

import pytest

from pagedsim.experiments.fidelity import all_to_all, power
from pagedsim.experiments.fidelity.power import Case, cases, errors, fit, shipped

EVERY = cases()
FITTED = [case for case in EVERY if case.prompt <= power.LONGEST]


def off(some: list[Case], fitted: list[Case]) -> float:
    found = errors(fit(fitted, shipped().idle), some)
    return sum(map(abs, found)) / len(found)


def test_the_constants_are_those_of_the_fit() -> None:
    found, have = fit(FITTED, shipped().idle), shipped()
    assert (found.busy, found.compute, found.bandwidth) == pytest.approx(
        (have.busy, have.compute, have.bandwidth), abs=0.005
    )


def test_missing_power_is_no_power() -> None:
    assert {case.share > 0.1 for case in EVERY} == {True}
    assert {(case.model, case.gpus) for case in EVERY} == {
        ("bloom-176b", 8),
        *(("llama-2-70b", gpus) for gpus in (2, 4, 8)),
    }
    assert len(EVERY) == 44
    assert len(FITTED) == 36


def test_the_table_of_power_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    power.main([])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 1 + 5 + 2
    (line,) = [line for line in lines if line.startswith("as shipped")]
    assert line.split()[2:6] == ["0.300", "1.170", "0.700", "36"]


def test_the_table_has_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    all_to_all.main()
    rows = capsys.readouterr().out.splitlines()
    assert [int(row.split()[0]) for row in rows[1:]] == list(all_to_all.PUBLISHED)
    assert rows[1].split() == ["8", "191", "187", "-2.3", "%"]

"""What the tuner times, in Triton's interpreter: `tests/kernels/interpreted.py` says how it is run.

The race itself needs a GPU's clock; here its kernels are called as it calls them.
"""

from __future__ import annotations

import pytest
import torch

from pagedsim.experiments.benchmarks import tune
from pagedsim.experiments.benchmarks.shapes import Case, Problem
from pagedsim.experiments.benchmarks.tune import computes
from pagedsim.kernels.tiles import Split, Tiles
from pagedsim.kernels.tuning import Cut
from tests.kernels.harness import mend

mend()

SMALL = Cut(Tiles(16, 16, 4, 2), Split())
WIDE = Cut(Tiles(16, 32, 4, 2), Split(64, 1))
CASES = [
    *(Case("little", 2, 1, 70), Case("little", 1, 8, 40)),
    *(Case("little", 2, 1, 70, cache="fp8_e4m3"), Case("little", 1, 8, 40, cache="fp8_e5m2")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_candidates_are_run_and_checked(case: Case) -> None:
    problem = Problem(case, torch.float16, torch.device("cpu"))
    assert computes(problem, SMALL) and computes(problem, WIDE)
    problem.allowed = 1e-9
    assert not computes(problem, SMALL)


def test_a_race_has_a_time_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "DTYPE", torch.float16)  # bf16 is interpreted wrongly
    seconds = tune.attention_race([SMALL, WIDE], CASES[0], torch.device("cpu"), rounds=1)
    assert set(seconds) == {SMALL, WIDE} and min(seconds.values()) > 0

"""Refusals of a fleet: shares and loads by hand, what is reported, and one real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from experiments.papers.early_rejection import Rejection, loads
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from tests.metrics.tables import NAN, requests_of
from tests.run.studies import carried_out


def study(**more: Any) -> Rejection:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "ways": {"late": ["router.refuse=late"], "early": ["router.refuse=now"]},
        "cases": {"strict": ["router.tbt=0.1"], "lenient": ["router.tbt=1"]},
        "shown": "strict",
        "warm_up": 0.0,
        "span": 3.0,
        "published": {"late": 50, "early": 25},
        "of": 100,
    }
    return Rejection(**(settings | more))


class Tables(Run):
    """Four requests: two are served, one is refused at 0.5 s on its arrival, and one at 3 s, its
    prompt computed, where `config` says that there is a late one."""

    def requests(self, *columns: str) -> pa.Table:
        served: dict[str, Any] = {
            "arrival": 0.0,
            "left": 1.0,
            "boarded": 1.5,
            "finished": 3.5,
            "output_tokens": 5,
        }
        refused: dict[str, Any] = {
            "left": NAN,
            "boarded": NAN,
            "first_token": NAN,
            "state": "rejected",
        }
        rows = [
            served,
            served | {"left": 2.0, "boarded": 2.0, "finished": 2.2},
            served | refused | {"arrival": 0.5, "finished": 0.5},
            served | refused | {"arrival": 4.0, "finished": 4.0},
        ]
        if self.config["late"]:
            rows[2] |= {"first_token": 3.0, "finished": 3.0}
        return requests_of(*rows).select(columns)


def tables(arm: str = "x", late: bool = True) -> Run:
    return Tables(arm, 0, Path(), {"late": late, "router": {"tbt": 0.1}}, {})


def test_loads_of_each_stage_by_hand() -> None:
    found = loads([tables()], 0.0, 3.0)
    assert found.refused == 0.5 and found.late == 0.25
    assert found.slow == 0.25  # 0.5 s a token, and 0.05
    assert found.prefill == 1.5 and found.decode == pytest.approx(1.1)
    assert found.curves == {"seconds": [0, 1, 2], "prefill": [2, 2, 1], "decode": [0, 0, 2]}
    early = loads([tables(late=False)], 0.0, 3.0)
    assert early.late == 0.0 and early.curves["prefill"] == [2, 1, 0]


def test_swings_are_deviations_over_time() -> None:
    found = loads([tables()], 0.0, 9.0)  # 2, 2, 1, 0 and 0, 0, 2, 1
    assert found.queue_swing == pytest.approx(0.6875**0.5 / 1.25)
    assert found.swing == pytest.approx(0.6875**0.5 / 0.75)
    assert found.together == pytest.approx((0.5 - 1.25 * 0.75) / 0.6875)


def test_a_warm_up_longer_than_the_arrivals() -> None:
    with pytest.raises(ConfigError, match=r"^study\.warm_up=4: must be shorter than the 4 s of"):
        loads([tables()], 4.0, 3.0)


def test_rows_and_whether_they_need_a_reason() -> None:
    of = study()
    runs = {arm: [tables(arm, late="late" in arm)] for arm in of.arms()}
    assert of.arms()["strict, early"] == ["router.tbt=0.1", "router.refuse=now"]
    reading = of.read_arms(runs)
    assert [(row.ours, row.published) for row in reading.rows] == [
        (0.5, 0.5),
        (0.5, 0.25),
        (1, 0.5),
    ]
    assert [bool(row.why) for row in reading.rows] == [False, True, True]


@pytest.mark.usefixtures("hydra")
def test_a_fleet_whose_roles_are_not_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^fleet=alike: must have prefill and decode apart"):
        carried_out(tmp_path / "out", "experiment=early_rejection", "fleet=alike", "tracking=none")

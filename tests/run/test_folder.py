"""A study's folder belongs to one study."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedsim.core import ConfigError
from pagedsim.run.folder import claimed, keep_configuration

BASE = {"seeds": 3, "workload": {"rate": 2}, "study": {"arms": {"a": ["policy=fcfs"]}}}


def test_two_studies_of_one_name_get_a_folder_each(tmp_path: Path) -> None:
    wanted = tmp_path / "10-00-00-single"
    found = []
    for _ in range(3):
        with claimed(wanted, own=False) as folder:
            keep_configuration(BASE, folder)
            found.append(folder.name)
    assert found == ["10-00-00-single", "10-00-00-single-2", "10-00-00-single-3"]


def test_while_the_first_has_written_nothing_yet(tmp_path: Path) -> None:
    with claimed(tmp_path / "x", own=False) as one, claimed(tmp_path / "x", own=False) as other:
        assert one != other


def test_nothing_is_left_of_a_study_that_did_not_begin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), claimed(tmp_path / "x", own=False):
        raise ConfigError("refused")
    assert not (tmp_path / "x").exists()


def test_a_folder_of_ones_own_is_gone_on_with(tmp_path: Path) -> None:
    for changes in ({}, {"seeds": 5}, {"seed": 7}):
        with claimed(tmp_path, own=True) as folder:
            keep_configuration({**BASE, **changes}, folder)
        assert folder == tmp_path
    more = {"study": {"arms": {"a": ["policy=fcfs"], "b": []}, "title": "t"}}
    keep_configuration({**BASE, **more}, tmp_path)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"workload": {"rate": 4}}, "workload.rate=2, not 4"),
        ({"workload": {}}, "workload.rate=2, not null"),
        ({"hardware": "h100"}, "hardware=null, not h100"),
        (
            {"study": {"arms": {"a": ["policy=priority"]}}},
            "study.arms.a=['policy=fcfs'], not ['policy=priority']",
        ),
        ({"study": {"arms": {"b": []}}}, "the arms a, not b"),
    ],
)
def test_the_folder_of_another_study_is_refused(
    changes: dict[str, object], difference: str, tmp_path: Path
) -> None:
    keep_configuration(BASE, tmp_path)
    (tmp_path / "runs").mkdir()
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(ConfigError) as error:
        keep_configuration({**BASE, **changes}, tmp_path)
    assert str(error.value) == (
        f"hydra.run.dir={tmp_path}: has a study with {difference}; "
        "choose another folder, or the same settings to go on with that study"
    )
    assert (tmp_path / "config.yaml").read_text() == before


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with claimed(tmp_path / "out", own=True) as folder:
        with (
            pytest.raises(ConfigError, match=r"run.dir=.*out: another run is at work there"),
            claimed(folder, own=True),
        ):
            raise AssertionError("unreachable")
        (folder / "kept").touch()
    with claimed(folder, own=True):  # free again
        pass
    assert (folder / "kept").exists()

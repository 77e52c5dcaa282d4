"""The command that repeats a run that a study made up."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from omegaconf import OmegaConf

from pagedsim.run.compose import single
from pagedsim.run.job import Job
from tests.run.studies import command

pytestmark = pytest.mark.usefixtures("hydra")


def configured(*words: str) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(compose("config", overrides=[*words]), resolve=True)
    return dict(plain)


def test_what_a_study_set_itself_is_typed_so_that_it_can_be_composed(tmp_path: Path) -> None:
    """Bounds of a client, below a key that holds nothing unless it is filled."""
    words = ("experiment=single", "workload=chat_and_batch")
    own = ("workload.rate=3", "+slo.clients.batch.e2e=9", "slo.ttft=1")
    made = configured(*words, *own)
    typed = single(command(tmp_path, *words), [], Job("a", 0, made, tmp_path))
    again = configured(*shlex.split(typed.partition("pagedsim ")[2]))
    assert again["slo"] == {**made["slo"], "clients": {"batch": {"e2e": 9}}}
    assert again["workload"] == made["workload"]

"""Replicas that die: started anew, later each time, and given up at last."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from threading import Event

import pytest

from pagedsim.core import PagedsimError
from pagedsim.serve.router import children
from pagedsim.serve.router.children import Children
from tests.serve.dying import short_lived


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_serve", short_lived)
    monkeypatch.setattr(children, "PAUSE", 0.01)
    monkeypatch.setattr(children, "MOST", 2)


@pytest.mark.usefixtures("quick")
def test_a_replica_that_dies_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = Event()
    config = {"place": str(tmp_path / "begins"), "never": False}
    with (
        pytest.raises(PagedsimError, match=r"^no replica is left: each died again and again"),
        caplog.at_level(logging.WARNING),
        Children([("replica-0", config)]),
        monkeypatch.context() as patched,
    ):
        patched.setattr(os, "kill", lambda pid, number: ended.set())
        assert ended.wait(60)
    assert (tmp_path / "begins").read_text() == "3"
    said = "replica-0 has died (exit code 3; it said last: no memory); "
    assert [record.getMessage() for record in caplog.records] == [
        "replica-0 has died (SIGKILL; it said last: model serves at http://127.0.0.1:1); "
        "in 0.01 s it is started anew (1 of 2)",
        f"{said}in 0.02 s it is started anew (2 of 2)",
        f"{said}started anew 2 times, it is given up",
    ]


@pytest.mark.usefixtures("quick")
def test_a_replica_that_never_listens_is_an_error_at_the_start(tmp_path: Path) -> None:
    config = {"place": str(tmp_path / "begins"), "never": True}
    error = r"^replica-0 ended before it listened \(exit code 3; it said last: no memory\)$"
    with pytest.raises(PagedsimError, match=error), Children([("replica-0", config)]):
        pass

"""A Ctrl-C is heard, and CUDA graphs can be replayed without a GPU."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine.test_graphs import Replayer


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> Iterator[None]:
    """Processes that a shell starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def replayer(monkeypatch: pytest.MonkeyPatch) -> Replayer:
    """The recorder of engines that are made within the test."""
    from pagedsim.engine import runner
    from tests.engine.test_graphs import Replayer

    one = Replayer()
    monkeypatch.setattr(runner, "recorder_of", lambda device: one)
    return one

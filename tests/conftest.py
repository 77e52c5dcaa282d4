"""What tests of the command line share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedsim.__main__ import main

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Run the command in this process, in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def called(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pagedsim", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return called

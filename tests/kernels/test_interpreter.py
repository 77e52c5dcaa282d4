"""The kernel cases, and every `interpreted*.py`, in a process that runs Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
FILES = sorted(TESTS.rglob("interpreted*.py")) + [
    file
    for file in sorted(TESTS.glob("kernels/test_*.py"))
    if re.search(
        r"^from tests.kernels.harness import.*\b(INTERPRETED|everywhere)", file.read_text(), re.M
    )
]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run(files: Sequence[Path], marker: str) -> None:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", marker]
    child = subprocess.run(
        [*command, *map(str, files)],
        cwd=TESTS.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    for file in files:
        assert re.search(rf"/{file.name}::.* PASSED", child.stdout), file


def test_the_kernels_interpreted() -> None:
    run(FILES, "not slow and not gpu")


@pytest.mark.slow
def test_the_slow_cases_interpreted() -> None:
    run([file for file in FILES if "mark.slow" in file.read_text()], "slow and not gpu")

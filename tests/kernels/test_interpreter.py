"""Runs each `interpreted*.py` in a process of its own, with Triton's interpreter on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
FILES = sorted(TESTS.rglob("interpreted*.py"))

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run(file: Path, marker: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker]
    child = subprocess.run(
        [*command, str(file)],
        cwd=TESTS.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert " passed" in child.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_kernels_interpreted(file: Path) -> None:
    run(file, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", [file for file in FILES if "mark.slow" in file.read_text()], ids=lambda file: file.stem
)
def test_the_cross_product_interpreted(file: Path) -> None:
    run(file, "slow")

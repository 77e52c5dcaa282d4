"""Runs every `interpreted*.py` in a process of its own, with Triton's interpreter on."""

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


def run(marker: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker]
    child = subprocess.run(
        [*command, *map(str, FILES)],
        cwd=TESTS.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout


def test_the_kernels_interpreted() -> None:
    assert " passed" in run("not slow")


@pytest.mark.slow
def test_the_cross_product_interpreted() -> None:
    assert " passed" in run("slow")

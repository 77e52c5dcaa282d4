"""The table of draws: a random one reads the logits once, and what it is held against is one."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedsim.kernels import ops as kernels
from tests.kernels.draws import PLAIN, asked_of, words_for
from tests.kernels.nuclei import likely

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@pytest.mark.slow
def test_launches_bytes_and_kernels() -> None:
    words = ["--rows", "16", "--vocab", "50257", "--capabilities", "90"]
    child = subprocess.run(
        [sys.executable, "-m", "experiments.benchmarks.sampled", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    steps, taken = (
        [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
        for table in child.stdout.split("\n\n")
    )
    found = {name: rest for name, *rest in steps}
    assert found["greedy"][0] == "1" and found["random"][0] == "2"
    assert found["random"][2] == "1.1 ×"
    assert float(found["random, torch"][1]) > 30 * float(found["random"][1])
    assert len(taken) == 9
    assert {line[6] for line in taken} == {"0"}  # bytes that spill


ROUNDED = """
import json, re
from functools import partial
from experiments.benchmarks.ahead import launched, stand_in
from experiments.benchmarks.sampled import drawn
stand_in(90)
code = [one.asm["ptx"] for cut in (0, 1) for one in launched(partial(drawn, 50257, bool(cut)))]
found = re.findall(r"\\b([a-z]\\w*[.][.a-z0-9]*f(?:32|64)[.a-z0-9]*)", "".join(code))
print(json.dumps(sorted({one for one in found if not re.match("ld|st|mov|selp|shfl|param", one)})))
"""
ALIKE = re.compile(r"(add|sub|mul|max|neg|setp|div[.]rn|cvt[.]rn|cvt[.]rzi|cvt[.]rpi|cvt[.]rmi)[.]")
"""Operations that IEEE 754 defines. Here `floor` may take a number below the normal ones for 0, but
is asked for none: it is given sums with ½."""


def test_every_gpu_rounds_alike() -> None:
    """No product is fused with a sum, and nothing is approximate."""
    child = subprocess.run(
        [sys.executable, "-c", ROUNDED], cwd=ROOT, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert {"div.rn.f32", "div.rn.f64"} <= {*found}
    assert [one for one in found if not ALIKE.match(one)] == []


def test_what_it_is_held_against_is_a_draw() -> None:
    from experiments.benchmarks.sampled import plain

    logits, words = likely(4, 1000), words_for(4)
    picked = kernels.pick(logits, asked_of([PLAIN] * 4), words)
    assert torch.equal(plain(logits, torch.ones(4, 1), words), picked)

"""Loops in machine code, the tables of compiled kernels, and the arithmetic of parts."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from experiments.benchmarks.compiled import plain_sample, shares  # noqa: E402
from experiments.benchmarks.fake_gpu import Loop, main_loop  # noqa: E402
from pagedsim.kernels import ops as kernels  # noqa: E402
from tests.kernels.sampling_cases import PLAIN, asked_of, likely, words_for  # noqa: E402

ROOT = Path(__file__).parents[3]
ASSEMBLY = """
        /*0000*/                   LDG.E R2, desc[UR12][R2.64] ;
.L_x_1:
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R5], desc[UR16][R2.64] ;
        /*0020*/                   LDGDEPBAR ;
        /*0030*/                   LDG.E R7, desc[UR12][R6.64] ;
        /*0040*/                   HMMA.16816.F32.BF16 R60, R56, R60, RZ ;
        /*0050*/              @!P3 BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/                   HMMA.16816.F32.BF16 R60, R56, R60, RZ ;
        /*0070*/                   FSEL R1, R2, -INF , P0 ;
        /*0080*/               @P1 BRA `(.L_x_4) ;
        /*0090*/                   LDG.E.128 R8, desc[UR12][R6.64] ;
        /*00a0*/                   MUFU.EX2 R1, R1 ;
        /*00b0*/                   MUFU.EX2 R1, R1 ;
.L_x_4:
        /*00c0*/              @!P3 BRA `(.L_x_2) ;
        /*00d0*/                   EXIT ;
.L_x_3:
        /*00e0*/                   BRA `(.L_x_3);
"""


def test_the_main_loop_is_the_shortest_with_products() -> None:
    found = Loop(instructions=5, products=1, loads=2, wide=1, in_flight=0.0)
    assert main_loop(ASSEMBLY) == found
    without = ASSEMBLY.replace("HMMA", "FFMA")
    assert main_loop(without) is None


PIPELINED = """
.L_x_1:
        /*0000*/                   DEPBAR.LE SB0, {wait} ;
        /*0010*/                   HMMA.16816.F32.BF16 R60, R56, R60, RZ ;
        /*0020*/              @!P0 LDGSTS.E.BYPASS.128 [R5], desc[UR16][R2.64] ;
        /*0030*/                   LDGDEPBAR ;
        /*0040*/              @!P0 LDGSTS.E.BYPASS.128 [R6], desc[UR16][R4.64] ;
        /*0050*/                   LDGDEPBAR ;
        /*0060*/{late}
        /*0070*/              @!P3 BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize(("wait", "tiles"), [("0x0", 0.0), ("0x1", 0.5), ("0x2", 1.0), ("0xa", 5)])
def test_copies_that_a_loop_does_not_wait_for_are_in_flight(wait: str, tiles: float) -> None:
    """K and V are a group each, so two outstanding groups are one tile."""
    for late in ("NOP ;", "HMMA.16816.F32.BF16 R60, R56, R60, RZ ;"):  # at the end more are
        loop = main_loop(PIPELINED.format(wait=wait, late=late))
        assert loop is not None and loop.in_flight == tiles


def printed(*words: str) -> str:
    """The output of a process of its own, since it replaces Triton's driver."""
    command = [sys.executable, *words]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.mark.slow
def test_every_kernel_has_a_line() -> None:
    text = printed("-m", "experiments.benchmarks.compiled", "--capabilities", "90")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| 9.0")]
    assert [row[1] for row in rows] == [
        *(["prefill"] * 3 + ["decode"] * 3),
        *["qkv", "out", "gate_up", "down"] * 3,
    ]
    for row in rows:
        *_, instructions, products, loads, wide, in_flight, registers, spilled, shared = row
        assert 0 < int(products) < int(instructions) and 0 < int(wide) <= int(loads)
        assert int(registers) <= 255 and spilled == "0" and float(shared.rstrip(" |")) <= 227
        # A prefill's deeper pipeline leaves little room for anything else: it has to win a race.
        assert float(in_flight) >= (0 if row[1] == "prefill" else 1), row


def test_parts_have_equal_work_and_few_partial_results() -> None:
    short = shares("llama-3.1-8b", "auto", [256] * 64)
    assert short.parts == 64 and short.merged == 0.0  # one part each: nothing to merge
    many = shares("llama-3.1-8b", "auto", [1024] * 64)
    assert many.parts == 64 * 4 and many.fewest > 1
    # Four parts of 32 heads of 130 numbers, 4 bytes each, written and read.
    assert many.merged == pytest.approx(2 * 4 * 4 * 32 * 130 / (2 * 2 * 1024 * 8 * 128))
    lone = shares("llama-3.1-8b", "auto", [131072])
    assert lone.parts == 128 and lone.fewest * lone.programs <= 8 * 131072 // 64


@pytest.mark.slow
def test_launches_bytes_and_kernels_of_a_sample() -> None:
    words = ["sampling", "--rows", "16", "--vocab", "50257", "--capabilities", "90"]
    steps, kernel_rows = (
        [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
        for table in printed("-m", "experiments.benchmarks.compiled", *words).split("\n\n")
    )
    found = {name: rest for name, *rest in steps}
    assert found["greedy"][0] == "1" and found["random"][0] == "2"
    assert found["random"][2] == "1.1 ×"
    assert float(found["random, torch"][1]) > 30 * float(found["random"][1])
    assert len(kernel_rows) == 9 and {line[6] for line in kernel_rows} == {"0"}  # spilled bytes


ROUNDED = """
import json, re
from functools import partial
from experiments.benchmarks.compiled import sample
from experiments.benchmarks.fake_gpu import compiled_kernels, use_target
use_target(90)
code = [
    one.asm["ptx"] for cut in (0, 1) for one in compiled_kernels(partial(sample, 50257, bool(cut)))
]
found = re.findall(r"\\b([a-z]\\w*[.][.a-z0-9]*f(?:32|64)[.a-z0-9]*)", "".join(code))
print(json.dumps(sorted({one for one in found if not re.match("ld|st|mov|selp|shfl|param", one)})))
"""
ALIKE = re.compile(r"(add|sub|mul|max|neg|setp|div[.]rn|cvt[.]rn|cvt[.]rzi|cvt[.]rpi|cvt[.]rmi)[.]")
"""Operations that IEEE 754 defines. Here `floor` may flush a subnormal number to 0, but it only
gets sums with ½."""


def test_every_gpu_rounds_alike() -> None:
    """No product is fused with a sum, and nothing is approximate."""
    found = json.loads(printed("-c", ROUNDED))
    assert {"div.rn.f32", "div.rn.f64"} <= {*found}
    assert [one for one in found if not ALIKE.match(one)] == []


def test_the_plain_sample_is_that_of_the_kernels() -> None:
    logits, words = likely(4, 1000), words_for(4)
    picked = kernels.pick(logits, asked_of([PLAIN] * 4), words)
    assert torch.equal(plain_sample(logits, torch.ones(4, 1), words), picked)

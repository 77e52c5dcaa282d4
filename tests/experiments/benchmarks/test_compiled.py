"""Loops are found in a disassembly, and the table of what is compiled has a line for each."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.benchmarks.sass import Loop, main_loop

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
def test_groups_that_a_loop_does_not_wait_for_are_in_flight(wait: str, tiles: float) -> None:
    """K and V are a group each, so two outstanding groups are one tile."""
    for late in ("NOP ;", "HMMA.16816.F32.BF16 R60, R56, R60, RZ ;"):  # at the end more are
        loop = main_loop(PIPELINED.format(wait=wait, late=late))
        assert loop is not None and loop.in_flight == tiles


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_every_kernel_has_a_line() -> None:
    told = "from experiments.benchmarks import compiled; compiled.main(['--capabilities', '90'])"
    command = [sys.executable, "-c", told]  # its own process: Triton's driver is another there
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith("| 9.0")]
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


def test_parts_are_dealt_evenly_and_leave_little() -> None:
    pytest.importorskip("torch")
    from experiments.benchmarks.sharing import shares

    short = shares("llama-3.1-8b", "auto", [256] * 64)
    assert short.parts == 64 and short.left == 0.0  # one part each: nothing to merge
    many = shares("llama-3.1-8b", "auto", [1024] * 64)
    assert many.parts == 64 * 4 and many.fewest > 1
    # Four parts of 32 heads of 130 numbers, 4 bytes each, written and read.
    assert many.left == pytest.approx(2 * 4 * 4 * 32 * 130 / (2 * 2 * 1024 * 8 * 128))
    lone = shares("llama-3.1-8b", "auto", [131072])
    assert lone.parts == 128 and lone.fewest * lone.programs <= 8 * 131072 // 64

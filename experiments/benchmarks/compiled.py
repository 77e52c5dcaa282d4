"""Kernels as compiled for GPUs that need not be present.

    python -m pagedsim.experiments.benchmarks.compiled [--capabilities 80 90]

A line for each kernel of attention with Llama-3.1-8B's shape, kind of cache and GPU, in bf16: the
instructions of one warp for one tile (rows × keys), its matrix products, barriers, the tiles in
flight during every product (copies to shared memory that are issued and not yet waited for; 0:
memory is idle during some product), registers, spilled bytes and shared memory. No time is
measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch

from pagedsim.experiments.benchmarks.fake_gpu import compiled_kernels, output_of, usage, use_target
from pagedsim.experiments.benchmarks.harness import main_of, parse, table
from pagedsim.experiments.benchmarks.shapes import BASE, Case, Problem
from pagedsim.experiments.benchmarks.tune import DTYPE, attend, default_cut, heads_of
from pagedsim.kernels.float8 import AUTO, FORMATS

ATTENTION = {"prefill": (512, "_attention"), "decode": (1, "_decode")}
"""Query tokens, and the name of the kernel that attends."""


def compiled(words: Sequence[str]) -> None:
    """Compile, and print the table."""
    asked = parse(__doc__, words, {"--capabilities": [80, 90, 100, 120]})
    head = ["GPU", "kernel", "cache", "tile, warps, stages", "instructions", "products"]
    head += ["barriers", "in flight", "registers", "spilled", "shared KiB"]
    rows: list[list[str]] = []
    for capability in asked.capabilities:
        use_target(capability)
        rows += attention_rows(capability)
    print(table(head, rows))


def attention_rows(capability: int) -> Iterator[list[str]]:
    """A line for each kernel of attention with the default tiles."""
    for kernel, (queries, name) in ATTENTION.items():
        for cache in (AUTO, *FORMATS):
            case = Case(BASE, 1, queries, max(queries, 64), cache=cache)
            cut = default_cut(kernel, heads_of(BASE, cache), divmod(capability, 10))
            problem, tiles = Problem(case, DTYPE, torch.device("cpu")), cut.tiles
            launched = compiled_kernels(partial(attend, problem, cut))
            (main,) = (kernel for kernel in launched if kernel.name == name)
            size = f"{tiles.rows} × {tiles.keys}, {tiles.warps}, {tiles.stages}"
            words = [f"{capability / 10:.1f}", kernel, cache.replace(AUTO, "bf16"), size]
            yield [*words, *_kernel_cells(main)]


def _kernel_cells(kernel: Any) -> list[str]:
    loop, used = main_loop(output_of("nvdisasm", "-c", kernel.asm["cubin"])), usage(kernel)
    cells = [""] * len(Loop._fields)
    if loop is not None:
        *counts, in_flight = loop
        cells = [*map(str, counts), f"{in_flight:.1f}"]
    return [*cells, str(used.registers), str(used.spilled), f"{used.shared / 1024:.0f}"]


# -- machine code ----------------------------------------------------------------------------------

_LABEL = re.compile(r"(\.L\w+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);")
_BRANCH = re.compile(r"BRA.*`\((\.L\w+)\)")
_PRODUCT = re.compile(r"\w*MMA\b|\w*MMA\.")
_COPY = re.compile(r"LDGSTS\S*?(?:\.(64|128))?\s")
_COMMIT = re.compile(r"LDGDEPBAR\b")
_WAIT = re.compile(r"DEPBAR\.LE SB0, (0x[0-9a-f]+)")


class Loop(NamedTuple):
    """The work of a warp in one iteration of a loop."""

    instructions: int
    products: int
    """Of the tensor cores."""
    barriers: int
    """Of all warps of a program."""
    in_flight: float
    """Tiles that are still being copied to shared memory during every matrix product; an iteration
    copies one tile. 0: memory is idle during some product."""


def main_loop(assembly: str) -> Loop | None:
    """The loop around matrix products, of several the shortest, since masks make others longer.

    An instruction counts whether or not its predicate holds. None where there is no such loop.
    """
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(instructions)
        elif match := _INSTRUCTION.search(line):
            instructions.append(match[1])
    bodies = [
        instructions[labels[branch[1]] : end + 1]
        for end, instruction in enumerate(instructions)
        if (branch := _BRANCH.match(instruction)) and labels.get(branch[1], end + 1) <= end
    ]
    loops = []
    for body in bodies:
        products = sum(bool(_PRODUCT.match(instruction)) for instruction in body)
        barriers = sum(instruction.startswith("BAR.SYNC") for instruction in body)
        loops.append(Loop(len(body), products, barriers, _in_flight(body)))
    return min((loop for loop in loops if loop.products), default=None)


def _in_flight(body: list[str]) -> float:
    """Simulate the asynchronous copies of a loop in its steady state.

    LDGSTS copies to shared memory, LDGDEPBAR closes a group of copies, and DEPBAR.LE SB0, n waits
    until at most n groups are outstanding.
    """
    tile = sum(map(_copied, body))
    if not tile:
        return 0.0
    waits = [int(wait[1], 16) for instruction in body if (wait := _WAIT.match(instruction))]
    groups: list[int] = []
    open_group, least = 0, inf
    turns = 2 + max(waits, default=0)  # an iteration closes at least one group
    for turn in range(turns):
        for instruction in body:
            if wait := _WAIT.match(instruction):
                outstanding = int(wait[1], 16)
                groups = groups[-outstanding:] if outstanding else []
            elif _COMMIT.match(instruction):
                groups, open_group = [*groups, open_group], 0
            elif _PRODUCT.match(instruction) and turn == turns - 1:
                least = min(least, sum(groups) + open_group)
            open_group += _copied(instruction)
    return least / tile if waits else 0.0


def _copied(instruction: str) -> int:
    """Bytes a thread of an asynchronous copy; 0 for other instructions."""
    copy = _COPY.match(instruction)
    return int(copy[1] or 32) // 8 if copy else 0


main = main_of(__name__, compiled)

"""What a GPU's instructions say of a kernel: its main loop, counted."""

from __future__ import annotations

import re
from math import inf
from typing import NamedTuple

_LABEL = re.compile(r"(\.L\w+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);")
_BRANCH = re.compile(r"BRA.*`\((\.L\w+)\)")
_PRODUCT = re.compile(r"\w*MMA\b|\w*MMA\.")
_LOAD = re.compile(r"LDG(STS)?\b")
_WIDE = re.compile(r"LDG(STS)?\.\S*128\b")
_COPY = re.compile(r"LDGSTS\S*?(?:\.(64|128))?\s")
_COMMIT = re.compile(r"LDGDEPBAR\b")
_WAIT = re.compile(r"DEPBAR\.LE SB0, (0x[0-9a-f]+)")


class Loop(NamedTuple):
    """What a warp does in one turn of a loop."""

    instructions: int
    products: int
    """Of the tensor cores."""
    loads: int
    """From global memory, to registers or to shared memory."""
    wide: int
    """Those of 16 bytes a thread."""
    in_flight: float
    """Tiles that are still being copied to shared memory during every matrix product, a tile being
    what one turn copies. 0: some product runs while memory is idle."""


def main_loop(assembly: str) -> Loop | None:
    """The loop around matrix products, of several the shortest: masks make others longer.

    An instruction counts whether or not its predicate holds. None where there is no such loop.
    """
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            instructions.append(found[1])
    bodies = [
        instructions[labels[branch[1]] : end + 1]
        for end, one in enumerate(instructions)
        if (branch := _BRANCH.match(one)) and labels.get(branch[1], end + 1) <= end
    ]
    loops = [counted(body) for body in bodies]
    return min((loop for loop in loops if loop.products), default=None)


def counted(body: list[str]) -> Loop:
    """The instructions of one turn."""
    products, loads, wide = (
        sum(bool(kind.match(one)) for one in body) for kind in (_PRODUCT, _LOAD, _WIDE)
    )
    return Loop(len(body), products, loads, wide, _in_flight(body))


def _in_flight(body: list[str]) -> float:
    """Play the asynchronous copies of a loop in its steady state.

    LDGSTS copies to shared memory, LDGDEPBAR closes a group of copies, and DEPBAR.LE SB0, n waits
    until at most n groups are outstanding.
    """
    tile = sum(map(_copied, body))
    if not tile:
        return 0.0
    waits = [int(wait[1], 16) for one in body if (wait := _WAIT.match(one))]
    groups: list[int] = []
    open_group, least = 0, inf
    turns = 2 + max(waits, default=0)  # a turn closes a group at least
    for turn in range(turns):
        for one in body:
            if wait := _WAIT.match(one):
                outstanding = int(wait[1], 16)
                groups = groups[-outstanding:] if outstanding else []
            elif _COMMIT.match(one):
                groups, open_group = [*groups, open_group], 0
            elif _PRODUCT.match(one) and turn == turns - 1:
                least = min(least, sum(groups) + open_group)
            open_group += _copied(one)
    return least / tile if waits else 0.0


def _copied(instruction: str) -> int:
    """Bytes a thread that an asynchronous copy brings; 0 for other instructions."""
    found = _COPY.match(instruction)
    return int(found[1] or 32) // 8 if found else 0

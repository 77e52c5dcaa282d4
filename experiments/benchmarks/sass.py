"""What a GPU's instructions say of a kernel: its main loop, counted."""

from __future__ import annotations

import re
from typing import NamedTuple

_LABEL = re.compile(r"(\.L\w+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);")
_BRANCH = re.compile(r"BRA.*`\((\.L\w+)\)")
_PRODUCT = re.compile(r"\w*MMA\b|\w*MMA\.")
_LOAD = re.compile(r"LDG(STS)?\b")
_WIDE = re.compile(r"LDG(STS)?\.\S*128\b")


class Loop(NamedTuple):
    """What a warp does in one turn of a loop."""

    instructions: int
    products: int
    """Of the tensor cores."""
    loads: int
    """From global memory, to registers or to shared memory."""
    wide: int
    """Those of 16 bytes a thread."""


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
    return Loop(
        len(body),
        *(sum(bool(kind.match(one)) for one in body) for kind in (_PRODUCT, _LOAD, _WIDE)),
    )

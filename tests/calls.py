"""Count the project's function calls between the words of a command and its results.

    python -m tests.calls experiment=single seeds=1 workload.requests=1

Runs the command in this process (give it `jobs=1`) and prints a row for each phase: reading the
words, checking the arms, the rest before the simulation, the simulation, and what follows. Calls of
libraries are not counted. The last lines say where the first class of `policies/` was built: how
deep in the stack of the project's functions, and through how many files.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pagedsim
from pagedsim.__main__ import command

PACKAGE = Path(pagedsim.__file__).parents[1]
ROOMS = ("pagedsim", "policies", "kernels", "experiments")
PHASES = ("words", "check", "before", "simulation", "after")
CHECK = "check_arms"
"""The function that checks the arms of a study before any of them runs."""
SIMULATION = "simulate"
"""The function of pagedsim/sim/simulate.py in which the simulated time passes."""


@dataclass
class Counts:
    """Calls by phase and function."""

    calls: dict[str, Counter[CodeType]] = field(
        default_factory=lambda: {phase: Counter() for phase in PHASES}
    )
    policies: list[tuple[str, int, int]] = field(default_factory=list)
    """Of each policy that was built: the phase, the depth and the files on the stack."""
    phase: str = "words"
    returns: dict[FrameType, str] = field(default_factory=dict)
    """The phase that follows when a frame returns."""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """What sys.setprofile calls."""
        if event == "return":
            self.phase = self.returns.pop(frame, self.phase)
        elif event == "call" and (place := _place(frame.f_code)):
            self._enter(frame, place)

    def _enter(self, frame: FrameType, place: str) -> None:
        name = frame.f_code.co_name
        if name == CHECK:
            self.returns[frame], self.phase = "before", "check"
        elif name == SIMULATION and place.endswith("sim/simulate.py"):
            self.returns[frame], self.phase = "after", "simulation"
        self.calls[self.phase][frame.f_code] += 1
        if name == "__init__" and place.startswith("policies/"):
            stack = [*_stack(frame)]
            self.policies.append((self.phase, len(stack), len(set(stack))))


@cache
def _place(code: CodeType) -> str:
    """The path of a function's file below the repository; empty for other code and for the bodies
    of modules and classes."""
    if not code.co_flags & 1:  # optimised: a function
        return ""
    file = str(Path(code.co_filename).resolve()) if code.co_filename else ""
    if not file.startswith(str(PACKAGE)):
        return ""
    place = file.removeprefix(f"{PACKAGE}/")
    return place if place.partition("/")[0] in ROOMS and not file.startswith(__file__) else ""


def _stack(frame: FrameType | None) -> list[str]:
    """The files of the project's functions from a frame outwards."""
    files = []
    while frame is not None:
        if place := _place(frame.f_code):
            files.append(place)
        frame = frame.f_back
    return files


def measured(words: list[str]) -> Counts:
    """The counts of a command with these words."""
    counts = Counts()
    sys.setprofile(counts)
    try:
        command(words)()
    finally:
        sys.setprofile(None)
    return counts


def main() -> None:
    """Print the counts of the command that the arguments are."""
    counts = measured([*sys.argv[1:], "tracking=none"])
    print(f"\n{'phase':12}{'calls':>10}{'functions':>11}{'files':>7}")
    for phase, calls in counts.calls.items():
        entered = len({code.co_filename for code in calls})
        print(f"{phase:12}{calls.total():10,}{len(calls):11,}{entered:7,}")
    early = counts.calls["words"] | counts.calls["check"] | counts.calls["before"]
    print(f"before the simulation {len(early)} functions, after {len(counts.calls['after'])}")
    for phase, depth, files in dict.fromkeys(counts.policies):
        print(f"a policy was built in {phase} at depth {depth} through {files} files")


if __name__ == "__main__":
    main()

"""How far the parts have come, and of which code that is: gpu.json, and an archive of it all."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.benchmarks.gpu.archive import pack
from experiments.benchmarks.gpu.parts import Part
from experiments.benchmarks.harness import keep
from pagedsim.metrics.jsons import read_json

DONE, FAILED, CUT = "done", "failed", "out of time"
BEGUN, AHEAD = "begun", "not begun"
"""A part that was begun goes on where it was stopped."""
PATIENCE = 300.0
"""Seconds that slices give a part without coming to its end, before they come to the others."""


def in_vain(spent: float) -> bool:
    """Whether a part that has had so many seconds makes room for the others."""
    return spent > PATIENCE


class Ledger:
    """Of one folder, on one GPU."""

    def __init__(self, place: Path, told: Mapping[str, Any], archive: Path | None = None) -> None:
        """`told` are the facts of this run; ends with a line if the folder is of another GPU."""
        self.place, self.device, self._told = place, str(told["device"]), told
        self._archive = archive
        path = place / "gpu.json"
        before: dict[str, Any] = {"device": self.device}
        if path.exists():
            before = read_json(path)
        if before["device"] != self.device:
            sys.exit(
                f"--out {place}: is of {before['device']}, and this is {self.device}; give another"
            )
        self.parts: dict[str, dict[str, Any]] = before.get("parts", {})

    def state(self, part: Part) -> str:
        """How far it has come, with this code and these tiles."""
        known = self.parts.get(part.name, {})
        same = all(known.get(key) == value for key, value in part.identity(self.device).items())
        return str(known["state"]) if same else AHEAD

    def left(self, wanted: Iterable[Part]) -> list[Part]:
        """Those that are not done: what went wrong or may hang last, before it what has other tiles
        by now."""
        left = [part for part in wanted if self.state(part) != DONE]
        return sorted(left, key=self._place)

    def spent(self, part: Part) -> float:
        """Seconds that slices which stopped it gave it, with this code and these tiles."""
        if self.state(part) not in (BEGUN, CUT):
            return 0.0
        return float(self.parts[part.name].get("spent", 0.0))

    def of_other_code(self, wanted: Iterable[Part]) -> list[str]:
        """Names of those that were measured, by code that was not this."""
        return [
            part.name
            for part in wanted
            if part.name in self.parts
            and self.parts[part.name]["code"] != part.identity(self.device)["code"]
        ]

    def put(self, part: Part, state: str, **found: Any) -> None:
        """Say how far a part has come."""
        self.parts[part.name] = {**part.identity(self.device), "state": state, **found}
        self.write()

    def write(self) -> None:
        """Write gpu.json and the archive; each is whole at any moment."""
        keep(self.place, "gpu", {**self._told, "parts": self.parts})
        self.pack()

    def pack(self) -> None:
        """Write the archive, if there is to be one."""
        if self._archive is not None:
            pack(self.place, self._archive)

    def _place(self, part: Part) -> int:
        if self.state(part) in (FAILED, CUT) or in_vain(self.spent(part)):
            return 2
        known, now = self.parts.get(part.name, {}), part.identity(self.device)
        retuned = known.get("state") == DONE and known.get("code") == now["code"]
        return int(retuned and known.get("command") == now["command"])

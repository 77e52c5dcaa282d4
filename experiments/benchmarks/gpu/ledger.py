"""The state of all parts, in gpu.json, and an archive of the results.

The archive is small, complete at any moment, and good for any folder of any clone.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.benchmarks.gpu.parts import Part
from experiments.benchmarks.harness import keep
from pagedsim.metrics.files import read_json

DONE, FAILED, CUT = "done", "failed", "out of time"
BEGUN, AHEAD = "begun", "not begun"
"""A part that was begun resumes where it was stopped."""
PATIENCE = 300.0
"""Seconds that slices give a part that does not end, before the others."""


def in_vain(spent: float) -> bool:
    """Whether a part with so many seconds comes after the others."""
    return spent > PATIENCE


class Ledger:
    """The states of parts in one folder, on one GPU."""

    def __init__(self, place: Path, told: Mapping[str, Any], archive: Path | None = None) -> None:
        """`told` are the facts of this run; exits with a line if the folder is of another GPU."""
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
        """Its state, with this code and these tiles."""
        known = self.parts.get(part.name, {})
        same = all(known.get(key) == value for key, value in part.identity(self.device).items())
        return str(known["state"]) if same else AHEAD

    def left(self, wanted: Iterable[Part]) -> list[Part]:
        """The parts that are not done. Those that failed or may hang come last, after those whose
        tiles have changed."""
        left = [part for part in wanted if self.state(part) != DONE]
        return sorted(left, key=self._place)

    def spent(self, part: Part) -> float:
        """Seconds that it ran in slices that stopped it, with this code and these tiles."""
        if self.state(part) not in (BEGUN, CUT):
            return 0.0
        return float(self.parts[part.name].get("spent", 0.0))

    def of_other_code(self, wanted: Iterable[Part]) -> list[str]:
        """Names of the parts that were measured with other code."""
        return [
            part.name
            for part in wanted
            if part.name in self.parts
            and self.parts[part.name]["code"] != part.identity(self.device)["code"]
        ]

    def put(self, part: Part, state: str, **found: Any) -> None:
        """Set the state of a part."""
        self.parts[part.name] = {**part.identity(self.device), "state": state, **found}
        self.write()

    def write(self) -> None:
        """Write gpu.json and the archive; each is complete at any moment."""
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


# -- the archive -----------------------------------------------------------------------------------

KINDS = (".json", ".md", ".png")
LARGEST = 4 * 2**20
"""Bytes of a packed file, at most."""
MOST = 15 * 2**20
"""Bytes of an archive, at most."""


def pack(place: Path, path: Path) -> list[str]:
    """Write the results of a folder, and return the names of files that are too large.

    Folders in it, which studies make, are packed with their files, but not what is deeper.
    """
    there = sorted([*place.glob("*"), *place.glob("*/*")])
    files = [one for one in there if one.suffix in KINDS and one.name[0] != "."]
    taken = [one for one in files if one.stat().st_size <= LARGEST]
    while len(content := _packed(taken, place)) > MOST:
        taken.remove(max(taken, key=lambda one: one.stat().st_size))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")  # a process killed here leaves the previous file
    part.write_bytes(content)
    part.replace(path)
    return [one.relative_to(place).as_posix() for one in files if one not in taken]


def _packed(files: list[Path], place: Path) -> bytes:
    room = io.BytesIO()
    with tarfile.open(fileobj=room, mode="w:gz") as archive:
        for path in files:
            content = path.read_bytes()
            member = tarfile.TarInfo(path.relative_to(place).as_posix())
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return room.getvalue()


class Archive:
    """An archive that was written before; exits with a line if it is not one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with tarfile.open(path, "r:gz") as archive:
                self._files = {one.name: _content(archive, one) for one in archive}
            self.ledger: dict[str, Any] = json.loads(self._files["gpu.json"])
        except (OSError, EOFError, zlib.error, tarfile.TarError, KeyError, ValueError) as error:
            reason = "it has no gpu.json" if isinstance(error, KeyError) else error
            sys.exit(f"--archive {path}: is none that this command has written: {reason}")

    def unpack(self, place: Path, device: str) -> None:
        """Write its files to a folder, over those that are there."""
        if self.ledger["device"] != device:
            sys.exit(
                f"--archive {self._path}: is of {self.ledger['device']}, and this is {device}; "
                "give another"
            )
        place.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes(content)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member) if member.isfile() else None
    *folder, name = member.name.split("/")
    if file is None or len(folder) > 1 or {"", ".", ".."} & {*folder, name}:
        raise ValueError(f"{member.name!r} is no plain file")
    return file.read()

"""All results in one file: small, whole at any moment, and good for any folder of any clone."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import zlib
from pathlib import Path
from typing import Any

KINDS = (".json", ".md", ".png")
LARGEST = 4 * 2**20
"""Bytes of a file that is taken along."""
MOST = 15 * 2**20
"""Bytes of an archive."""


def pack(place: Path, path: Path) -> list[str]:
    """Write the results of a folder, and return the names of those that are too large for it.

    Of the folders in it, which studies leave, what lies in them is taken along, and nothing deeper.
    """
    there = sorted([*place.glob("*"), *place.glob("*/*")])
    files = [one for one in there if one.suffix in KINDS and one.name[0] != "."]
    taken = [one for one in files if one.stat().st_size <= LARGEST]
    while len(content := _packed(taken, place)) > MOST:
        taken.remove(max(taken, key=lambda one: one.stat().st_size))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")  # who is killed here leaves what was there
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
    """One that was written before; ends with a line where it is none."""

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
        """Put its files into a folder, in the place of those that are there."""
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

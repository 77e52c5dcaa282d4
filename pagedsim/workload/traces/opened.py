"""A trace file as text, whether or not gzip packed it."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pagedsim.core import ConfigError


def file_at(path: str | Path, where: str) -> Path:
    """The file of that name; raises ConfigError, which names the setting `where`, if none is."""
    file = Path(path).expanduser()
    if file.is_dir():
        raise ConfigError(f"{where}={path}: is a folder, must be a file")
    if not file.is_file():
        raise ConfigError(f"{where}={path}: no such file")
    return file


def opened(path: Path) -> TextIO:
    """The file's text; line ends are left as they are, a byte order mark is left out."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if packed:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise ConfigError where the file, read inside, turns out not to be text."""
    try:
        yield
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8, nor one packed by gzip") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ConfigError(f"{path}: packed by gzip, but damaged or not whole") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None

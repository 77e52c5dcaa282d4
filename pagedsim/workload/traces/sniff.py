"""Trace file formats by name, and their detection from the beginning of a file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown
from pagedsim.workload.traces.csvfile import names_of, read_header
from pagedsim.workload.traces.formats import (
    Azure,
    Bailian,
    BurstGPT,
    LengthsOnly,
    Log,
    Mooncake,
    Plain,
    Turns,
    VllmLog,
)
from pagedsim.workload.traces.rows import Format, Options, opened, wrong
from pagedsim.workload.traces.sharegpt import ShareGPT

# The first of equally good matches is chosen, so formats with more columns come first: `plain`
# before `lengths`, `bailian` before `mooncake`.
FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        *(Azure(), BurstGPT(), Plain(), LengthsOnly()),
        *(Bailian(), Mooncake(), Turns(), Log(), VllmLog(), ShareGPT()),
    )
}


def existing(path: str | Path | None, key: str = "path") -> Path:
    """The path of an existing file; otherwise raises ConfigError with the closest file name."""
    if path is None or not str(path):
        raise ConfigError(f"{key}: must name a trace file")
    file = Path(str(path))
    with suppress(RuntimeError):  # unknown ~user: reported below as a missing folder
        file = file.expanduser()
    try:
        size = file.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(file, key) from None
    except OSError as error:
        raise ConfigError(f"{key}={path}: {error.strerror}") from None
    if file.is_dir():
        raise ConfigError(f"{key}={path}: is a folder, must be a file")
    if not file.is_file():
        raise ConfigError(f"{key}={path}: is not a plain file, which can be read twice")
    if not size:
        raise ConfigError(f"{file}: the file is empty")
    return file


def _missing(file: Path, key: str) -> ConfigError:
    if not file.parent.is_dir():
        return ConfigError(f"{key}={file}: there is no folder {file.parent}")
    close = get_close_matches(file.name, [p.name for p in file.parent.iterdir()], n=1)
    hint = f"; did you mean {file.parent / close[0]}?" if close else ""
    return ConfigError(f"{key}={file}: there is no such file{hint}")


def format_of(path: Path, name: str) -> Format:
    """The format called `name`; `auto` detects it from the file."""
    if name != "auto":
        if name not in FORMATS:
            raise unknown("format", str(name), [*FORMATS, "auto"])
        return FORMATS[name]
    with opened(path) as file:
        head = file.read(1 << 16).lstrip()
    if not head:
        raise ConfigError(f"{path}: the file is empty")
    best = max(FORMATS.values(), key=lambda format: format.fits(head))
    if best.fits(head):
        return best  # reading it reports a missing column, if any
    tables = (format for format in FORMATS.values() if format.is_table)
    known = "; ".join(f"{format.name}: {', '.join(format.needs)}" for format in tables)
    raise wrong(path, 1, f"no known format has columns {names_of(read_header(path))} ({known})")


def refuse_ignored(format: Format, options: Options) -> None:
    """Raise ConfigError for an option that the format does not support."""
    for key, value in options.given.items():
        if key not in format.options:
            users = ", ".join(sorted(one.name for one in FORMATS.values() if key in one.options))
            given = key if callable(value) else f"{key}={value}"
            what = f"{given}: format {format.name} has no use for it"
            raise ConfigError(f"{what}; formats that have: {users}")

"""Which format a trace file has: by name, or by how it begins."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown
from pagedsim.workload.traces.azure import Azure
from pagedsim.workload.traces.burstgpt import BurstGPT
from pagedsim.workload.traces.csvfile import read_header
from pagedsim.workload.traces.mooncake import Mooncake
from pagedsim.workload.traces.plain import LengthsOnly, Plain
from pagedsim.workload.traces.rows import Format
from pagedsim.workload.traces.sharegpt import ShareGPT

# Where several fit a header, the first is taken: `plain` asks for more than `lengths`.
FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (Azure(), BurstGPT(), Plain(), LengthsOnly(), Mooncake(), ShareGPT())
}


def existing(path: str | Path | None, key: str = "path") -> Path:
    """The file of that name; raises ConfigError, with the nearest name there is, if none is."""
    if path is None or not str(path):
        raise ConfigError(f"{key}: must name a trace file")
    file = Path(path).expanduser()
    if file.is_file():
        if file.stat().st_size == 0:
            raise ConfigError(f"{file}: the file is empty")
        return file
    if file.is_dir():
        raise ConfigError(f"{key}={path}: is a folder, not a file")
    if not file.parent.is_dir():
        raise ConfigError(f"{key}={path}: there is no folder {file.parent}")
    close = get_close_matches(file.name, [p.name for p in file.parent.iterdir()], n=1)
    hint = f"; did you mean {file.parent / close[0]}?" if close else ""
    raise ConfigError(f"{key}={path}: there is no such file{hint}")


def format_of(path: Path, name: str) -> Format:
    """The format called `name`; `auto` looks into the file."""
    if name != "auto":
        if name not in FORMATS:
            raise unknown("format", str(name), [*FORMATS, "auto"])
        return FORMATS[name]
    with path.open(encoding="utf-8-sig") as file:
        begin = file.read(64).lstrip()
    if not begin:
        raise ConfigError(f"{path}: the file is empty")
    if begin[0] in "{[":
        return FORMATS["mooncake" if begin[0] == "{" else "sharegpt"]
    header = set(read_header(path))
    tables = [f for f in FORMATS.values() if not isinstance(f, Mooncake | ShareGPT)]
    best = max(tables, key=lambda f: len(header.intersection(f.needs)) / len(f.needs))
    if header.intersection(best.needs):
        return best  # reading it names the column that is missing, if one is
    known = "; ".join(f"{f.name}: {', '.join(f.needs)}" for f in tables)
    raise ConfigError(
        f"{path}:1: no known format has columns {', '.join(sorted(header))} ({known})"
    )

"""`cite`: what a folder of results came from, how to cite it, and whether it comes out again."""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from pagedsim.core import PagedsimError
from pagedsim.metrics.files import COMPARISON, RESULT, read_json, write_json
from pagedsim.report.figures import FORMATS
from pagedsim.run.provenance import in_words, made_by
from pagedsim.user_error import UserError

FIGURES_HELP = f"""\
python -m pagedsim figures FOLDER [FORMAT ...]

Draws the figures, tables and report of the results in FOLDER again, from the runs that lie there,
in these formats ({", ".join(FORMATS)}) or those of the command. Nothing is run.
"""
CITE_HELP = """\
python -m pagedsim cite FOLDER [--run | --check]

What the results in FOLDER came from: the command, the versions, the commit and digests of
result.json and comparison.csv; and entries for BibTeX, of pagedsim and of the data that was used.

--run    runs the command again, in a folder of its own
--check  runs it again in a temporary folder, and compares both files byte by byte
"""
PACKAGES = ("numpy", "simpy", "scipy", "pyarrow", "hydra-core")
"""Whose versions numbers may depend on."""
_LICENCE = re.compile(r"\((?:[^()]*\b)?(CC-BY-[\d.]+|Apache-2\.0|MIT)\b[^()]*\)")
_ENTRY = """\
@software{{pagedsim,
  title = {{{{pagedsim}}: one scheduler for LLM serving, studied in a simulator and run on a GPU}},
  author = {{{{The pagedsim maintainers}}}},
  version = {{{version}}},{commit}
  license = {{Apache-2.0}},
}}"""


def result_in(folder: Path, command: str) -> dict[str, Any]:
    """The result.json of a folder that was given to a command."""
    try:
        return read_json(folder / RESULT)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            [f"{command} {folder}: must be a folder of results, which has {RESULT}"]
        ) from None
    except (OSError, ValueError) as error:
        raise UserError([f"{command} {folder}: {RESULT} cannot be read: {error}"]) from None


def words_of(result: Mapping[str, Any]) -> list[str]:
    """The words of the command behind a result, after `python -m pagedsim`."""
    words = shlex.split(str(result.get("command", "")))
    if words[:3] != ["python", "-m", "pagedsim"]:
        raise UserError([f"{RESULT}: command={result.get('command')}: is none of pagedsim's"])
    return words[3:]


def run_again(words: Sequence[str], folder: Path) -> Path:
    """Run a study by the words of its command, in `folder`."""
    run(*words, "tracking=none", f"hydra.run.dir={folder}")
    return folder


def run(*words: str) -> None:
    """Run a command of pagedsim in a process of its own; raises PagedsimError if it fails."""
    code = subprocess.run([sys.executable, "-m", "pagedsim", *words], check=False).returncode
    if code:
        raise PagedsimError(f"{shlex.join(words)}: ended with code {code}")


def page(folder: Path, result: Mapping[str, Any]) -> str:
    """What `cite FOLDER` prints."""
    made = result.get("pagedsim") or {}
    lines = [f"command   {result['command']}"]
    if made:
        lines += [f"made by   pagedsim {in_words(made)}"]
    lines += [f"here      pagedsim {in_words()}"]
    lines += [f"          {', '.join(_versions())}"]
    for name in (RESULT, COMPARISON):
        if (file := folder / name).is_file():
            lines.append(f"sha256    {hashlib.sha256(file.read_bytes()).hexdigest()}  {name}")
    lines += [f"data      {line}" for line in _sources(folder, result)]
    of = made or made_by()
    commit = f"\n  note = {{commit {of['commit']}}}," if "commit" in of else ""
    return "\n".join([*lines, "", _ENTRY.format(version=of["version"], commit=commit)])


def _versions() -> Iterator[str]:
    yield f"Python {sys.version.split()[0]}"
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def _sources(folder: Path, result: Mapping[str, Any]) -> Iterator[str]:
    """Published numbers and traces that the result rests on, with licences where they are known."""
    if result.get("source"):
        yield str(result["source"])
    words, formats = words_of(result), set[str]()
    for sheet in sorted(files("pagedsim.conf").joinpath("workload").iterdir(), key=str):
        text, name = sheet.read_text(encoding="utf-8"), sheet.name.removesuffix(".yaml")
        head = " ".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
        if not _LICENCE.search(head):
            continue
        format = re.search(r"^format: (\w+)", text, re.MULTILINE)
        if f"workload={name}" in words:
            yield f"workload={name}: {head}"
        elif format and format[1] not in formats and _reads(words, format[1]):
            formats.add(format[1])
            yield f"format={format[1]}: {head}"
    yield from (f"{word}: a file, not part of pagedsim" for word in _paths(result))


def _reads(words: Sequence[str], format: str) -> bool:
    """Whether a trace is read in this format, by a setting or in a script's workload."""
    return any(re.search(rf"^workload\b.*\bformat[=:] *{format}\b", word) for word in words)


def _paths(result: Mapping[str, Any]) -> list[str]:
    named = re.compile(r"(workload\.path|requests|run|study\.(tables|logs))=")
    return [word for word in words_of(result) if named.match(word)]


def differing(folder: Path, again: Path) -> list[str]:
    """The files of results that differ byte by byte from those that came out again.

    A committed result has neither version nor commit, and is compared without.
    """
    different = []
    for name in (RESULT, COMPARISON):
        old, new = folder / name, again / name
        if name == RESULT and "pagedsim" not in read_json(old):
            made = read_json(new)
            del made["pagedsim"]
            write_json(new, made)
        elif not old.is_file() and name == COMPARISON:
            continue  # not kept
        if not new.is_file() or old.read_bytes() != new.read_bytes():
            different.append(name)
    return different


def words_that_draw(words: Sequence[str]) -> list[str]:
    """The words of the study that `python -m pagedsim figures FOLDER [FORMAT ...]` draws again."""
    folder, *formats = words
    place = Path(folder).expanduser()
    drawn = words_of(result_in(place, "figures"))
    if not (place / "runs").is_dir():
        raise UserError([f"figures {folder}: its runs were not kept; cite --run makes them again"])
    drawn = [word for word in drawn if word != "report=false"]
    if formats:
        drawn = [word for word in drawn if not word.startswith("figures=")]
        drawn.append(f"figures=[{','.join(formats)}]")
    return [*drawn, "tracking=none", f"hydra.run.dir={folder}"]


def cite(words: Sequence[str]) -> str:
    """What `python -m pagedsim cite ...` prints; raises where the results do not come out again."""
    options = [word for word in words if word.startswith("-")]
    paths = [word for word in words if not word.startswith("-")]
    if {"--help", "-h"} & set(options):
        return CITE_HELP
    if unknown := [word for word in options if word not in ("--run", "--check")]:
        raise UserError([f"cite {unknown[0]}: no such option; --run or --check"])
    if len(paths) != 1 or len(options) > 1:
        raise UserError(["cite: takes one folder of results, and --run or --check"])
    folder = Path(paths[0]).expanduser()
    result = result_in(folder, "cite")
    text = page(folder, result)
    if not options:
        return text
    if options == ["--run"]:
        run(*words_of(result))
        return text
    with tempfile.TemporaryDirectory() as scratch:
        different = differing(folder, run_again(words_of(result), Path(scratch) / "run"))
    if different:
        made = (result.get("pagedsim") or {}).get("commit")
        other = made is not None and made != made_by().get("commit")
        why = f"; {folder} was made by commit {made}" if other else ""
        raise PagedsimError(f"{folder}: {', '.join(different)} came out differently{why}")
    return f"{text}\n\n{folder}: came out again, byte by byte"

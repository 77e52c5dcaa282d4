"""The lists of mistakes: what is typed, what any good answer names, and what is printed today.

`python -m tests.mistakes.record` writes the printed lines of both lists anew, `--check` shows those
that differ, old and new. To add a mistake, write what is typed and what its answer must name:

    $ experiment=single policy=prioritty
    names policy | prioritty | priority

Of several lines that begin with `$` (or `>>>`, in Python) the last is the mistake, and those before
it prepare it. A section `== fleets [torch]` needs the packages in brackets.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from shutil import copytree
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LISTS = {HERE / "command_line.txt": "$ ", HERE / "python.txt": ">>> "}
"""The lists, and how a typed line begins in each."""
LIMIT = 60
"""Seconds after which a mistake that nothing refuses is ended: it may have begun to run."""


@dataclass(frozen=True)
class Mistake:
    """One entry of a list."""

    section: str
    prompt: str
    typed: tuple[str, ...]
    names: tuple[str, ...]
    """Texts that any good answer has: the setting, the value, what is allowed."""
    printed: tuple[str, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        """Optional packages without which the answer is another."""
        return tuple(self.section.partition("[")[2].rstrip("]").split())

    def __str__(self) -> str:
        typed = [f"{self.prompt}{line}".rstrip() for line in self.typed]
        return "\n".join([*typed, f"names {' | '.join(self.names)}", *self.printed])


# -- the files -------------------------------------------------------------------------------------


def read(path: Path) -> list[Mistake]:
    """The entries of a list."""
    return list(_entries(path.read_text(), LISTS[path]))


def _entries(text: str, prompt: str) -> Iterator[Mistake]:
    section = ""
    for block in text.strip().split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith("== "):
            section = lines[0].removeprefix("== ")
            continue
        mark = prompt.rstrip()
        typed = [line.removeprefix(mark).strip() for line in lines if line.startswith(mark)]
        rest = lines[len(typed) :]
        named = rest[0].removeprefix("names").strip() if rest else ""
        names = tuple(filter(None, named.split(" | ")))
        yield Mistake(section, prompt, tuple(typed), names, tuple(rest[1:]))


def text_of(mistakes: Sequence[Mistake]) -> str:
    """A list as its file has it."""
    blocks: list[str] = []
    section = ""
    for mistake in mistakes:
        if mistake.section != section:
            section = mistake.section
            blocks.append(f"== {section}")
        blocks.append(str(mistake))
    return "\n\n".join(blocks) + "\n"


# -- making the mistakes ---------------------------------------------------------------------------


def printed(mistake: Mistake) -> tuple[str, ...]:
    """What is printed today, in a new folder with copies of `files`; "exit 1" comes first."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve() / "folder"
        copytree(HERE / "files", folder)
        _import_first(mistake.needs)
        runs = [[line] for line in mistake.typed] if mistake.prompt == "$ " else [mistake.typed]
        act = _command if mistake.prompt == "$ " else _script
        ends = [_forked(folder, act, lines) for lines in runs]
    code, errors = ends[-1]
    assert not any(code for code, _ in ends[:-1]), f"{mistake.typed}: must be prepared: {ends}"
    for path, name in ((folder, "FOLDER"), (ROOT, "ROOT")):
        errors = errors.replace(str(path), name)
    errors = re.sub(r" at 0x[0-9a-f]+", " at 0x0", errors)
    errors = re.sub(r"(ROOT/pagedsim/\S+):\d+", r"\1", errors)  # lines of ours move
    return (f"exit {code}", *errors.splitlines())


def _forked(
    folder: Path, act: Callable[[Sequence[str]], None], typed: Sequence[str]
) -> tuple[int, str]:
    """Exit code and stderr of a forked process: what it imports and registers ends with it."""
    errors = folder.parent / "stderr"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(LIMIT)
            os.chdir(folder)
            tempfile.tempdir = str(folder.parent)  # what is left there goes, and no lock is shared
            sys.path.insert(0, str(folder))
            for path in folder.glob("*.py"):  # a test may have imported another of that name
                sys.modules.pop(path.stem, None)
            for number, stream in ((1, os.devnull), (2, errors)):
                os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))
            act(typed)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), errors.read_text()


@cache
def _import_first(needs: Sequence[str]) -> None:
    """What nearly every mistake of a section needs, so that no forked process imports it again."""
    import hydra  # noqa: F401

    import pagedsim.run.multirun  # noqa: F401
    from pagedsim.spec.composed import Composed

    for options in ("", "experiment=single", "experiment=compare", "experiment=tune"):
        Composed.of(options.split())  # tests remember what Hydra makes of them
    for name in needs:
        import_module(name)


def _command(typed: Sequence[str]) -> None:
    from pagedsim.__main__ import main

    sys.argv = ["pagedsim", *shlex.split(typed[0])]
    main()


def _script(typed: Sequence[str]) -> None:
    import mine  # type: ignore[import-not-found]

    import pagedsim as ps
    from pagedsim.core import PagedsimError

    names: dict[str, Any] = {"ps": ps, "mine": mine}
    try:
        for line in typed:
            exec(line, names)
    except PagedsimError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


# -- the command -----------------------------------------------------------------------------------


def _difference(mistake: Mistake, new: Sequence[str]) -> str:
    typed = "\n".join(f"{mistake.prompt}{line}" for line in mistake.typed)
    old = "\n".join(f"  - {line}" for line in mistake.printed)
    return "\n".join([typed, old, *(f"  + {line}" for line in new), ""])


def main() -> int:
    """Write the lists anew, or show what differs."""
    parser = argparse.ArgumentParser(description="Record what each mistake prints.")
    parser.add_argument("--check", action="store_true", help="show what differs, write nothing")
    parser.add_argument("--only", default="", help="what a typed line has in it")
    asked = parser.parse_args()
    differing = 0
    for path in LISTS:
        made = []
        for mistake in read(path):
            chosen = asked.only in "\n".join(mistake.typed)
            new = printed(mistake) if chosen else mistake.printed
            if new != mistake.printed:
                differing += 1
                print(_difference(mistake, new))
            made.append(replace(mistake, printed=new))
        if not asked.check:
            path.write_text(text_of(made))
    print(f"{differing} mistakes are answered with other lines")
    return int(asked.check and differing > 0)


if __name__ == "__main__":
    sys.exit(main())

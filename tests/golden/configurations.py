"""The resolved configuration of every experiment, of its first arms, and of every option.

    python -m tests.golden.configurations    # write both files anew

An experiment has the dotted keys and values that differ from those of `experiment=single`, which
has all; below it stands each arm as it differs from its experiment. Options of the other groups
have what they change in `experiment=single`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pagedsim.core import PagedsimError
from pagedsim.run.runs import Runs
from pagedsim.run.study import Study
from pagedsim.spec.objects import flat, make
from tests.run.studies import CONF, command

FOLDER = Path(__file__).parent
PLAIN = "experiment=single"
Flat = Mapping[str, Any]


def texts() -> Iterator[tuple[str, str]]:
    """The names of both files and what stands in them."""
    yield "experiments.txt", "\n".join(map(_experiment, CONF.options_of("experiment")))
    groups = [group for group in CONF.groups if group != "experiment"]
    yield "options.txt", "\n".join(map(_group, groups))


def _experiment(name: str) -> str:
    base = _flat(PLAIN) if name != "single" else {}
    with TemporaryDirectory() as folder, chdir(folder):  # where no traces lie
        typed = command(Path(folder), f"experiment={name}")
        config = _in_lines(typed.config)
        lines = [f"experiment={name}", *_differences(base, config)]
        try:
            study = make("study", typed.config["study"], Study)
            runs = Runs(typed, quiet=True)
            arms = list(study.next_runs(runs))
            jobs = {job.arm: job.config for job in runs.jobs_of(arms, study.key_of)}
        except PagedsimError as error:
            lines += ["", f"no arms: {error}".replace(folder, "FOLDER")]
        else:
            for arm, settings in jobs.items():
                lines += ["", f"arm {arm}", *_differences(config, _in_lines(settings))]
    return "\n".join(lines) + "\n"


def _group(group: str) -> str:
    lines = []
    base = _flat(PLAIN)
    for option in CONF.options_of(group):
        config = _flat(PLAIN, f"{group}={option}")
        lines += [f"{group}={option}", *_differences(base, config), ""]
    return "\n".join(lines)


def _flat(*words: str) -> Flat:
    return _in_lines(command(Path(), *words).config)


def _in_lines(config: Any) -> Flat:
    return {key: json.dumps(value) for key, value in flat(config).items()}


def _differences(base: Flat, other: Flat) -> Iterator[str]:
    for key in sorted(base.keys() | other.keys()):
        if base.get(key) != other.get(key):
            yield f"  {key}: {other[key]}" if key in other else f"  {key}: taken away"


def main() -> None:
    """Write both files, and name those that changed."""
    for name, text in texts():
        path = FOLDER / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"written: {name}")
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

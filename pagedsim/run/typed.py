"""How a job that an experiment made up is typed as an ordinary run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra import compose
from omegaconf import OmegaConf

from pagedsim.run.command import Command, command_line, group_of, key_of
from pagedsim.run.composition import flat
from pagedsim.run.job import Job

_OWN = ("study", "experiment", "seed", "seeds", "jobs", "report", "tracking")
"""Keys that belong to a study as a whole."""


def single(command: Command, changes: Sequence[str], job: Job) -> str:
    """The command of `experiment=single` that does what `job` does; empty where there is none.

    Of the words that were typed and `changes`, those of the study are left out; what the
    experiment itself has set is added.
    """
    typed = [*command.words, *changes]
    words = [word for word in typed if group_of(word) not in _OWN]
    chosen = list(_chosen(command, words))
    words = ["experiment=single", *chosen, *words, f"seed={job.seed}", "seeds=1"]
    try:
        plain = OmegaConf.to_container(compose("config", overrides=words), resolve=True)
    except Exception:  # such as a key that only the study's own workload has
        return ""
    return command_line([*words, *_changes(flat(plain), flat(job.config))])


def _chosen(command: Command, words: Sequence[str]) -> Iterator[str]:
    """The options of groups that the experiment has chosen, and `words` do not."""
    config = compose("config", overrides=["experiment=single"], return_hydra_config=True)
    usual = config.hydra.runtime.choices
    typed = {key_of(word) for word in words}
    for group, option in command.choices.items():
        own = group in (*_OWN, *typed) or group.startswith("hydra/")
        if not own and option is not None and option != usual.get(group):
            yield f"{group}={option}"


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """The overrides that make one configuration the other, as far as a run is concerned."""
    for key in sorted(before.keys() | after.keys()):
        if key.partition(".")[0] in _OWN or before.get(key) == after.get(key):
            continue
        if key not in after:
            if not any(name.startswith(f"{key}.") for name in after):  # else it is filled
                yield f"~{key}"
        else:
            yield f"{'' if key in before else '+'}{key}={json.dumps(after[key])}"

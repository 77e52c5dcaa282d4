"""How a job that an experiment made up is typed as an ordinary run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from pagedsim.run.command import command
from pagedsim.run.job import Job

_OWN = ("study", "experiment", "seed", "seeds", "jobs", "report", "tracking")
"""Keys that belong to a study as a whole."""


def single(overrides: Sequence[str], job: Job) -> str:
    """The command of `experiment=single` that does what `job` does.

    Of `overrides`, what its configuration was made with, those of the study are left out; what the
    experiment itself has set is added.
    """
    words = [word for word in overrides if re.split(r"[.@]", key_of(word))[0] not in _OWN]
    words = ["experiment=single", *_chosen(words), *words, f"seed={job.seed}", "seeds=1"]
    plain = OmegaConf.to_container(compose("config", overrides=words), resolve=True)
    return command([*words, *_changes(_flat(plain), _flat(job.config))])


def _chosen(words: Sequence[str]) -> list[str]:
    """The options of groups that the experiment has chosen, and `words` do not."""
    config = compose("config", overrides=["experiment=single"], return_hydra_config=True)
    usual, ours = config.hydra.runtime.choices, HydraConfig.get().runtime.choices
    typed = {key_of(word) for word in words}
    return [
        f"{group}={option}"
        for group, option in ours.items()
        if group not in (*_OWN, *typed) and option is not None and option != usual.get(group)
        if not group.startswith("hydra/")
    ]


def key_of(override: str) -> str:
    """What an override sets."""
    return override.partition("=")[0].lstrip("+~")


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """The overrides that make one configuration the other, as far as a run is concerned."""
    for key in sorted(before.keys() | after.keys()):
        if key.partition(".")[0] in _OWN or before.get(key) == after.get(key):
            continue
        if key not in after:
            yield f"~{key}"
        else:
            yield f"{'' if key in before else '+'}{key}={json.dumps(after[key])}"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and their values."""
    if not isinstance(value, Mapping) or not value:
        return {prefix[:-1]: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{prefix}{key}.")
    return found

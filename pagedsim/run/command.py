"""What was asked for: the words that were typed, and the configuration that they make."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from pagedsim.core import ConfigError
from pagedsim.run.backend import Settings
from pagedsim.run.composition import Composition
from pagedsim.run.pools import with_pools
from pagedsim.user_error import line

_NO_MATTER = ("tracking", "jobs", "hydra")
"""Words that change nothing of what is found."""


@dataclass(frozen=True)
class Command:
    """One command line, as Hydra has read it."""

    words: Sequence[str]
    """The overrides, without Hydra's own."""
    config: Settings
    """All of the configuration, resolved."""
    folder: Path
    """Where results go."""
    experiment: str = "study"
    choices: Mapping[str, str | None] = field(default_factory=dict)
    """The option of each group that was chosen."""
    composition: Composition | None = field(default=None, repr=False)
    """That of the words, where Hydra has composed them."""

    @classmethod
    def given(cls, config: DictConfig, folder: Path) -> Command:
        """The command that Hydra is carrying out."""
        hydra = HydraConfig.get()
        choices = {str(group): option for group, option in hydra.runtime.choices.items()}
        words = list(hydra.overrides.task)
        made = Composition(words, choices, config)
        plain = cast(Settings, OmegaConf.to_container(made.of(()), resolve=True))
        return cls(words, plain, folder, str(choices.get("experiment") or "study"), choices, made)

    @property
    def notes(self) -> Sequence[str]:
        """What the experiment sets for other options than the chosen, a line for each group."""
        return self._composition.notes

    @cached_property
    def _composition(self) -> Composition:
        return self.composition or Composition(self.words, self.choices)

    @property
    def seeds(self) -> list[int]:
        """Those of the study."""
        first: int = self.config["seed"]
        return list(range(first, first + self.config["seeds"]))

    def line(self) -> str:
        """The line that gives the same results: without words that change none."""
        return command_line(word for word in self.words if not word.startswith(_NO_MATTER))

    def configured(
        self, whose: str, overrides: Sequence[str], changes: Mapping[str, Any] | None = None
    ) -> Settings:
        """The configuration with more overrides, and with dotted keys set to these values.

        Raises ConfigError, which names `whose` they are where they are at fault.
        """

        def composed(where: str, more: Sequence[str]) -> Settings:
            return self._changed(where, (*overrides, *more), changes)

        return with_pools(composed(whose, ()), composed)

    def _changed(
        self, whose: str, overrides: tuple[str, ...], changes: Mapping[str, Any] | None
    ) -> Settings:
        base = self._composed(whose, overrides)
        if changes:
            base = base.copy()
            with open_dict(base):
                for key, value in changes.items():
                    OmegaConf.update(base, key, value, merge=False, force_add=True)
        return cast(Settings, OmegaConf.to_container(base, resolve=True, throw_on_missing=True))

    def _composed(self, whose: str, overrides: tuple[str, ...]) -> DictConfig:
        try:
            return self._composition.of(overrides)
        except Exception as error:
            # What is wrong without the arm's changes is not the arm's fault.
            ours = any(one in str(error) or _last(one) in str(error) for one in overrides)
            told = line(error, [*self.words, *overrides])
            raise ConfigError((f"{whose}: " if ours else "") + told) from error


def command_line(words: Iterable[str]) -> str:
    """The line that gives these overrides."""
    return shlex.join(["python", "-m", "pagedsim", *words])


def key_of(override: str) -> str:
    """What an override sets."""
    return override.partition("=")[0].lstrip("+~")


def group_of(override: str) -> str:
    """The first part of the key that an override sets."""
    return re.split(r"[.=@]", override.lstrip("+~"))[0]


def _last(override: str) -> str:
    return key_of(override).rpartition(".")[2]

"""Options that take the place of others in what Hydra has composed, without Hydra.

To compose takes as long as a short run does. Where nobody but its option has a say in a group, what
is composed with another option differs in that group alone, which is as the other's file has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, cast

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

_ROOT = "config"
_OURS = {"pkg://hydra.conf", "pkg://conf", "structured://"}
"""Where all lies that is composed, unless the command line names another folder of configurations,
beside ours or in its place."""


class Exchange:
    """What was composed of some words, which came to these options."""

    def __init__(
        self, made: DictConfig, words: Sequence[Override], choices: Mapping[str, str | None]
    ) -> None:
        self._made, self._words = made, words
        self._choices = {
            group: f"{group}/{option}"
            for group, option in choices.items()
            if option is not None and not group.startswith("hydra/")
        }

    def of(self, options: Mapping[str, str]) -> DictConfig | None:
        """The same with other options of some groups; None where only Hydra knows what that is."""
        made = self._made.copy()
        for group, option in options.items():
            new = _file(f"{group}/{option}")
            if new is None or not (new.plain and self._alone(group)):
                return None
            made[group] = new.settings
        return made

    def _alone(self, group: str) -> bool:
        """Whether the group has what the file of its option says, and from nowhere else."""
        if self._others is None or group in self._others:
            return False
        old = _file(self._choices[group])
        here = OmegaConf.to_container(self._made[group])
        return old is not None and old.plain and old.settings == here

    @cached_property
    def _others(self) -> set[str] | None:
        """What words, the root or options of other groups may have a say in; None: nobody knows,
        since not all of it is ours, or something stands in a place of its own."""
        sources = GlobalHydra.instance().config_loader().get_sources()
        strange = {source.full_path() for source in sources} - _OURS
        if strange or any(word.package is not None for word in self._words):
            return None
        keys = [word.key_or_group for word in self._words]
        found = {key.partition(".")[0] for key in keys if key not in self._choices}
        for name in (_ROOT, *self._choices.values()):
            file = _file(name)
            if file is None and not any(source.is_config(name) for source in sources):
                continue  # an optional one, that is left out
            if file is None or file.package not in ("", "_global_"):
                return None
            if name == _ROOT or file.package:
                found |= file.settings.keys()
            found |= file.named
        return found


class _File:
    """A file of an option, or the root."""

    def __init__(self, text: str) -> None:
        self._text = text
        package = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
        self.package = package[1] if package else ""

    @property
    def plain(self) -> bool:
        """Whether it is what its group becomes."""
        return not self.package and "defaults" not in self.settings

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that it says."""
        said = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(self._text)))
        return said or {}

    @property
    def named(self) -> set[str]:
        """The groups that its defaults go by, or take an option of beside the one chosen."""
        if "defaults:" not in self._text:
            return set()
        entries = self.settings.get("defaults", ())
        return {name for one in entries for name in re.findall(r"(?:^/|\$\{)(\w+)", str(one))}


@cache
def _file(name: str) -> _File | None:
    file = files("conf").joinpath(f"{name}.yaml")
    return _File(file.read_text(encoding="utf-8")) if file.is_file() else None

"""The configurations of one command line, each with the further overrides of an arm.

An experiment may set `workload.rate`, `model.max_model_len` and the like for the options that it
chooses itself. Where the command line chooses another option of such a group, these settings are
left out: a trace keeps its own rate, length and lengths unless the command line changes them. The
same holds for an option that an arm of the command line chooses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from pagedsim.run.exchange import Exchange

_ROOT = "config"
_PLAIN = "experiment=single"
"""An experiment that sets nothing."""
_BOUND = ("workload", "model", "hardware")
"""Groups for whose options an experiment's settings are meant."""
_SIZES = {"memory.blocks": None, "server.max_model_len": None, "tensor_parallel": 1}
"""What goes by the model and the GPU though it is no setting of theirs, and what it is where no
experiment sets it."""


class Composition:
    """What Hydra composes of words and overrides.

    To compose takes as long as a short run does, so it is done once for each choice of options that
    cannot simply be exchanged; values are put into a copy of that.
    """

    def __init__(
        self,
        words: Sequence[str],
        choices: Mapping[str, str | None],
        given: DictConfig | None = None,
    ) -> None:
        """`choices` are the options that `words` come to, and `given` what is composed of these."""
        self._words, self._choices, self._given = words, choices, given
        self._made: dict[tuple[str, ...], DictConfig] = {}
        self._owned: dict[str, str | None] = {}

    @cached_property
    def _composed_of_words(self) -> DictConfig:
        return compose(_ROOT, overrides=[*self._words]) if self._given is None else self._given

    @property
    def notes(self) -> list[str]:
        """What the experiment sets for other options than the chosen, a line for each group."""
        left_out = [one.note(self._choices) for one in self._unmeant.values()]
        return [*left_out, *self._of_arms(), *self._sizes()]

    def _sizes(self) -> Iterator[str]:
        """What the experiment sets for its own model and GPU, and which stays with others."""
        given, changed = self._composed_of_words, {_key(word) for word in self._words}
        sizes = {
            key: value
            for key, usual in _SIZES.items()
            if (value := OmegaConf.select(given, key)) != usual and key not in changed
        }
        if not sizes or {"memory", "server"} & changed:
            return
        own = {
            group: option
            for group in ("model", "hardware")
            if any(_chooses(word, group) for word in self._words)
            and (option := self._own(group)) != self._choices.get(group)
        }
        if own:
            yield (
                f"experiment={self._choices.get('experiment')} sets "
                f"{', '.join(f'{key}={value}' for key, value in sizes.items())} for "
                f"{', '.join(f'{group}={option}' for group, option in own.items())}, and also with "
                f"{', '.join(f'{group}={self._choices.get(group)}' for group in own)} unless the "
                "command sets others"
            )

    def _of_arms(self) -> Iterator[str]:
        """What is left out of the options that arms of the command line choose."""
        arms = [word for word in self._words if _key(word).startswith("study.")]
        found = re.findall(rf"\b({'|'.join(_BOUND)})=([\w.-]+)", " ".join(arms))
        for group, option in dict.fromkeys(found):
            choice = f"{group}={option}"
            if not self._asks(choice, group):
                continue
            with suppress(HydraException):  # what cannot be composed is told of the arm
                alone = _alone(group, [*self._words, choice])
                made = compose(_ROOT, overrides=[*self._words, choice])[group]
                if alone != made:
                    one = Unmeant(group, self._own(group), made, alone)
                    yield one.note({**self._choices, group: option})

    @cached_property
    def _unmeant(self) -> dict[str, Unmeant]:
        """By group, what the experiment sets for another option than the chosen one."""
        given = self._composed_of_words
        found: dict[str, Unmeant] = {}
        for group in _BOUND:
            if any(_chooses(word, group) for word in self._words):
                alone = _alone(group, self._words)
                own = self._choices.get(group) if alone == given[group] else self._own(group)
                if own != self._choices.get(group):
                    found[group] = Unmeant(group, own, given[group], alone)
        return found

    def _own(self, group: str) -> str | None:
        """The option of a group that the experiment chooses."""
        if group not in self._owned:
            others = [word for word in self._words if not _sets(word, group)]
            made = compose(_ROOT, overrides=others, return_hydra_config=True)
            self._owned[group] = made.hydra.runtime.choices.get(group)
        return self._owned[group]

    def of(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration with these; raises whatever Hydra does where they cannot be."""
        asked = self._new(overrides)
        if asked not in self._made:
            made = self._varied(asked)
            if made is None:
                made = self._composed(asked)
            if asked:  # what is missing in the words alone has been said
                OmegaConf.to_container(made, resolve=True, throw_on_missing=True)
            self._made[asked] = made
        return self._made[asked]

    def _composed(self, asked: tuple[str, ...]) -> DictConfig:
        """What Hydra makes of all words, without what the experiment sets for other options."""
        made = self._composed_of_words
        if asked:
            made = compose(_ROOT, overrides=[*self._words, *asked])
        elif self._unmeant:
            made = made.copy()
        for group in _BOUND:
            if any(self._asks(change, group) for change in asked):
                alone = _alone(group, [*self._words, *asked])
                with open_dict(made):
                    made[group] = alone
        for group, one in self._unmeant.items():
            if any(_chooses(change, group) for change in asked):
                continue
            changed = any(_sets(change, group) for change in asked)
            with open_dict(made):
                made[group] = _alone(group, [*self._words, *asked]) if changed else one.alone
        return made

    def _asks(self, change: str, group: str) -> bool:
        """Whether it chooses an option of the group, in words of the command line."""
        arms = (word for word in self._words if _key(word).startswith("study."))
        if not (_chooses(change, group) and any(change in word for word in arms)):
            return False
        return change != f"{group}={self._own(group)}"

    def _new(self, overrides: Sequence[str]) -> tuple[str, ...]:
        """Those that choose another option than there is."""
        keys = [override.partition("=")[0] for override in overrides]
        pairs = zip(keys, overrides, strict=True)
        return tuple(
            override
            for key, override in pairs
            if keys.count(key) > 1 or override != f"{key}={self._choices.get(key)}"
        )

    @cached_property
    def _exchange(self) -> Exchange:
        words = OverridesParser.create().parse_overrides([*self._words])
        return Exchange(self.of(()), words, self._choices)

    def _varied(self, overrides: tuple[str, ...]) -> DictConfig | None:
        """What was composed, with the options and values among `overrides`; None where one of them
        has no place there."""
        if any(self._asks(one, group) for one in overrides for group in _BOUND):
            return None
        parser = OverridesParser.create()
        try:
            parsed = [parser.parse_override(override) for override in overrides]
            values = [
                one
                for one in parsed
                if one.type is OverrideType.CHANGE
                and one.key_or_group not in self._choices
                and not (one.package or one.is_sweep_override() or one.is_hydra_override())
            ]
            if not values:
                return self._exchanged(parsed)
            pairs = zip(overrides, parsed, strict=True)
            options = [override for override, one in pairs if one not in values]
            made = self.of(options).copy()
            for one in values:
                OmegaConf.update(made, one.key_or_group, one.value(), merge=True)
        except Exception:  # what is wrong is said by Hydra, which sees all of it at once
            return None
        return made

    def _exchanged(self, parsed: Sequence[Override]) -> DictConfig | None:
        """The same, of options alone."""
        if not parsed:
            return None
        options: dict[str, str] = {}
        for one in parsed:
            option, plain = one.value(), one.type is OverrideType.CHANGE and one.package is None
            if not (plain and isinstance(option, str)) or one.key_or_group in options:
                return None
            options[one.key_or_group] = option
        return self._exchange.of(options)


@dataclass(frozen=True)
class Unmeant:
    """What an experiment sets for its own option of a group, where another one is chosen."""

    group: str
    own: str | None
    with_it: DictConfig
    alone: DictConfig
    """The group without it."""

    def note(self, choices: Mapping[str, str | None]) -> str:
        """What is left out, and why."""
        there = flat(OmegaConf.to_container(self.alone))
        sets = ", ".join(
            f"{self.group}.{key}={'null' if value is None else value}"
            for key, value in flat(OmegaConf.to_container(self.with_it)).items()
            if key not in there or there[key] != value
        )
        return (
            f"experiment={choices.get('experiment')} sets {sets} for {self.group}={self.own}; "
            f"{self.group}={choices.get(self.group)} keeps its own settings unless the command "
            "sets others"
        )


def _alone(group: str, words: Sequence[str]) -> DictConfig:
    """A group as its option and `words` have it."""
    own = [word for word in words if _sets(word, group)]
    alone: DictConfig = compose(_ROOT, overrides=[_PLAIN, *own])[group]
    return alone


def _chooses(word: str, group: str) -> bool:
    return word.startswith(f"{group}=")


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _sets(word: str, group: str) -> bool:
    return word.lstrip("+~").startswith((f"{group}=", f"{group}.", f"{group}@"))


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and their values."""
    if not isinstance(settings, Mapping) or not settings:
        return {prefix[:-1]: settings}
    found: dict[str, Any] = {}
    for key, inner in settings.items():
        found |= flat(inner, f"{prefix}{key}.")
    return found

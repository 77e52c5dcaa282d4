"""The configurations of one command line, each with the further overrides of an arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from pagedsim.run.exchange import Exchange

_ROOT = "config"


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
        self._words, self._choices = words, choices
        self._made: dict[tuple[str, ...], DictConfig] = {} if given is None else {(): given}

    def of(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration with these; raises whatever Hydra does where they cannot be."""
        asked = self._new(overrides)
        if asked not in self._made:
            made = self._varied(asked)
            if made is None:
                made = compose(_ROOT, overrides=[*self._words, *asked])
            OmegaConf.to_container(made, resolve=True, throw_on_missing=True)
            self._made[asked] = made
        return self._made[asked]

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
        return Exchange(self._made[()], words, self._choices)

    def _varied(self, overrides: tuple[str, ...]) -> DictConfig | None:
        """What was composed, with the options and values among `overrides`; None where one of them
        has no place there."""
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
        if () not in self._made or not parsed:
            return None
        options: dict[str, str] = {}
        for one in parsed:
            option, plain = one.value(), one.type is OverrideType.CHANGE and one.package is None
            if not (plain and isinstance(option, str)) or one.key_or_group in options:
                return None
            options[one.key_or_group] = option
        return self._exchange.of(options)

"""A study: its words, the base that they come to, and its arms as patches of that base."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.spec.composed import Composed, missing_keys
from pagedsim.spec.conf import Conf, Settings
from pagedsim.spec.given import Given
from pagedsim.spec.objects import flat
from pagedsim.spec.roots import OF_THE_STUDY
from pagedsim.spec.run import POOL_CONFIG, REPLICA_KEYS
from pagedsim.spec.words import Change, Words, changes_of, command_line, group_of, key_of, text_of

_PLAIN = "experiment=single"
"""An experiment that sets nothing."""
_SIZES = ("memory.blocks", "server.max_model_len", "tensor_parallel")
"""Settings that depend on the model and the GPU without belonging to their groups."""
_COMPOSED_POOL = re.compile(rf"fleet\.pools\.[^.]+\.{POOL_CONFIG}\.")
NOT_OF_A_RUN = ("experiment", *OF_THE_STUDY)
"""Keys that the command of a single run leaves out."""


@dataclass(frozen=True)
class StudySpec:
    """All that a study is: what was asked for, its configuration, and where results go."""

    words: Sequence[str | Change]
    """What was asked for, without Hydra's own."""
    config: Settings
    """All of the configuration, resolved."""
    folder: Path
    experiment: str
    composed: Composed = field(repr=False)
    patches: Mapping[str, Change] = field(default_factory=dict, repr=False)
    """The changes of a script's arms, by what stands for them in `study.arms`."""

    @classmethod
    def of(
        cls,
        words: Sequence[str | Change],
        folder: Path,
        conf: Conf | None = None,
        arms: Mapping[str, Sequence[str | Change]] | None = None,
    ) -> StudySpec:
        """What these words mean, with the arms of a script; ConfigError for what cannot be."""
        return cls.from_composed(words, Composed.of(words, conf), folder, arms)

    @classmethod
    def from_composed(
        cls,
        words: Sequence[str | Change],
        composed: Composed,
        folder: Path,
        arms: Mapping[str, Sequence[str | Change]] | None = None,
    ) -> StudySpec:
        """The study that a composed configuration describes."""
        patches: dict[str, Change] = {}
        if arms is not None:
            written = {name: list(map(str, patch)) for name, patch in arms.items()}
            words = [*words, Change("study.arms", written, "replace")]
            composed = composed.changed(words[-1:])
            every = (change for patch in arms.values() for change in changes_of(patch))
            patches = {str(change): change for change in every}
        config = composed.resolved(missing=True)
        experiment = str(composed.choices.get("experiment") or "study")
        return cls(words, config, folder, experiment, composed, patches)

    @property
    def choices(self) -> Mapping[str, str | None]:
        """The option of each group."""
        return self.composed.choices

    @property
    def conf(self) -> Conf:
        """The options that there are."""
        return self.composed.conf

    @property
    def seeds(self) -> list[int]:
        """The seeds of each arm."""
        first: int = self.config["seed"]
        return list(range(first, first + self.config["seeds"]))

    def line(self) -> str:
        """The line that gives the same results: without words that change none."""
        idle = ("tracking", "jobs", "figures")
        words = [word for word in self.words if not str(word).startswith(idle)]
        return command_line(words, self.conf.options)

    def configured(
        self, whose: str, overrides: Words, changes: Mapping[str, Any] | None = None
    ) -> Settings:
        """The configuration with more words, and with dotted keys set to these values.

        Raises ConfigError, which names `whose` they are where they are at fault.
        """
        patch = [Change(key, value, "replace") for key, value in (changes or {}).items()]
        overrides = [self.patches.get(str(word), word) for word in overrides]

        def composed(where: str, more: Words) -> Settings:
            try:
                return self.composed.changed([*overrides, *more, *patch]).resolved()
            except ConfigError as error:
                ours = str(error) != self._fault
                raise ConfigError((f"{where}: " if ours else "") + str(error)) from error

        return with_pools(composed(whose, ()), composed)

    @cached_property
    def _fault(self) -> str:
        """What is wrong with the words alone."""
        missing = next(missing_keys(self.config), "")
        return f"{missing}: must be given: {missing}=..." if missing else ""

    @property
    def notes(self) -> Iterator[str]:
        """What the experiment sets for a model, a GPU or blocks that others replace."""
        keys = {key_of(word) for word in self.words}
        if self.experiment not in self.conf.options_of("experiment"):
            return
        option = self.conf.option("experiment", self.experiment)
        before = {**self.conf.defaults, **option.choices}
        sets = {key: value for key, value in flat(option.settings).items() if key not in keys}
        sizes = {key: sets[key] for key in _SIZES if sets.get(key)}
        other = [g for g in ("model", "hardware") if g in keys and before[g] != self.choices[g]]
        typed = {change.key for change in self.composed.changes if isinstance(change.value, dict)}
        if sizes and other and not {"memory", "server"} & typed:
            instead = _listed({group: self.choices[group] for group in other})
            yield (
                f"experiment={self.experiment} sets {_listed(sizes)} for "
                f"{_listed({group: before[group] for group in other})}, and also with {instead} "
                "unless the command sets others"
            )
        if (blocks := sets.get("memory.blocks")) and before["memory"] != self.choices["memory"]:
            usual = sets.get("memory.block_size") or self._block_size(before["memory"])
            size = self.config["memory"].get("block_size")
            if size != usual and "memory.block_size" not in keys:
                yield (
                    f"experiment={self.experiment} sets memory.blocks={blocks}, with blocks of "
                    f"{usual} tokens; it is the same with memory.block_size={size} unless the "
                    "command sets others"
                )

    def _block_size(self, memory: str | None) -> Any:
        return self.conf.option("memory", memory).settings.get("block_size") if memory else None


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


# -- the pools of a fleet --------------------------------------------------------------------------


def with_pools(config: Settings, composed: Callable[[str, Words], Settings]) -> Settings:
    """The configuration, each of its pools with the one that its `set` makes.

    `composed` gives the configuration with more words; its first argument is whose they are.
    """
    fleet = config.get("fleet")
    pools = fleet.get("pools") if isinstance(fleet, Mapping) else None
    if not isinstance(pools, Mapping):
        return config
    with_own = {name: _with_own(str(name), pool, composed) for name, pool in pools.items()}
    return {**config, "fleet": {**config["fleet"], "pools": with_own}}


def _with_own(name: str, pool: Any, composed: Callable[[str, Words], Settings]) -> Any:
    if isinstance(pool, Mapping) and POOL_CONFIG in pool:
        where = f"fleet.pools.{name}"
        raise ConfigError(f"{where}.{POOL_CONFIG}: no such key; {where}.set=[...] has overrides")
    words = pool.get("set") if isinstance(pool, Mapping) else None
    if not words or not isinstance(words, Sequence) or isinstance(words, str):
        return pool  # what is wrong with it is said where the fleet is built
    where = f"fleet.pools.{name}.set"
    for word in words:
        if group_of(str(word)) not in REPLICA_KEYS:
            raise ConfigError(
                f"{where}: {word}: is not a replica's own; it may set {', '.join(REPLICA_KEYS)}"
            )
    config = composed(where, [word if isinstance(word, Change) else str(word) for word in words])
    return {**pool, POOL_CONFIG: {key: config[key] for key in REPLICA_KEYS if key in config}}


# -- typing a run again ----------------------------------------------------------------------------


def single(spec: StudySpec, changes: Words, seed: int, config: Settings) -> str:
    """The command of `experiment=single` that does the run of `config` under a seed; empty where
    there is none.

    Of the words that were typed and `changes`, those of the study are left out; what the
    experiment itself has set is added.
    """
    typed = [word for word in (*spec.words, *changes) if group_of(word) not in NOT_OF_A_RUN]
    if any(isinstance(value, Given) for value in flat(config).values()):
        return ""  # no word is an object
    words = [_PLAIN, *_chosen(spec, typed), *typed, f"seed={seed}", "seeds=1"]
    try:
        plain = _plain(spec.conf).changed(words[1:]).resolved(missing=True)
    except ConfigError:  # such as a key that only the study's own workload has
        return ""
    return command_line([*words, *_differences(flat(plain), flat(config))], spec.conf.options)


@lru_cache(maxsize=1)
def _plain(conf: Conf) -> Composed:
    """What an experiment that sets nothing comes to, of which a search asks for every probe."""
    return Composed.of([_PLAIN], conf)


def _chosen(spec: StudySpec, words: Words) -> Iterator[str]:
    """The options of groups that the experiment has chosen, and `words` do not."""
    usual = _plain(spec.conf).choices
    typed = {key_of(word) for word in words}
    for group, option in spec.choices.items():
        left_out = group in (*NOT_OF_A_RUN, *typed)
        if not left_out and option is not None and option != usual.get(group):
            yield f"{group}={option}"


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """The words that make one configuration the other, as far as a run is concerned."""
    for key in sorted(before.keys() | after.keys()):
        if key.partition(".")[0] in NOT_OF_A_RUN or before.get(key) == after.get(key):
            continue
        if _COMPOSED_POOL.match(key):
            continue  # the words have what it is composed of
        if key not in after:
            if not any(name.startswith(f"{key}.") for name in after):  # else it is filled
                yield f"~{key}"
        else:
            sign = "" if key in before else "+"
            yield f"{sign}{key}={_typed(after[key])}"


def _typed(value: Any) -> str:
    """A value as a word has it: a text in quotes, whatever is in it."""
    return text_of(value) if isinstance(value, list) else json.dumps(value, ensure_ascii=False)

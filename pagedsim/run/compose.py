"""From the words of a command line to configurations: of the study, its arms and its pools.

An experiment may set `workload.rate`, `model.max_model_len` and the like for the options that it
chooses itself. Where the command line chooses another option of such a group, these settings are
left out: a trace keeps its own rate, length and lengths unless the command line changes them. The
same holds for an option that an arm of the command line chooses.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict

from pagedsim.core import ConfigError
from pagedsim.options import Composed, Options
from pagedsim.overrides import text_of
from pagedsim.run.backend import POOL_CONFIG, REPLICA_KEYS, Settings
from pagedsim.run.job import Job
from pagedsim.run.objects import flat
from pagedsim.user_error import line

ROOT = "config"
"""The configuration of a study."""
_PLAIN = "experiment=single"
"""An experiment that sets nothing."""
_BOUND = ("workload", "model", "hardware")
"""Groups for whose options an experiment's settings are meant."""
_SIZES = {"memory.blocks": None, "server.max_model_len": None, "tensor_parallel": 1}
"""Settings that depend on the model and the GPU without belonging to their groups, and the values
that they have where no experiment sets them."""
_NO_MATTER = ("tracking", "jobs", "hydra")
"""Keys that do not change any result."""


@dataclass(frozen=True)
class Command:
    """One command line, read."""

    words: Sequence[str]
    """The overrides, without Hydra's own."""
    config: Settings
    """All of the configuration, resolved."""
    folder: Path
    """Where results go."""
    experiment: str = "study"
    composition: Composition = field(default_factory=lambda: Composition(()), repr=False)
    """That of the words."""

    @classmethod
    def of(
        cls,
        words: Sequence[str],
        folder: Path,
        options: Options | None = None,
        root: str = ROOT,
        arms: Mapping[str, Sequence[str]] | None = None,
    ) -> Command:
        """What these words mean, with the arms of a script; raises ConfigError for what cannot be
        composed."""
        if arms is not None:  # under names that can be typed
            words = [*words, f"study.arms={text_of(dict(arms))}"]
        made = Composition(words, options, root)
        plain = cast(Settings, OmegaConf.to_container(made.of(()), resolve=True))
        if arms is not None:
            plain["study"]["arms"] = dict(arms)
        return cls(words, plain, folder, str(made.choices.get("experiment") or "study"), made)

    @property
    def choices(self) -> Mapping[str, str | None]:
        return self.composition.choices

    @property
    def notes(self) -> Sequence[str]:
        return self.composition.notes

    @property
    def seeds(self) -> list[int]:
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

        return _with_pools(composed(whose, ()), composed)

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
            return self.composition.of(overrides)
        except Exception as error:
            told = line(error, [*self.words, *overrides])
            ours = told != self._fault()
            raise ConfigError((f"{whose}: " if ours else "") + told) from error

    def _fault(self) -> str:
        """What is wrong with the words alone."""
        try:
            made = self.composition.of(())
            OmegaConf.to_container(made, resolve=True, throw_on_missing=True)
        except Exception as error:
            return line(error, self.words)
        return ""


def command_line(words: Iterable[str]) -> str:
    """The line that gives these overrides."""
    return shlex.join(["python", "-m", "pagedsim", *words])


def key_of(override: str) -> str:
    """What an override sets."""
    return override.partition("=")[0].lstrip("+~")


def group_of(override: str) -> str:
    """The first part of the key that an override sets."""
    return re.split(r"[.=@]", override.lstrip("+~"))[0]


# -- composing -------------------------------------------------------------------------------------


class Composition:
    """The configurations of one command line, each with the further overrides of an arm."""

    def __init__(
        self, words: Sequence[str], options: Options | None = None, root: str = ROOT
    ) -> None:
        self._words, self._root = words, root
        self.options = options or Options()
        self._made: dict[tuple[str, ...], DictConfig] = {}

    def of(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration with these; raises ConfigError where they cannot be."""
        new = self._new(overrides)
        if new not in self._made:
            made = self._without_unmeant(new)
            if new:  # what is missing in the words alone has been said
                OmegaConf.to_container(made, resolve=True, throw_on_missing=True)
            self._made[new] = made
        return self._made[new]

    def _new(self, overrides: Sequence[str]) -> tuple[str, ...]:
        """The overrides without those that choose the option that is chosen already."""
        if any(map(self._sets_others, overrides)):
            return tuple(overrides)
        keys = [override.partition("=")[0] for override in overrides]
        return tuple(
            override
            for key, override in zip(keys, overrides, strict=True)
            if keys.count(key) > 1 or override != f"{key}={self.choices.get(key)}"
        )

    def _sets_others(self, override: str) -> bool:
        """Whether it chooses an option that sets keys of other groups, as those of `server` do."""
        group, _, option = override.partition("=")
        if not (self.options.is_group(group) and option in self.options.options_of(group)):
            return False
        file = self.options.file(f"{group}/{option}")
        return file is not None and file.package == ""

    def _composed(self, *words: str) -> DictConfig:
        return self.options.compose(self._root, words).config

    @cached_property
    def _given(self) -> Composed:
        """What the words alone come to."""
        return self.options.compose(self._root, self._words)

    @property
    def choices(self) -> Mapping[str, str | None]:
        """The option of each group that the words come to."""
        return self._given.choices

    def settings_of(self, group: str) -> Any:
        """A group as the words alone have it, with its interpolations."""
        return OmegaConf.to_container(self._given.config[group])

    @property
    def notes(self) -> list[str]:
        """What the experiment sets for other options than the chosen, a line for each group."""
        left_out = [one.note(self.choices) for one in self._unmeant.values()]
        return [*left_out, *self._of_arms(), *self._sizes(), *self._blocks()]

    @property
    def _keys(self) -> set[str]:
        """The keys that the words set, of groups those that are set as mappings."""
        keys = [(word, key_of(word)) for word in self._words]
        return {key for word, key in keys if "={" in word or not self.options.is_group(key)}

    def _blocks(self) -> Iterator[str]:
        """Blocks that the experiment counts, where the chosen memory has others."""
        if {"memory", "memory.blocks", "memory.block_size"} & self._keys:
            return
        others = [w for w in self._words if not (_sets(w, "memory") or _chooses(w, "server"))]
        if len(others) == len(self._words):
            return
        own = self.options.compose(self._root, others).config.memory
        now = self._given.config.memory
        blocks, size, usual = (
            one.get(key) for one, key in ((now, "blocks"), (now, "block_size"), (own, "block_size"))
        )
        if blocks and blocks == own.get("blocks") and size != usual:
            yield (
                f"experiment={self.choices.get('experiment')} sets memory.blocks={blocks}, with "
                f"blocks of {usual} tokens; it is the same with memory.block_size={size} unless "
                "the command sets others"
            )

    def _sizes(self) -> Iterator[str]:
        """What the experiment sets for its own model and GPU, and which stays with others."""
        sizes = {
            key: value
            for key, usual in _SIZES.items()
            if (value := OmegaConf.select(self._given.config, key)) != usual
            and key not in self._keys
        }
        if not sizes or {"memory", "server"} & self._keys:
            return
        own = {
            group: option
            for group in ("model", "hardware")
            if any(_chooses(word, group) for word in self._words)
            and (option := self._own(group)) != self.choices.get(group)
        }
        if own:
            yield (
                f"experiment={self.choices.get('experiment')} sets "
                f"{', '.join(f'{key}={value}' for key, value in sizes.items())} for "
                f"{', '.join(f'{group}={option}' for group, option in own.items())}, and also with "
                f"{', '.join(f'{group}={self.choices.get(group)}' for group in own)} unless the "
                "command sets others"
            )

    def _of_arms(self) -> Iterator[str]:
        """What is left out of the options that arms of the command line choose."""
        arms = [word for word in self._words if key_of(word).startswith("study.")]
        found = re.findall(rf"\b({'|'.join(_BOUND)})=([\w.-]+)", " ".join(arms))
        for group, option in dict.fromkeys(found):
            choice = f"{group}={option}"
            if not self._from_an_arm(choice, group):
                continue
            with suppress(ConfigError):  # an arm that cannot be composed is reported by itself
                alone = self._alone(group, [*self._words, choice])
                made = self._composed(*self._words, choice)[group]
                if OmegaConf.to_container(alone) != OmegaConf.to_container(made):
                    one = Unmeant(group, self._own(group), made, alone)
                    yield one.note({**self.choices, group: option})

    def _from_an_arm(self, change: str, group: str) -> bool:
        """Whether an arm of the command line chooses another option of a group by this override."""
        arms = (word for word in self._words if key_of(word).startswith("study."))
        if not (_chooses(change, group) and any(change in word for word in arms)):
            return False
        return change != f"{group}={self._own(group)}"

    def _without_unmeant(self, overrides: tuple[str, ...]) -> DictConfig:
        """All words composed, without what the experiment sets for other options."""
        words = [*self._words, *overrides]
        made = self._composed(*words)
        for group in _BOUND:
            if any(self._from_an_arm(change, group) for change in overrides):
                with open_dict(made):
                    made[group] = self._alone(group, words)
        for group, one in self._unmeant.items():
            if not any(_chooses(change, group) for change in overrides):
                changed = any(_sets(change, group) for change in overrides)
                with open_dict(made):
                    made[group] = self._alone(group, words) if changed else one.alone
        return made

    @cached_property
    def _unmeant(self) -> dict[str, Unmeant]:
        """By group, what the experiment sets for another option than the chosen one."""
        found: dict[str, Unmeant] = {}
        for group in _BOUND if self._root == ROOT else ():
            if any(_chooses(word, group) for word in self._words):
                alone, given = self._alone(group, self._words), self._given.config[group]
                own = self._own(group)
                same = OmegaConf.to_container(given) == OmegaConf.to_container(alone)
                if not same and own != self.choices.get(group):
                    found[group] = Unmeant(group, own, given, alone)
        return found

    def _alone(self, group: str, words: Sequence[str]) -> DictConfig:
        """A group as its option and `words` have it."""
        own = [word for word in words if _sets(word, group)]
        return self._composed(_PLAIN, *own)[group]

    def _own(self, group: str) -> str | None:
        """The option of a group that the experiment chooses."""
        others = [word for word in self._words if not _sets(word, group)]
        return self.options.compose(self._root, others).choices.get(group)


@dataclass(frozen=True)
class Unmeant:
    """What an experiment sets for its own option of a group, where another one is chosen."""

    group: str
    own: str | None
    with_it: DictConfig
    alone: DictConfig
    """The group without it."""

    def note(self, choices: Mapping[str, str | None]) -> str:
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


def _chooses(word: str, group: str) -> bool:
    return word.startswith(f"{group}=")


def _sets(word: str, group: str) -> bool:
    return word.lstrip("+~").startswith((f"{group}=", f"{group}."))


# -- the pools of a fleet --------------------------------------------------------------------------


def _with_pools(config: Settings, composed: Callable[[str, Sequence[str]], Settings]) -> Settings:
    """The configuration, each of its pools with the one that its `set` makes.

    `composed` gives the configuration with more overrides; its first argument is whose they are.
    """
    fleet = config.get("fleet")
    pools = fleet.get("pools") if isinstance(fleet, Mapping) else None
    if not isinstance(pools, Mapping):
        return config
    made = {name: _with_own(str(name), pool, composed) for name, pool in pools.items()}
    return {**config, "fleet": {**config["fleet"], "pools": made}}


def _with_own(name: str, pool: Any, composed: Callable[[str, Sequence[str]], Settings]) -> Any:
    words = pool.get("set") if isinstance(pool, Mapping) else None
    if not words or not isinstance(words, Sequence) or isinstance(words, str):
        return pool  # what is wrong with it is said where the fleet is made
    where = f"fleet.pools.{name}.set"
    for word in map(str, words):
        group = word.lstrip("+~").partition("=")[0].partition(".")[0]
        if group not in REPLICA_KEYS:
            raise ConfigError(
                f"{where}: {word}: is not a replica's own; it may set {', '.join(REPLICA_KEYS)}"
            )
    own = composed(where, list(map(str, words)))
    return {**pool, POOL_CONFIG: {key: own[key] for key in REPLICA_KEYS if key in own}}


# -- typing a job again ----------------------------------------------------------------------------


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
    options = command.composition.options
    try:
        plain = OmegaConf.to_container(options.compose(ROOT, words).config, resolve=True)
    except Exception:  # such as a key that only the study's own workload has
        return ""
    return command_line([*words, *_changes(flat(plain), flat(job.config))])


def _chosen(command: Command, words: Sequence[str]) -> Iterator[str]:
    """The options of groups that the experiment has chosen, and `words` do not."""
    usual = command.composition.options.compose(ROOT, [_PLAIN]).choices
    typed = {key_of(word) for word in words}
    for group, option in command.choices.items():
        own = group in (*_OWN, *typed)
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

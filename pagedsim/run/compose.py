"""From the words of a command line to configurations: of the study, its arms and its pools.

Hydra composes the command line once. The overrides of an arm are put into a copy of that: values of
keys, and options of groups which nothing but the option's file contributes to. Whatever is more
than that is composed by Hydra again, which also words every error.

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
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from pagedsim.core import ConfigError
from pagedsim.run.backend import POOL_CONFIG, REPLICA_KEYS, Settings
from pagedsim.run.job import Job
from pagedsim.run.objects import flat
from pagedsim.user_error import line

_ROOT = "config"
_PLAIN = "experiment=single"
"""An experiment that sets nothing."""
_BOUND = ("workload", "model", "hardware")
"""Groups for whose options an experiment's settings are meant."""
_SIZES = {"memory.blocks": None, "server.max_model_len": None, "tensor_parallel": 1}
"""Settings that depend on the model and the GPU without belonging to their groups, and the values
that they have where no experiment sets them."""
_OURS = {"pkg://hydra.conf", "pkg://conf", "structured://"}
"""The sources of configurations, unless the command line names another folder."""

_NO_MATTER = ("tracking", "jobs", "hydra")
"""Keys that do not change any result."""


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


# -- composing -------------------------------------------------------------------------------------


class Composition:
    """The configurations of one command line, each with the further overrides of an arm."""

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

    def of(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration with these; raises whatever Hydra does where they cannot be."""
        new = self._new(overrides)
        if new not in self._made:
            made = self._changed(new) if new else None
            if made is None:
                made = self._composed(new)
            if new:  # what is missing in the words alone has been said
                OmegaConf.to_container(made, resolve=True, throw_on_missing=True)
            self._made[new] = made
        return self._made[new]

    @property
    def notes(self) -> list[str]:
        """What the experiment sets for other options than the chosen, a line for each group."""
        left_out = [one.note(self._choices) for one in self._unmeant.values()]
        return [*left_out, *self._of_arms(), *self._sizes()]

    def _sizes(self) -> Iterator[str]:
        """What the experiment sets for its own model and GPU, and which stays with others."""
        given, changed = self._composed_of_words, {key_of(word) for word in self._words}
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
        arms = [word for word in self._words if key_of(word).startswith("study.")]
        found = re.findall(rf"\b({'|'.join(_BOUND)})=([\w.-]+)", " ".join(arms))
        for group, option in dict.fromkeys(found):
            choice = f"{group}={option}"
            if not self._from_an_arm(choice, group):
                continue
            with suppress(HydraException):  # an arm that cannot be composed is reported by itself
                alone = self._alone(group, [*self._words, choice])
                made = compose(_ROOT, overrides=[*self._words, choice])[group]
                if OmegaConf.to_container(alone) != OmegaConf.to_container(made):
                    one = Unmeant(group, self._own(group), made, alone)
                    yield one.note({**self._choices, group: option})

    def _from_an_arm(self, change: str, group: str) -> bool:
        """Whether an arm of the command line chooses another option of a group by this override."""
        arms = (word for word in self._words if key_of(word).startswith("study."))
        if not (_chooses(change, group) and any(change in word for word in arms)):
            return False
        return change != f"{group}={self._own(group)}"

    def _new(self, overrides: Sequence[str]) -> tuple[str, ...]:
        """The overrides without those that choose the option that is chosen already."""
        keys = [override.partition("=")[0] for override in overrides]
        pairs = zip(keys, overrides, strict=True)
        return tuple(
            override
            for key, override in pairs
            if keys.count(key) > 1 or override != f"{key}={self._choices.get(key)}"
        )

    # -- by Hydra ----------------------------------------------------------------------------------

    @cached_property
    def _composed_of_words(self) -> DictConfig:
        return compose(_ROOT, overrides=[*self._words]) if self._given is None else self._given

    def _composed(self, overrides: tuple[str, ...]) -> DictConfig:
        """What Hydra makes of all words, without what the experiment sets for other options."""
        made = self._composed_of_words
        if overrides:
            made = compose(_ROOT, overrides=[*self._words, *overrides])
        elif self._unmeant:
            made = made.copy()
        for group in _BOUND:
            if any(self._from_an_arm(change, group) for change in overrides):
                with open_dict(made):
                    made[group] = self._alone(group, [*self._words, *overrides])
        for group, one in self._unmeant.items():
            if any(_chooses(change, group) for change in overrides):
                continue
            changed = any(_sets(change, group) for change in overrides)
            with open_dict(made):
                made[group] = (
                    self._alone(group, [*self._words, *overrides]) if changed else one.alone
                )
        return made

    @cached_property
    def _unmeant(self) -> dict[str, Unmeant]:
        """By group, what the experiment sets for another option than the chosen one."""
        given = self._composed_of_words
        found: dict[str, Unmeant] = {}
        for group in _BOUND:
            if any(_chooses(word, group) for word in self._words):
                alone, chosen = self._alone(group, self._words), self._choices.get(group)
                same = OmegaConf.to_container(given[group]) == OmegaConf.to_container(alone)
                own = chosen if same else self._own(group)
                if own != chosen:
                    found[group] = Unmeant(group, own, given[group], alone)
        return found

    def _alone(self, group: str, words: Sequence[str]) -> DictConfig:
        """A group as its option and `words` have it."""
        own = [word for word in words if _sets(word, group)]
        by_file = self._ours and len(own) == 1 and _chooses(own[0], group)
        settings = load_option(group, own[0].partition("=")[2]) if by_file else None
        if settings is not None:
            return OmegaConf.create(settings)
        alone: DictConfig = compose(_ROOT, overrides=[_PLAIN, *own])[group]
        return alone

    def _own(self, group: str) -> str | None:
        """The option of a group that the experiment chooses."""
        if group not in self._owned:
            others = [word for word in self._words if not _sets(word, group)]
            made = compose(_ROOT, overrides=others, return_hydra_config=True)
            self._owned[group] = made.hydra.runtime.choices.get(group)
        return self._owned[group]

    # -- without it --------------------------------------------------------------------------------

    def _changed(self, overrides: tuple[str, ...]) -> DictConfig | None:
        """A copy of what was composed, with these; None where only Hydra can tell what it is."""
        if any(self._from_an_arm(one, group) for one in overrides for group in _BOUND):
            return None
        parser = OverridesParser.create()
        try:
            parsed = [parser.parse_override(override) for override in overrides]
            values = [one for one in parsed if self._is_value(one)]
            if not values:
                return self._exchanged(parsed)
            pairs = zip(overrides, parsed, strict=True)
            made = self.of([override for override, one in pairs if one not in values]).copy()
            for one in values:
                OmegaConf.update(made, one.key_or_group, one.value(), merge=True)
        except Exception:  # what is wrong is said by Hydra, which sees all of it at once
            return None
        return made

    def _is_value(self, one: Override) -> bool:
        """Whether an override changes a key, rather than a group or what keys there are."""
        special = one.package or one.is_sweep_override() or one.is_hydra_override()
        change = one.type is OverrideType.CHANGE
        return change and one.key_or_group not in self._choices and not special

    def _exchanged(self, options: Sequence[Override]) -> DictConfig | None:
        """The same with other options of some groups."""
        made = self.of(()).copy()
        for one in options:
            group, option = one.key_or_group, one.value()
            plain = one.type is OverrideType.CHANGE and one.package is None
            once = sum(other.key_or_group == group for other in options) == 1
            if not (plain and once and isinstance(option, str) and self._only_its_file(group)):
                return None
            if (settings := load_option(group, option)) is None:
                return None
            made[group] = settings
        return made

    def _only_its_file(self, group: str) -> bool:
        """Whether nothing but the file of its option contributes to a group."""
        option = self._choices[group]
        if option is None or self._contributors is None or group in self._contributors:
            return False
        return load_option(group, option) == OmegaConf.to_container(self.of(())[group])

    @cached_property
    def _ours(self) -> bool:
        """Whether all that can be composed lies in conf/."""
        sources = GlobalHydra.instance().config_loader().get_sources()
        return {source.full_path() for source in sources} <= _OURS

    @cached_property
    def _contributors(self) -> set[str] | None:
        """Groups to which words, the root or options of other groups contribute; None: unknown,
        since not all of it lies in conf/, or something has a package of its own."""
        words = OverridesParser.create().parse_overrides([*self._words])
        if not self._ours or any(word.package is not None for word in words):
            return None
        sources = GlobalHydra.instance().config_loader().get_sources()
        keys = [word.key_or_group for word in words]
        found = {key.partition(".")[0] for key in keys if key not in self._choices}
        for group, option in ((_ROOT, ""), *self._choices.items()):
            if option is None or group.startswith("hydra/"):
                continue
            name = f"{group}/{option}" if option else group
            file = _file(name)
            if file is None and not any(source.is_config(name) for source in sources):
                continue  # an optional one, that is left out
            if file is None or file.package not in ("", "_global_"):
                return None
            if name == _ROOT or file.package:
                found |= file.settings.keys()
            found |= file.named
        return found


def load_option(group: str, option: str) -> Settings | None:
    """What an option of a group is by its file, and by others of the group that this is based on;
    None where its defaults are more than that, or the file is not in conf/."""
    file = _file(f"{group}/{option}")
    if file is None or file.package:
        return None
    own = {key: value for key, value in file.settings.items() if key != "defaults"}
    made: Any = OmegaConf.create()
    for entry in file.settings.get("defaults", ["_self_"]):
        part = own if entry == "_self_" else None
        if part is None and isinstance(entry, str) and re.fullmatch(r"\w[\w.-]*", entry):
            part = load_option(group, entry)
        if part is None:
            return None
        made = OmegaConf.merge(made, part)
    return cast(Settings, OmegaConf.to_container(made))


class _File:
    """A file of an option, or the root."""

    def __init__(self, text: str) -> None:
        self._text = text
        package = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
        self.package = package[1] if package else ""

    @cached_property
    def settings(self) -> Settings:
        """All that it says."""
        return cast(Settings, OmegaConf.to_container(OmegaConf.create(self._text))) or {}

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


def _chooses(word: str, group: str) -> bool:
    return word.startswith(f"{group}=")


def _sets(word: str, group: str) -> bool:
    return word.lstrip("+~").startswith((f"{group}=", f"{group}.", f"{group}@"))


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

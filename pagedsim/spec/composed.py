"""A configuration, and what changes make of it.

Hydra composes the base. After that a change of a key sets it; the choice of an option puts its file
in the place of another, below what the experiment, the options of `server` and `scale`, and the
words typed so far set: the arm `memory=prefix` of a study with `memory.blocks=64` has 64 blocks of
a prefix cache. An option whose settings are everywhere (`# @package _global_`), as those of
`server` and `scale` are, is a patch of the whole: the options that it overrides are chosen unless
words choose others, and its settings go below what words set.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pagedsim.build import BESIDE, settings_of
from pagedsim.core import ConfigError
from pagedsim.spec.check import checked
from pagedsim.spec.conf import (
    BUILT_IN,
    MISSING,
    WITHOUT_KEY,
    Choices,
    Conf,
    Settings,
    copied,
    merge,
    no_key,
    select,
)
from pagedsim.spec.roots import Config, Serve, register_resolvers
from pagedsim.spec.words import Change, Words, changes_of, text_of

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_EVERYWHERE = (*WITHOUT_KEY, "server")
"""Groups whose options set keys of others."""
_OURS = re.compile(r"\$\{(by_gpu|stand_in):")
_OF_RESOLVERS = ("hardware", "model")
"""Groups that the resolvers of `spec.roots`, which `_OURS` finds, read."""

register_resolvers()


@dataclass(frozen=True)
class Composed:
    """A configuration before its interpolations are resolved, and how it came about."""

    conf: Conf
    tree: Settings
    choices: Choices
    changes: Sequence[Change] = ()
    """What words have changed so far."""

    @classmethod
    def of(cls, words: Words, conf: Conf | None = None) -> Composed:
        """What the root of `conf` becomes with these words; ConfigError for what cannot be."""
        conf = conf or Conf()
        changes = changes_of(words, conf.root != "serve")
        chosen = [change for change in changes if _is_choice(conf, change)]
        for change in chosen:
            name = _option_of(conf, change)
            _refuse_misplaced(conf, change)
            # Read before Hydra does, so that an error names the file.
            if name and not conf.option(change.key, name).everywhere and change.key in _EVERYWHERE:
                raise ConfigError(
                    f"{change}: the first line of its file must be # @package _global_, since it "
                    "sets keys of other groups"
                )
        picks = {change.key: change for change in chosen}
        null = [
            key for key, change in picks.items() if change.value is None and _may_be_null(change)
        ]
        typed = [f"~{key}" if key in null else str(change) for key, change in picks.items()]
        tree, choices = conf.compose(typed)
        choices = {**choices, **dict.fromkeys(null)}
        _apply(tree, [change for change in changes if change not in chosen], changes)
        return cls(conf, tree, choices, changes)

    @classmethod
    def from_hydra(
        cls, config: DictConfig, choices: Mapping[Any, str | None], words: Words, conf: Conf
    ) -> Composed:
        """What Hydra has composed of words, as a job of its own."""
        tree, chosen = conf.split(config, choices)
        changes = changes_of(words)
        _drop_replaced(tree, changes, changes)
        return cls(conf, tree, chosen, changes)

    def changed(self, words: Words) -> Composed:
        """What further words make of it."""
        new = changes_of(words, sweeps=False)
        changes = [*self.changes, *new]
        choices = self.choices_after(new)
        if self.conf.root not in BUILT_IN and choices != self.choices:
            return Composed.of(changes, self.conf)  # in the order of a user's list of defaults
        tree = copied(self.tree) if choices == self.choices else assembled(self.conf, choices)
        known = new if choices == self.choices else changes
        _apply(tree, [change for change in known if not _is_choice(self.conf, change)], changes)
        return Composed(self.conf, tree, choices, changes)

    def choices_after(self, new: Sequence[Change]) -> Choices:
        """The options with those that further words choose."""
        choices = dict(self.choices)
        picks = {c.key: _option_of(self.conf, c) for c in new if _is_choice(self.conf, c)}
        typed = {change.key for change in self.changes if _is_choice(self.conf, change)}
        if "experiment" in picks and picks["experiment"] != choices.get("experiment"):
            raise ConfigError(f"experiment={picks['experiment']}: all arms are of one experiment")
        for change in new:
            if change.key in picks:
                _refuse_misplaced(self.conf, change)
                chosen = choices.get(change.key)
                if change.kind == "delete" and change.value not in (None, chosen):
                    raise ConfigError(f"{change}: cannot be taken away: it is {chosen}")
        for group, name in picks.items():
            choices |= self._undone_by(group, {*typed, *picks})
            option = self.conf.option(group, name) if name else None
            for other, its in option.choices.items() if option and option.everywhere else ():
                if other not in typed and other not in picks:
                    choices[other] = its
            choices[group] = name
        if "backend" in picks and "scale" in choices and "scale" not in {*typed, *picks}:
            known = self.conf.options_of("scale")  # goes by the backend, as config.yaml says
            choices["scale"] = picks["backend"] if picks["backend"] in known else None
        return choices

    def _undone_by(self, group: str, chosen: Collection[str]) -> Choices:
        """The options that a patch of the whole, which is replaced, had chosen in the place of the
        experiment's."""
        if group == "experiment" or not (name := self.choices.get(group)):
            return {}
        experiment = self.choices.get("experiment")
        usual = {
            **self.conf.defaults,
            **(self.conf.option("experiment", experiment).choices if experiment else {}),
        }
        its = self.conf.option(group, name).choices
        return {other: usual.get(other) for other in its if other not in chosen}

    def resolved(self, missing: bool = False) -> Settings:
        """All of it in plain values, checked; ConfigError names a key without a value, unless those
        may be `missing` still."""
        try:
            plain = _resolved(self.tree)
        except OmegaConfBaseException as error:
            raise ConfigError(self._unresolved(error)) from error
        if not missing:
            for key in missing_keys(plain):
                raise ConfigError(f"{key}: must be given: {key}=...")
        return checked(Serve if self.conf.root == "serve" else Config, plain)

    def _unresolved(self, error: OmegaConfBaseException) -> str:
        """The key whose value names others by ${...}, the value, and which of them is not there."""
        texts = [text for value in self.tree.values() for text in _interpolations(value)]
        for text in texts:
            for name in _REFERENCE.findall(text):
                if select(self.tree, name, absent=self) is self:
                    return f"{error.full_key}={text}: {no_key(name, self.tree)}"
        cause = error.__cause__ or error.__context__ or error
        reason = str(cause.args[0] if cause.args else cause).partition("\n")[0]
        reason = reason.partition(" raised while resolving interpolation: ")[2] or reason
        return f"{error.full_key}={select(self.tree, str(error.full_key), texts[-1])}: {reason}"


def missing_keys(settings: Any, above: str = "") -> Iterator[str]:
    """The dotted keys that have no value yet."""
    if isinstance(settings, Mapping):
        for key in sorted(settings, key=str):
            yield from missing_keys(settings[key], f"{above}.{key}" if above else key)
    elif isinstance(settings, str) and settings == MISSING:
        yield above


def _resolved(tree: Settings) -> Settings:
    """A configuration with its interpolations resolved.

    OmegaConf gets the groups that have any or are named by them; a study may be much larger.
    """
    texts = {key: [*_interpolations(value)] for key, value in tree.items()}
    every = [text for values in texts.values() for text in values]
    named = {name.partition(".")[0] for text in every for name in _REFERENCE.findall(text)}
    if any("${" in _REFERENCE.sub("", _OURS.sub("", text)) for text in every):
        named = {*tree}  # a resolver of OmegaConf's may read any of them
    involved = {key: tree[key] for key in tree if texts[key] or key in (*named, *_OF_RESOLVERS)}
    config = OmegaConf.create(involved, flags={"allow_objects": True})
    plain = cast(Settings, OmegaConf.to_container(config, resolve=True))
    return {key: plain[key] if key in plain else copied(tree[key]) for key in tree}


def _interpolations(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _interpolations(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _interpolations(inner)
    elif isinstance(value, str) and "${" in value:
        yield value


# -- options ---------------------------------------------------------------------------------------


def _is_choice(conf: Conf, change: Change) -> bool:
    """Whether it chooses an option; a mapping changes settings of a group."""
    return conf.is_group(change.key) and not isinstance(change.value, Mapping)


def _may_be_null(change: Change) -> bool:
    """Whether it leaves a group without an option, as config.yaml does."""
    return change.kind == "change" and change.key in ("server", "scale")


def _option_of(conf: Conf, change: Change) -> str | None:
    """The option that a change chooses; ConfigError where there is none of that name."""
    if change.kind == "delete":
        if change.key == "backend":  # by which config.yaml chooses scale
            known = ", ".join(conf.options_of(change.key))
            raise ConfigError(f"{change}: cannot be taken away; choose from {known}")
        return None
    if change.kind == "force":
        word = str(change).lstrip("+")
        raise ConfigError(f"++{word}: ++ is for settings; {word} chooses the option")
    if change.value is None:
        if _may_be_null(change):
            return None
        known = ", ".join(conf.options_of(change.key))
        raise ConfigError(f"{change}: unknown; choose from {known}")
    if not isinstance(change.value, str):
        raise ConfigError(f"{change}: must be the name of an option, or a mapping of settings")
    conf.refuse_unknown(change.key, change.value)
    return change.value


def _refuse_misplaced(conf: Conf, change: Change) -> None:
    """Raise ConfigError for a group that the root has and is added, or lacks and is not."""
    if change.kind == "add" and change.key in conf.defaults:
        raise ConfigError(f"{change}: is chosen already; {change.key}=... changes it")
    if change.kind == "change" and change.key not in conf.defaults:
        raise ConfigError(f"{change}: no such group here; +{change.key}=... adds it")


def assembled(conf: Conf, choices: Choices) -> Settings:
    """The settings of the root and of all options, each over those before it."""
    tree = conf.root_settings()
    for group in dict.fromkeys([*conf.defaults, *choices]):
        if (name := choices.get(group)) is not None:
            merge(tree, conf.option(group, name).of_group(group))
    return tree


# -- keys ------------------------------------------------------------------------------------------


def _apply(tree: Settings, changes: Sequence[Change], every: Sequence[Change]) -> None:
    """Make changes; `every` are these and those that were made before."""
    for change in changes:
        _set(tree, change)
    _drop_replaced(tree, changes, every)


def _set(tree: Settings, change: Change) -> None:
    """Change a key of a configuration; ConfigError where it is not there, or there already."""
    *above, name = change.key.split(".")
    node: Any = tree
    adds = change.kind in ("add", "force", "replace")
    for part in above:
        inner = _child(node, part, tree)
        if isinstance(node, dict) and isinstance(node.get(part), str) and inner is not node[part]:
            inner = node[part] = copied(inner)  # what it named stays as it is
        if not isinstance(inner, (dict, list)):
            if not adds or not isinstance(node, dict):
                raise no_key(change.key, tree)
            inner = node[part] = {}
        node = inner
    place: Any = int(name) if isinstance(node, list) and name.isdigit() else name
    present = place in (node if isinstance(node, dict) else range(len(node)))
    if not present and (isinstance(node, list) or not (adds and above)):  # nor has a root
        raise no_key(change.key, tree)
    before = node[place] if present else None
    if change.kind == "delete":
        _delete(node, place, before, change)
    elif change.kind == "add" and before is not None and not isinstance(change.value, dict | list):
        raise ConfigError(f"{change}: is there already; {change.key}=... changes it")
    elif (
        change.kind != "replace"
        and before
        and isinstance(before, dict)
        and isinstance(change.value, Mapping)
    ):
        if not adds:
            _refuse_new(change.key, before, change.value, tree)
        merge(before, copied(change.value))
    elif isinstance(node, dict | list):
        node[place] = copied(change.value)
    else:
        raise no_key(change.key, tree)


def _delete(node: Any, place: Any, before: Any, change: Change) -> None:
    if before is None:
        raise ConfigError(f"{change}: cannot be taken away: it is not there, or null already")
    if change.value not in (None, before):
        raise ConfigError(f"{change}: cannot be taken away: it is {text_of(before)}")
    del node[place]


def _refuse_new(where: str, before: Mapping[str, Any], value: Mapping[str, Any], tree: Any) -> None:
    """Raise ConfigError for a key of a mapping that the mapping there does not have."""
    for key, inner in value.items():
        if key not in before:
            raise no_key(f"{where}.{key}", tree)
        if isinstance(inner, Mapping) and isinstance(before[key], dict) and before[key]:
            _refuse_new(f"{where}.{key}", before[key], inner, tree)


def _child(node: Any, part: str, tree: Settings) -> Any:
    """What a mapping or list holds under a name; where that is ${...} alone, what it names."""
    inner = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        inner = node[int(part)]
    if isinstance(inner, str) and (name := _REFERENCE.fullmatch(inner)):
        return select(tree, name[1])
    return inner


def _drop_replaced(tree: Settings, changes: Sequence[Change], every: Sequence[Change]) -> None:
    """Take out the settings of an option whose class one of `changes` replaces.

    Settings that the new class takes stay, and those that `every` change so far has set.
    """
    keys = {change.key for change in every}
    for change in changes:
        group, _, key = change.key.rpartition(".")
        if key != "_target_" or "." in group or change.kind == "delete":
            continue
        taken = settings_of(str(change.value))
        if taken is None or not isinstance(settings := tree.get(group), dict):
            continue
        kept = {"_target_", *taken, *BESIDE.get(group, ())}
        for name in [*settings]:
            where = f"{group}.{name}"
            if name not in kept and not any(f"{k}.".startswith(f"{where}.") for k in keys):
                del settings[name]

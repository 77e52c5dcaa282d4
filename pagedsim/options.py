"""Configurations composed of the files in `conf/`, as Hydra composes them.

A run and the arms of a study are composed here, in a small part of Hydra's time; Hydra composes for
sweeps and for options of its own. A test composes every option both ways. What the files in `conf/`
do not use is not supported: packages of single options, and lists of options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from pagedsim.build import BESIDE, plugins, settings_of
from pagedsim.config import Config, Qoe, Serve, Server, Slo, prepare
from pagedsim.core import ConfigError
from pagedsim.core.errors import choices as to_choose
from pagedsim.overrides import Override, parse

Settings = dict[str, Any]
_SCHEMAS: Mapping[str, type] = {"schema": Config, "serve_schema": Serve}
_KINDS = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
_OFFERED = ("policy", "batching", "memory", "router", "cost")
"""Groups of which plugins offer options."""
_RENAMED = {"policy=longest_prefix": "lpm"}
"""Former names of options, and those of today."""
_HEADER = re.compile(r"(?:\s*#.*\n)*?\s*#\s*@package\s+(\S+)")


@dataclass(frozen=True)
class Composed:
    """A configuration, and the option of each group that was chosen."""

    config: DictConfig
    choices: Mapping[str, str | None]


@dataclass(frozen=True)
class _File:
    """The file of an option, or of a root."""

    package: str | None
    """Where its settings go; None: to its group."""
    defaults: Sequence[Any]
    settings: Settings


@cache
def _read(file: Any) -> _File | None:
    if not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8")
        settings = OmegaConf.to_container(OmegaConf.create(text)) or {}
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: must be a mapping of settings")
    header = _HEADER.match(text)
    package = header[1] if header else None
    defaults = settings.pop("defaults", [])
    if not isinstance(defaults, list) or not all(isinstance(one, str | dict) for one in defaults):
        raise ConfigError(f"{file}: defaults: must be a list of options")
    if not any(entry == "_self_" for entry in defaults):
        defaults = [*defaults, "_self_"]
    whole = cast(Settings, settings)
    return _File("" if package == "_global_" else package, defaults, whole)


def offered() -> Mapping[str, Mapping[str, Settings]]:
    """The options that plugins offer, by group and name: the class and other settings."""
    paged = _read(cast(Any, files("pagedsim.conf").joinpath("memory", "paged.yaml")))
    assert paged is not None
    server = {key: value for key, value in paged.settings.items() if key in BESIDE["memory"]}
    more: Mapping[str, Settings] = {"policy": {"victim": None}, "memory": server}
    return {
        group: {n: {**more.get(group, {}), "_target_": path} for n, path in plugins(group).items()}
        for group in _OFFERED
    }


class Options:
    """The options of each group: the files of folders, and what plugins offer."""

    def __init__(self, folders: Sequence[Traversable] = ()) -> None:
        """`folders` are searched in this order; default: `conf/` alone."""
        prepare()
        self.folders = folders or [files("pagedsim.conf")]
        self.offered = offered()
        self._bases: dict[tuple[str, ...], Composed] = {}

    def compose(self, root: str, words: Sequence[str]) -> Composed:
        """What a root becomes with these overrides; raises ConfigError for what cannot be."""
        overrides = [parse(word) for word in words]
        # A mapping changes settings of a group, as with Hydra; all else chooses its option.
        chosen = [
            one for one in overrides if self.is_group(one.key) and not isinstance(one.value, dict)
        ]
        for one in chosen:
            if one.kind == "force":
                raise ConfigError(no_forced_option(one.word))
        base = self._base(root, {one.key: one for one in chosen})
        config = base.config.copy()
        for one in overrides:
            if one in chosen:
                continue
            try:
                _apply(config, one)
            except (ConfigAttributeError, ConfigKeyError) as error:
                there = OmegaConf.to_container(config)
                raise ConfigError(no_key(error.full_key or one.key, there)) from error
            except OmegaConfBaseException as error:
                raise ConfigError(f"{one.word}: {reason(error)}") from error
        drop_replaced(config, overrides)
        return Composed(config, base.choices)

    def is_group(self, key: str) -> bool:
        """Whether a key is a group, and not a setting."""
        return any(
            folder.joinpath(key).is_dir() for folder in self.folders if key and "." not in key
        )

    def groups(self) -> list[str]:
        """The names of all groups that have options."""
        names = {one.name for folder in self.folders for one in folder.iterdir() if one.is_dir()}
        return [name for name in sorted(names) if self.options_of(name)]

    def options_of(self, group: str) -> list[str]:
        """The names of a group's options."""
        found = {
            file.name.removesuffix(".yaml")
            for folder in self.folders
            if (place := folder.joinpath(group)).is_dir()
            for file in place.iterdir()
            if file.name.endswith(".yaml")
        }
        return sorted(found | self.offered.get(group, {}).keys())

    def file(self, name: str) -> _File | None:
        """The file of `group/option`, or of a root; None where there is none."""
        for folder in self.folders:
            if file := _read(cast(Any, folder.joinpath(f"{name}.yaml"))):
                return file
        group, _, option = name.rpartition("/")
        if option in self.offered.get(group, {}):
            return _File(None, ["_self_"], self.offered[group][option])
        return None

    def _base(self, root: str, chosen: Mapping[str, Override]) -> Composed:
        """The root with options chosen and nothing else changed."""
        key = root, *(one.word for one in chosen.values())
        if key not in self._bases:
            self._bases[key] = _Tree(self, root, chosen).composed()
        return self._bases[key]


def drop_replaced(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Take out of a configuration the settings of options whose class an override replaces.

    Settings that the new class takes stay, and those that overrides change.
    """
    changed = {one.key for one in overrides}
    for one in overrides:
        group, _, key = one.key.rpartition(".")
        taken = settings_of(str(one.value)) if key == "_target_" and "." not in group else None
        if taken is None or one.kind == "delete":
            continue
        kept = {"_target_", *taken, *BESIDE.get(group, ())}
        with open_dict(config):
            for name in [str(name) for name in config[group]]:
                where = f"{group}.{name}"
                if name not in kept and not any(f"{c}.".startswith(f"{where}.") for c in changed):
                    del config[group][name]


def no_forced_option(word: str) -> str:
    """Why `++group=option` is refused."""
    return f"{word}: ++ is for settings; {word.removeprefix('++')} chooses the option"


def _option(one: Override, there: Callable[[str], Sequence[str]]) -> str | None:
    if one.kind == "delete":
        return None
    if one.value is None:
        raise ConfigError(f"{one.word}: unknown; choose from {', '.join(there(one.key))}")
    if not isinstance(one.value, str):
        raise ConfigError(f"{one.word}: must be the name of an option, or a mapping of settings")
    return one.value


class _Tree:
    """The defaults lists below a root, resolved.

    They are walked from the last entry to the first, so that what an experiment overrides is known
    before the groups that stand before it.
    """

    def __init__(self, options: Options, root: str, chosen: Mapping[str, Override]) -> None:
        self.options, self.root = options, root
        self.asked = {group: _option(one, options.options_of) for group, one in chosen.items()}
        self.choices: dict[str, str | None] = {}
        self.added = [group for group, one in chosen.items() if one.kind == "add"]
        self.unmet = {group: one for group, one in chosen.items() if one.kind != "add"}
        self.overridden: dict[str, str] = {}
        """Groups that files override and that have not been met yet, and where that stands."""

    def composed(self) -> Composed:
        """What they come to."""
        merged: Settings = {}
        schema: Any = {}
        for package, part in self._below(self.root, "", ""):
            if isinstance(part, type):
                schema = OmegaConf.structured(part)
            else:
                _merge(merged, _nested(package, part))
        for group, one in self.unmet.items():
            if not group.startswith("hydra/"):
                raise ConfigError(f"{one.word}: no such group here; +{group}=... adds it")
        for group, where in self.overridden.items():
            if not group.startswith("hydra/"):
                raise ConfigError(f"{where}: no such group here; {to_choose(group, self.choices)}")
        merged.pop("hydra", None)
        try:
            config = cast(DictConfig, OmegaConf.merge(schema, merged))
        except (ConfigAttributeError, ConfigKeyError) as error:
            there = OmegaConf.to_container(OmegaConf.create(schema))
            raise ConfigError(no_key(str(error.full_key), there)) from error
        OmegaConf.set_struct(config, True)
        return Composed(config, self.choices)

    def _below(self, name: str, group: str, package: str) -> list[tuple[str, Any]]:
        """The settings of a file and of what its defaults name, in the order of merging."""
        if not group and name in _SCHEMAS:
            return [("", _SCHEMAS[name])]
        file = self.options.file(name)
        if file is None:
            option, there = name.removeprefix(f"{group}/"), self.options.options_of(group)
            if new := _RENAMED.get(f"{group}={option}"):
                raise ConfigError(f"{group}={option}: this option is now called {new!r}")
            known = not_there(group, option, there) if there else f"{group} has no options"
            raise ConfigError(f"{group}={option}: unknown; {known}")
        package = package if file.package is None else file.package
        entries = list(file.defaults)
        if name == self.root:
            entries += [{one: self.asked[one]} for one in self.added]
        for entry in entries:
            for key, chosen in _pairs(entry):
                own = _absolute(key.partition(" ")[2], group)
                if key.startswith("override ") and own not in self.asked:
                    self.asked[own] = chosen
                    self.overridden[own] = f"{name}.yaml: defaults: {key}: {chosen}"
        late = [entry for entry in entries if self._is_late(entry, group)]
        parts: dict[int, list[tuple[str, Any]]] = {}
        order = [at for at in reversed(range(len(entries))) if entries[at] not in late]
        order += [at for at in range(len(entries)) if entries[at] in late]
        for at in order:
            if entries[at] == "_self_":
                parts[at] = [(package, file.settings)]
            elif isinstance(entries[at], str):
                parts[at] = self._of_option(entries[at], group, package)
            else:
                parts[at] = self._of_group(entries[at], group, package)
        return [part for at in range(len(entries)) for part in parts[at]]

    def _is_late(self, entry: Any, group: str) -> bool:
        """Whether an option goes by those of other groups."""
        named = ((_absolute(key.rpartition(" ")[2], group), name) for key, name in _pairs(entry))
        return any("${" in str(self.asked.get(own, name)) for own, name in named)

    def _of_option(self, entry: str, group: str, package: str) -> list[tuple[str, Any]]:
        """An option by its path: from the root, or beside the file that names it."""
        if "@" in entry:
            raise ConfigError(f"defaults: {entry}: packages are not supported")
        folder = entry.lstrip("/").rpartition("/")[0]
        other = _absolute(entry, group)
        if entry.startswith("/"):
            package = folder.replace("/", ".")
        elif folder:
            package = ".".join(filter(None, (package, folder.replace("/", "."))))
        return self._below(other, other.rpartition("/")[0], package)

    def _of_group(self, entry: Any, group: str, package: str) -> list[tuple[str, Any]]:
        [(key, option)] = _pairs(entry)
        if key.startswith("override "):
            return []
        optional, key = key.startswith("optional "), key.rpartition(" ")[2]
        own = _absolute(key, group)
        if own.startswith("hydra/"):
            return []
        self.unmet.pop(own, None)
        self.overridden.pop(own, None)
        if own in self.added and entry != {own: self.asked[own]}:
            raise ConfigError(f"+{own}={self.asked[own]}: is chosen already; {own}=... changes it")
        name = self.asked.get(own, option)
        if isinstance(name, str) and "${" in name:
            try:
                name = OmegaConf.create({**self.choices, "_": name})["_"]
            except OmegaConfBaseException as error:
                there = ", ".join(f"${{{one}}}" for one in sorted(self.choices))
                raise ConfigError(f"{own}={name}: unknown; choose from {there}") from error
        if name is not None or own not in self.asked:  # else it is taken away
            self.choices[own] = name
        if name is None or (optional and self.options.file(f"{own}/{name}") is None):
            return []
        below = own.replace("/", ".")
        if package and key.startswith("/"):
            below = f"{package}.{below}"
        return self._below(f"{own}/{name}", own, below)


def _pairs(entry: Any) -> Iterator[tuple[str, str | None]]:
    """The group and the option of an entry of a defaults list."""
    if isinstance(entry, Mapping):
        for key, option in entry.items():
            if "@" in key or not isinstance(option, str | None):
                raise ConfigError(
                    f"defaults: {key}: {option}: packages and lists are not supported"
                )
            yield key, option


def _absolute(key: str, group: str) -> str:
    return key[1:] if key.startswith("/") else "/".join(filter(None, (group, key)))


def _nested(package: str, settings: Settings) -> Settings:
    for name in reversed(package.split(".") if package else ()):
        settings = {name: settings}
    return settings


def _merge(into: Settings, more: Settings) -> None:
    """Put settings over others: mappings are merged, all else replaces what was there."""
    for key, value in more.items():
        there = into.get(key)
        if isinstance(value, dict):
            if not isinstance(there, dict):
                there = into[key] = {}
            _merge(there, value)
        elif value != "???" or key not in into:
            into[key] = value


# -- values of keys --------------------------------------------------------------------------------


def _apply(config: DictConfig, one: Override) -> None:
    """Change a key of a configuration; raises what OmegaConf raises, or ConfigError."""
    if one.kind == "delete":
        _delete(config, one)
    elif one.kind == "change":
        OmegaConf.update(config, one.key, one.value, merge=True)
    else:
        there = OmegaConf.select(config, one.key, throw_on_missing=False)
        if one.kind == "add" and there is not None and not isinstance(one.value, dict | list):
            raise ConfigError(f"{one.word}: is there already; {one.key}=... changes it")
        OmegaConf.update(config, one.key, one.value, merge=True, force_add=True)


def _delete(config: DictConfig, one: Override) -> None:
    there = OmegaConf.select(config, one.key, throw_on_missing=False)
    if "." not in one.key and one.key not in [*config]:
        raise ConfigError(no_key(one.key, OmegaConf.to_container(config)))
    if there is None:
        raise ConfigError(f"{one.word}: cannot be taken away: it is not there, or null already")
    if one.value not in (None, there):
        raise ConfigError(f"{one.word}: cannot be taken away: it is {there}")
    above, _, name = one.key.rpartition(".")
    with open_dict(config):
        del (OmegaConf.select(config, above) if above else config)[name]


# -- what there would have been to choose from -----------------------------------------------------


def not_there(group: str, option: str, known: Sequence[str]) -> str:
    """What to write in the place of an option that a group does not have."""
    if group == "workload" and ("/" in option or re.search(r"\.(csv|jsonl?|gz)$", option)):
        path = f"workload.path={option}, from Python ps.trace({option!r})"
        return f"a file of requests is workload=trace {path}; {to_choose(option, known)}"
    if group == "server":
        return f"{to_choose(option, known)}; limits are settings of it, such as server.max_seqs"
    if re.fullmatch(r"(\w+\.)+[A-Z]\w*", option):
        return f"a class of yours is {group}._target_={option}; {to_choose(option, known)}"
    return to_choose(option, known)


WITHOUT_KEY = ("experiment", "scale")
"""Groups of a study whose options set keys of others."""


def no_key(key: str, root: Any) -> str:
    """A key that a configuration does not have: which part of it, and what there is beside that."""
    names = key.split(".")
    if names[0] == "hydra":
        return f"{key}: no such key of Hydra's; --cfg hydra shows them"
    node = root
    for depth, name in enumerate(names):
        there = [str(one) for one in node] if isinstance(node, dict) else []
        if name not in there:
            where = _dotted(names[: depth + 1])
            return f"{where}: no such {_instead(names[: depth + 1], root, there)}"
        node = node[name]
    return f"{key}: no such key"


def _instead(names: Sequence[str], root: Any, there: Sequence[str]) -> str:
    """What to do, where the last of `names` is not `there` beside the others."""
    *above, name = names
    if above == ["study", "arms"]:
        return f"arm; with experiment=compare, +study.arms.{name}= adds one"
    if names == ["memory", "kind"]:
        return "key; memory=NAME, or memory._target_=module.Class for a class of your own"
    if names == ["fleet", "link", "lanes"]:
        return "key; it is now called 'channels'"
    if names == ["workload", "requests"] and "sessions" in there:
        return "key; use workload.sessions="  # the root's `requests` is a log of them
    if len(above) == 1 and name in root and names != ["router", "seed"]:  # which draws nothing
        return f"key; use {name}="
    sections = [key for key, one in root.items() if isinstance(one, dict) and name in one]
    if not above and len(sections) == 1 and name.strip("_") == name:
        return f"key; use {sections[0]}.{name}="
    known = [one for one in there if not one.startswith("_")]
    if not above and "study" in root:
        known += WITHOUT_KEY
    text = f"key; {to_choose(name, known) if known else f'there are none below {_dotted(above)}'}"
    # What the class behind a group takes besides is added, where it was not a slip.
    takes_more = above[:1] == ["policy"] or above in (["slo", "clients"], ["fleet", "autoscale"])
    takes_more |= above[:1] == ["workload"] and len(above) > 1
    if takes_more and not get_close_matches(name, known):
        text += f"; +{_dotted(names)}=... adds it"
    return text


def _dotted(names: Sequence[str]) -> str:
    return ".".join(names)


def reason(error: BaseException | None) -> str:
    """Why a value does not go where it was put."""
    text = str(error).splitlines()[0] if error else "does not fit"
    if "is not Optional" in text:
        return "must be given"
    if "is not a valid bool" in text:
        return f"must be {_KINDS['Boolean']}"
    if match := re.search(r"is not a subclass of (\w+)", text):
        section = next((one for one in (Server, Slo, Qoe) if one.__name__ == match[1]), None)
        names = ", ".join(one.name for one in fields(section)) if section else "name"
        return f"must be a mapping of settings: {names}"
    if "is not a ListConfig" in text:
        return "must be a list, such as [a,b]"
    if re.match(r"Cannot assign \w+ to Dict", text):
        return "must be a mapping, such as {name: {key: value}}"
    if text.startswith("Cannot merge DictConfig with"):
        return "must be a mapping, such as {name: value}"
    if match := re.search(r"could not be converted to (\w+)", text):
        return f"must be {_KINDS.get(match[1], f'a {match[1]}')}"
    return text

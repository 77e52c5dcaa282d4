"""The options of `conf/` and of folders beside it, and the base that Hydra composes of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import cache, cached_property
from importlib import import_module
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from pagedsim.build import BESIDE, PLUGIN_GROUPS, plugins
from pagedsim.core import ConfigError
from pagedsim.core.errors import choices as to_choose
from pagedsim.spec.roots import Config, Serve
from pagedsim.spec.words import text_of

Settings = dict[str, Any]
Choices = Mapping[str, str | None]
"""The option of each group."""
ROOT = "config"
"""The configuration of a study."""
MISSING = "???"
"""The value of what must be given."""
BUILT_IN = (ROOT, "serve")
"""The roots of `conf/`."""
_ROOTS = {"schema": Config, "serve_schema": Serve}
_GLOBAL = "# @package _global_"


@dataclass(frozen=True)
class Option:
    """The file of an option."""

    settings: Settings
    everywhere: bool = False
    """Whether its settings are those of the whole configuration, not of its group."""
    choices: Choices = field(default_factory=dict)
    """The options of other groups that it chooses."""

    def of_group(self, group: str) -> Settings:
        """Its settings, below the key at which they stand."""
        return self.settings if self.everywhere else nested(group, self.settings)


class Conf:
    """The groups below some folders, and their options."""

    def __init__(self, folders: Sequence[Traversable] = (), root: str = ROOT) -> None:
        """`folders` are searched in this order, after `conf/`; `root` is what is composed."""
        self.root = root
        self.folders: list[Traversable] = [files("pagedsim.conf"), *folders]
        self._options: dict[tuple[str, str], Option] = {}
        self._offered = offered()

    @property
    def options(self) -> list[str]:
        """The options of the command line that make it search the same folders for the root."""
        folder = [word for place in self.folders[1:2] for word in ("--config-dir", str(place))]
        return [*folder, *(() if self.root in BUILT_IN else ("--config-name", self.root))]

    # -- options -----------------------------------------------------------------------------------

    def is_group(self, key: str) -> bool:
        """Whether a key is a group, and not a setting."""
        return bool(key) and "." not in key and any(f.joinpath(key).is_dir() for f in self.folders)

    @cached_property
    def groups(self) -> Sequence[str]:
        """The names of all groups that have options."""
        names = {place.name for folder in self.folders for place in folder.iterdir()}
        return [name for name in sorted(names) if self.is_group(name) and self.options_of(name)]

    def options_of(self, group: str) -> list[str]:
        """The names of a group's options."""
        names = {
            file.name.removesuffix(".yaml")
            for folder in self.folders
            if (place := folder.joinpath(group)).is_dir()
            for file in place.iterdir()
            if file.name.endswith(".yaml")
        }
        return sorted(names | self._offered.get(group, {}).keys())

    def refuse_unknown(self, group: str, option: str) -> None:
        """Raise ConfigError for an option that a group does not have."""
        known = self.options_of(group)
        if option not in known:
            instead = _instead_of_option(group, option, known) if known else "it has no options"
            raise ConfigError(f"{group}={option}: unknown; {instead}")

    def option(self, group: str, name: str) -> Option:
        """An option, with those that it builds on."""
        if (group, name) not in self._options:
            self._options[group, name] = self._read(group, name)
        return self._options[group, name]

    def comment(self, group: str, name: str, key: str) -> str:
        """The comment behind a setting in the file of an option, or of one that it builds on, such
        as the source of a number."""
        place = self._file(group, f"{name}.yaml")
        text = place.read_text(encoding="utf-8") if place is not None else ""
        if line := re.search(rf"^{re.escape(key)}:[^#\n]*#?(.*)", text, re.MULTILINE):
            return line[1].strip()
        bases = re.findall(r"^ +- (?!_self_)([\w.-]+)$", text, re.MULTILINE)
        return next(filter(None, (self.comment(group, base, key) for base in bases)), "")

    def _read(self, group: str, name: str) -> Option:
        self.refuse_unknown(group, name)
        if (place := self._file(group, f"{name}.yaml")) is None:
            return Option(dict(self._offered[group][name]))
        everywhere, content = _parsed(place)
        defaults = content.pop("defaults", [])
        if not isinstance(defaults, list) or not all(isinstance(d, str | dict) for d in defaults):
            raise ConfigError(f"{place}: defaults: must be a list of options")
        settings: Settings = {}
        chosen: dict[str, str | None] = {}
        for default in defaults if "_self_" in defaults else [*defaults, "_self_"]:
            if default == "_self_":
                merge(settings, content)
            elif isinstance(default, str):
                base, _, option = default.strip("/").rpartition("/")
                below = self.option(base or group, option)
                chosen |= below.choices
                merge(settings, below.of_group(base if base and everywhere else ""))
            else:
                for key, option in default.items():
                    chosen[self._chosen_by(place, key, option)] = option
        return Option(settings, everywhere, chosen)

    def _file(self, *path: str) -> Traversable | None:
        """The first file of this path in the folders."""
        places = (folder.joinpath(*path) for folder in self.folders)
        return next((place for place in places if place.is_file()), None)

    def _chosen_by(self, file: Traversable, key: str, option: str | None) -> str:
        """The group of an entry of an option's defaults, such as `override /policy: sjf`."""
        group = key.removeprefix("override ").removeprefix("optional ").lstrip("/")
        where = f"{file}: defaults"
        if not self.is_group(group):
            known = to_choose(group, self.groups)
            raise ConfigError(f"{where}: {key}: no such group here; {known}")
        if group in self.defaults and not key.startswith("override "):
            raise ConfigError(f"{where}: {key}: is chosen already; override /{group}: changes it")
        if isinstance(option, str):
            try:
                self.refuse_unknown(group, option)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
        return group

    # -- the base ----------------------------------------------------------------------------------

    @cached_property
    def _root_file(self) -> tuple[Settings, Choices]:
        """The settings of the root itself, and the options that it chooses."""
        return self._read_root(self.root)

    def _read_root(self, name: str) -> tuple[Settings, dict[str, str | None]]:
        if name in _ROOTS:
            return asdict(_ROOTS[name]()), {}
        if (place := self._file(f"{name}.yaml")) is None:
            return {}, {}
        _, content = _parsed(place)
        settings: Settings = {}
        chosen: dict[str, str | None] = {}
        for default in content.pop("defaults", []):
            if default == "_self_":
                merge(settings, content)
            elif isinstance(default, str):
                below, more = self._read_root(default)
                merge(settings, below)
                chosen |= more
            else:
                own_groups = [key for key in default if not key.startswith("override ")]
                chosen |= {key.split()[-1]: default[key] for key in own_groups}
        settings.pop("hydra", None)
        return settings, chosen

    @property
    def defaults(self) -> Choices:
        """The groups of the root, and the options that it chooses itself."""
        return self._root_file[1]

    def root_settings(self) -> Settings:
        """The settings of the root before those of any option."""
        return cast(Settings, copied(self._root_file[0]))

    def compose(self, words: Sequence[str]) -> tuple[Settings, Choices]:
        """What the root becomes with these words, unresolved, and the options it is made of."""
        from hydra.types import RunMode

        register()
        places = [f"file://{os.path.abspath(str(folder))}" for folder in self.folders[1:]]
        has_root = [folder.joinpath(f"{self.root}.yaml").is_file() for folder in self.folders]
        if has_root[0] or not any(has_root):
            loader = _loader()
        else:  # Hydra searches for a root in one folder alone
            loader = _loader(places.pop(has_root.index(True) - 1).removeprefix("file://"))
            places.insert(0, "pkg://pagedsim.conf")
        search = [f"hydra.searchpath={text_of(places)}"] * bool(places)
        try:
            composed = loader.load_configuration(self.root, [*search, *words], RunMode.RUN)
        except Exception as error:  # of files that are none of an option, Hydra's and YAML's
            raise ConfigError(first_line(error)) from error
        return self.split(composed, composed.hydra.runtime.choices)

    def split(
        self, composed: DictConfig, chosen: Mapping[Any, str | None]
    ) -> tuple[Settings, Choices]:
        """What Hydra composed, without its own settings, and the options it is made of."""
        tree = cast(Settings, OmegaConf.to_container(composed))
        tree.pop("hydra", None)
        groups = [str(group) for group in chosen if not str(group).startswith("hydra/")]
        # Of a group that is optional, Hydra chooses options that there are not.
        known = {g: chosen[g] in self.options_of(g) for g in groups if chosen[g] is not None}
        return tree, {group: chosen[group] if known.get(group) else None for group in groups}


def refuse_unknown_of_hydra(words: Sequence[str]) -> None:
    """Raise ConfigError for a setting of Hydra's that it does not have, or an option."""
    from hydra.types import RunMode

    config = _loader().load_configuration(ROOT, [], RunMode.MULTIRUN)
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        if key.startswith("hydra/"):
            known = _loader().get_group_options(key)
            if known and value not in known:
                raise ConfigError(f"{word}: unknown; {to_choose(value, known)}")
        elif not word.startswith(("+", "~")) and select(config, key, absent=words) is words:
            raise ConfigError(f"{key}: no such key of Hydra's; --cfg hydra shows them")


@cache
def _loader(folder: str = "") -> Any:
    """Hydra's reader of `conf/`, or of the folder of a user's root; a program's own Hydra, if there
    is one, stays as it is."""
    from hydra import initialize_config_dir, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    current = GlobalHydra.instance()
    hydra, current.hydra = current.hydra, None
    try:
        initialize = initialize_config_dir if folder else initialize_config_module
        with initialize(folder or "pagedsim.conf", version_base="1.3"):
            return current.config_loader()
    finally:
        GlobalHydra.instance().hydra = hydra


def register() -> None:
    """Make known to Hydra the roots' defaults, the options of plugins, and the resolvers.

    YAML is read by libyaml where PyYAML has it: a command reads dozens of files.
    """
    from hydra.core.config_store import ConfigStore

    yaml: Any = import_module("yaml")
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    store = ConfigStore.instance()
    for name, kind in _ROOTS.items():
        store.store(name=name, node=asdict(kind()))
    for group, options in offered().items():
        for name, settings in options.items():
            store.store(group=group, name=name, node=settings)


def offered() -> Mapping[str, Mapping[str, Settings]]:
    """The options that plugins offer, by group and name: the class and other settings."""
    _, paged = _parsed(files("pagedsim.conf").joinpath("memory", "paged.yaml"))
    server = {key: value for key, value in paged.items() if key in BESIDE["memory"]}
    more: Mapping[str, Settings] = {"policy": {"victim": None}, "memory": server}
    return {
        group: {n: {**more.get(group, {}), "_target_": path} for n, path in plugins(group).items()}
        for group in PLUGIN_GROUPS
        if group != "autoscaler"  # which is no group
    }


def _parsed(file: Traversable) -> tuple[bool, Settings]:
    """Whether a file's settings are of the whole configuration, and the settings."""
    try:
        text = file.read_text(encoding="utf-8")
        settings = OmegaConf.to_container(OmegaConf.create(text)) or {}
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        why = _place_of(error) or " ".join(str(error).split())
        raise ConfigError(f"{file}: cannot be read: {why}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: must be a mapping of settings")
    return text.lstrip().startswith(_GLOBAL), cast(Settings, settings)


def first_line(error: BaseException) -> str:
    """The beginning of an error of Hydra's, which may go on for pages; of YAML's, where it is."""
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark):
        return f"{mark.name}: {_place_of(error)}"
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _place_of(error: BaseException) -> str:
    """Line, column and problem of an error of YAML's; empty for others."""
    if not isinstance(error, MarkedYAMLError) or not (mark := error.problem_mark):
        return ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


# -- mappings --------------------------------------------------------------------------------------


def nested(key: str, settings: Any) -> Settings:
    """Settings below a dotted key."""
    for name in reversed(key.split(".") if key else ()):
        settings = {name: settings}
    return cast(Settings, settings)


def select(tree: Mapping[str, Any], key: str, absent: Any = None) -> Any:
    """What a dotted key holds."""
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return absent
        node = node[part]
    return node


def copied(value: Any) -> Any:
    """Settings whose mappings and lists are others; objects in them are the same."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list | tuple) else value


def merge(into: Settings, more: Mapping[str, Any]) -> None:
    """Put copies of settings over others: mappings are merged, all else replaces what was there.

    What has no value yet (`???`) replaces nothing.
    """
    for key, value in more.items():
        before = into.get(key)
        if isinstance(value, Mapping):
            if not isinstance(before, dict):
                before = into[key] = {}
            merge(before, value)
        elif value != MISSING or key not in into:
            into[key] = copied(value)


# -- what there would have been to choose from -----------------------------------------------------

OPEN = re.compile(r"(policy|slo\.clients|fleet\.autoscale|workload\.\w+)\.")
"""Where keys may be added: what the class behind a group takes besides, and clients."""
WITHOUT_KEY = ("experiment", "scale")
"""Groups of a study whose options set keys of others."""


def _instead_of_option(group: str, option: str, known: Sequence[str]) -> str:
    """What to write in the place of an option that a group does not have."""
    if (group, option) == ("memory", "tiered"):
        return "tiers below the GPU are offload=vllm with offload.tiers, or offload=hicache"
    if group == "workload" and re.search(r"/|\.(csv|jsonl?|gz)$", option):
        path = f"workload.path={option}, from Python ps.trace({option!r})"
        return f"a file of requests is workload=trace {path}; {to_choose(option, known)}"
    if group == "server":
        return f"{to_choose(option, known)}; limits are settings of it, such as server.max_seqs"
    if re.fullmatch(r"(\w+\.)+[A-Z]\w*", option):
        return f"a class of yours is {group}._target_={option}; {to_choose(option, known)}"
    return to_choose(option, known)


def no_key(key: str, root: Any) -> ConfigError:
    """The error for a key that a configuration does not have: which part of it, and what there is
    beside that."""
    names = key.split(".")
    node = root
    for depth, name in enumerate(names):
        known = [str(name) for name in node] if isinstance(node, Mapping) else []
        if name not in known:
            where = ".".join(names[: depth + 1])
            return ConfigError(
                f"{where}: no such {_instead_of_key(names[: depth + 1], root, known)}"
            )
        node = node[name]
    return ConfigError(f"{key}: no such key")


def _instead_of_offload(name: str, beside: Sequence[str]) -> str:
    """What to write in the place of a key that the chosen option of `offload` does not have."""
    if not {"tiers", "storage"} & set(beside):
        return (
            "choose offload=vllm, with tiers below host memory, or offload=hicache, with a storage"
        )
    if name in ("tiers", "storage"):
        other = "storage" if name == "tiers" else "tiers.disk"
        return f"what is below host memory is offload.{other} here"
    return ""


def _instead_of_key(names: Sequence[str], root: Any, beside: Sequence[str]) -> str:
    """What to write, where the last of `names` is not `beside` the others."""
    *above, name = names
    where = ".".join(names)
    if above == ["study", "arms"]:
        return f"arm; with experiment=compare, +{where}= adds one"
    if names == ["memory", "kind"]:
        return "key; memory=NAME, or memory._target_=module.Class for a class of your own"
    if names == ["workload", "requests"] and "sessions" in beside:
        return "key; use workload.sessions="  # the root's `requests` is a log of them
    if len(above) == 1 and name in root and names != ["router", "seed"]:  # which draws nothing
        return f"key; use {name}="
    sections = [key for key, node in root.items() if isinstance(node, Mapping) and name in node]
    if not above and len(sections) == 1 and name.strip("_") == name:
        return f"key; use {sections[0]}.{name}="
    if names[:2] == ["offload", "tiers"] and len(names) == 3:
        rates = "{gib: null, read_gb_s: 7, write_gb_s: 5}"
        return f"tier; {to_choose(name, beside)}; '+{where}={rates}' adds it"
    if above == ["offload"] and (instead := _instead_of_offload(name, beside)):
        return f"key; {instead}"
    if names == ["gpu"]:  # as Python calls it
        return "key; use hardware="
    known = [key for key in beside if not key.startswith("_")]
    if not above and "study" in root:
        known += WITHOUT_KEY
    text = to_choose(name, known) if known else f"there are none below {'.'.join(above)}"
    if OPEN.match(where) and not get_close_matches(name, known):  # else it was a slip
        text += f"; +{where}=... adds it"
    return f"key; {text}"

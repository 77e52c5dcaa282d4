"""Objects from settings with a `_target_`; each error is one line that names the key."""

from __future__ import annotations

import re
import sys
from base64 import urlsafe_b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import fields
from importlib import import_module
from inspect import isabstract, signature
from pathlib import Path
from pickle import loads
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints
from uuid import uuid4
from weakref import WeakValueDictionary

from pagedsim.build import AUTOSCALERS, BESIDE, current_path, plugins
from pagedsim.cluster.autoscale import Autoscale
from pagedsim.core import ConfigError, PagedsimError, PolicyWrapper
from pagedsim.core.contracts import raised_in_hook, vet
from pagedsim.core.errors import (
    is_number,
    is_whole,
    lacking,
    raised,
    refuse_settings,
    require_whole,
    shown,
    unknown,
)
from pagedsim.core.policy_validation import refuse_signatures
from pagedsim.policies.autoscaling import CONTRACT, Autoscaler

T = TypeVar("T")


def make(group: str, settings: Any, kind: Callable[..., T], **more: Any) -> T:
    """The object, of class `kind`, that a group's settings describe.

    `more` is what only the program knows.
    Nested settings with a `_target_` are made first. A ConfigError names the group's key.
    """
    refuse_no_target(group, settings)
    for key in settings.keys() & more.keys():
        raise ConfigError(f"{group}.{key}={settings[key]}: is filled in by the run, not to be set")
    with said_of(group, settings):
        made = _made(group, {**settings, **more})
    assert isinstance(kind, type)
    if not isinstance(made, kind):
        is_, must = _a(type(made).__name__), _a(kind.__name__)
        if settings["_target_"] in (_path(kept), _path(unpickled)):
            raise ConfigError(f"{group}: is {is_}, must be {must}")
        raise ConfigError(f"{group}._target_={settings['_target_']}: makes {is_}, must make {must}")
    refuse_signatures(made, kind)
    return cast(T, made)


def refuse_no_target(group: str, settings: Any) -> None:
    """Raise ConfigError unless the group has settings with a `_target_`, which null is not."""
    if not isinstance(settings, Mapping) or not settings.get("_target_"):
        raise ConfigError(f"{group}: needs _target_, the path of the class to make")


def unpickled(*, pickle: str, classes: Sequence[str], **more: Any) -> Any:
    """An object that a script gave as a setting: a new copy for each run.

    `classes` are the paths of a user's classes in it, whose code decides whether a run is reused;
    `more` is what the run adds for classes that take it.
    """
    return loads(urlsafe_b64decode(pickle + "=" * (-len(pickle) % 4)))


_kept: WeakValueDictionary[str, Any] = WeakValueDictionary()


def keep(value: Any) -> str:
    """Keep an object for `kept`, as long as it lives; returns its name, which none has again."""
    name = uuid4().hex
    _kept[name] = value
    return name


def kept(*, name: str, classes: Sequence[str], **more: Any) -> Any:
    """As `unpickled`, of an object that cannot be pickled: this process has it, and its forks."""
    return deepcopy(_kept[name])


def script() -> Path | None:
    """The file that is run; None in a notebook and for what is typed in."""
    file = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    return file if file.is_file() else None


def needs_this_process(config: Mapping[str, Any]) -> str:
    """Why a run needs this process or a fork of it; empty where any other can make its objects."""
    typed = script() is None and getattr(sys.modules["__main__"], "__spec__", None) is None
    for key, value in flat(config).items():
        if key.endswith("_target_") and value == KEPT:
            return f"{key.removesuffix('._target_')} is an object that cannot be pickled"
        paths = value if isinstance(value, list) else [value]
        for path in filter(lambda path: f"{path}.".startswith("__main__."), paths):
            if typed:
                what = "a metric or plot" if path == "__main__" else path
                return f"{what} is defined in a notebook; from a file, processes can import it"
    return ""


UNPICKLED = f"{unpickled.__module__}.{unpickled.__qualname__}"
KEPT = f"{kept.__module__}.{kept.__qualname__}"


@contextmanager
def said_of(group: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Put the group before the key that an error inside is about, if it is one of the group."""
    try:
        yield
    except PagedsimError as error:
        text = _with_group(group, settings, str(error))
        if text == str(error):
            raise
        raise ConfigError(text) from error


def _with_group(group: str, settings: Mapping[str, Any], text: str) -> str:
    """An error's text with its whole key at the beginning; as it is, where it has none of ours."""
    if text.startswith("needs "):
        return f"{group}: {text}"
    if name := re.match(r"unknown ([\w.]+) '(.*?)': (.*)", text):
        text = f"{name[1]}={name[2]}: unknown; {name[3]}"
    key = re.match(r"(\w+)([.=:\[])", text)
    if key is not None and key[1] in settings:
        if key[2] == "." and not isinstance(settings[key[1]], Mapping):
            return text  # a file that is called like the key
        text = f"{group}.{text}"
    # What a class takes besides is not in the configuration yet.
    missing = rf"^({group}\.[\w.]+): must be given, for"
    return re.sub(missing, r"\1: must be given (+\1=...), for", text)


def load_plugins(names: Sequence[str]) -> None:
    """Import the modules of `plugins=`, whose metrics and plots register themselves."""
    for name in names:
        try:
            import_module(name)
        except PagedsimError as error:
            raise ConfigError(f"plugins={name}: {error}") from error
        except Exception as error:  # whatever it raises
            raise ConfigError(
                f"plugins={name}: cannot be imported: {raised(error, __file__)}"
            ) from error


def takes(target: str, name: str) -> bool:
    """Whether what `target` names has a parameter `name`."""
    return name in signature(locate(target)).parameters


def seeded(group: str, settings: Any, seed: int) -> Any:
    """The settings of a part, with the run's `seed` added to its own if it draws at random.

    Raises ConfigError, which names the `group`, for a seed of its own that is not a whole number.
    """
    if not isinstance(settings, Mapping) or not settings.get("_target_"):
        return settings
    try:
        default = signature(locate(str(settings["_target_"]))).parameters["seed"].default
    except (PagedsimError, KeyError, ValueError, TypeError):  # `make` says what is wrong
        return settings
    own = settings.get("seed", default)
    if "seed" in settings and not (own is None and default is None):
        require_whole(f"{group}.seed", own, 0)
    return {**settings, "seed": own + seed} if is_whole(own) and own >= 0 else settings


def draws(part: object) -> bool:
    """Whether a policy or router, or one inside it, takes a `seed` to draw at random."""
    while True:
        with suppress(ValueError):  # of compiled classes some have no signature
            if "seed" in signature(type(part)).parameters:
                return True
        if not isinstance(part, PolicyWrapper):
            return False
        part = part.inner


def locate(path: str) -> Callable[..., Any]:
    """The class or function at a dotted path; raises ConfigError where there is none."""
    parts = current_path(path).split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        try:
            found: Any = import_module(module)
        except ModuleNotFoundError as error:
            if error.name and f"{module}.".startswith(f"{error.name}."):
                continue  # the path's end may be attributes of a shorter path's module
            raise ConfigError(f"{path}: cannot be imported: {raised(error, __file__)}") from error
        except Exception as error:
            raise ConfigError(f"{path}: cannot be imported: {raised(error, __file__)}") from error
        for name in parts[cut:]:
            if not hasattr(found, name):
                known = [n for n in vars(found) if not n.startswith("_")]
                raise ConfigError(f"{path}: {unknown(f'name in {module}', name, known)}")
            found = getattr(found, name)
        if not callable(found):
            raise ConfigError(f"{path}: is {_a(type(found).__name__)}, must be a class")
        return found
    if len(parts) == 1:
        raise ConfigError(f"{path}: must be the path of a class, in the form module.Class")
    raise ConfigError(f"{path}: there is no module {parts[0]!r} here")


def refuse_no_class(group: str, path: str, base: type) -> None:
    """Raise ConfigError unless a group's `_target_` is a class with all that `base` leaves open."""
    label = f"{group}._target_={path}"
    try:
        found: Any = locate(path)
    except ConfigError as error:
        raise ConfigError(f"{group}._target_={error}") from error.__cause__
    if not isinstance(found, type) or not issubclass(found, base):
        raise ConfigError(f"{label}: must be a subclass of {base.__name__}")
    if isabstract(found):
        raise ConfigError(f"{label}: {lacking(found)}")


def _made(where: str, value: Any) -> Any:
    """A value with all that has a `_target_` made into objects, the innermost first."""
    if isinstance(value, (list, tuple)):
        return [_made(f"{where}.{i}", one) for i, one in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    inner = {key: _made(f"{where}.{key}", one) for key, one in value.items()}
    if "_target_" not in inner:
        return inner
    target = str(inner["_target_"])
    settings = {str(k): v for k, v in inner.items() if not str(k).startswith("_")}
    return _call(where, target, settings)


def _call(where: str, target: str, settings: dict[str, Any]) -> Any:
    label = f"{where}._target_={target}"
    try:
        maker = locate(target)
    except ConfigError as error:
        raise ConfigError(f"{where}._target_={error}") from error.__cause__
    if isabstract(maker):
        raise ConfigError(f"{label}: {lacking(maker)}")
    refuse_settings(label, settings, maker, where, beside=BESIDE.get(where, ()))
    try:
        return maker(**settings)
    except PagedsimError:
        raise
    except Exception as error:
        if raised_in_hook(error):  # of a part that was made inside these settings
            raise
        raise ConfigError(f"{label}: {raised(error, __file__)}") from error


def _path(made: Callable[..., Any]) -> str:
    return f"{made.__module__}.{made.__qualname__}"


def _a(name: str) -> str:
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and their values."""
    if not isinstance(settings, Mapping) or (prefix and not settings):
        return {prefix[:-1]: settings}
    found: dict[str, Any] = {}
    for key, inner in settings.items():
        found |= flat(inner, f"{prefix}{key}.")
    return found


# -- the kinds of a study's fields -----------------------------------------------------------------
# pydantic would do this, too: its import takes 0.07 s, and each of its errors would need new words.


def require_kinds(study: Any, where: str = "") -> None:
    """Raise ConfigError for a field of a dataclass that holds what its annotation rules out.

    Numbers, texts, lists, mappings, and what is in them; other annotations allow everything.
    `where` is the place of a dataclass within a study's settings.
    """
    before = f"{where}." if where else ""
    hints = get_type_hints(type(study))
    for field in fields(study):
        _require(before + field.name, getattr(study, field.name), hints[field.name])


def _require(where: str, value: object, hint: Any) -> None:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if NoneType in get_args(hint):  # None, or one of the others
        if value is not None and len(kinds) == 1:
            _require(where, value, kinds[0])
        return
    if wanted := _wanted(value, get_origin(hint) or hint):
        raise ConfigError(f"{where}={value!r}: must be {wanted}")
    if isinstance(value, Mapping) and len(kinds) == 2:
        for key, inner in value.items():
            _require(f"{where}.{key}", inner, kinds[1])
    elif isinstance(value, (list, tuple)) and len(kinds) == 1:
        for inner in value:
            _require(where, inner, kinds[0])


def _wanted(value: object, kind: Any) -> str:
    """What it must be and is not; empty if it is, or may be anything."""
    fits, wanted = _KINDS.get(kind, (lambda _: True, ""))
    return "" if fits(value) else wanted


_KINDS: Mapping[Any, tuple[Callable[[object], bool], str]] = {
    Mapping: (lambda value: isinstance(value, Mapping), "a mapping of names to settings"),
    Sequence: (lambda value: isinstance(value, (list, tuple)), "a list"),
    int: (is_whole, "a whole number"),
    float: (is_number, "a number"),
    str: (lambda value: isinstance(value, str), "a text"),
}


# -- fleet.autoscale -------------------------------------------------------------------------------

_TIMING = {
    one.name: one.default for one in fields(Autoscale) if one.name in BESIDE["fleet.autoscale"]
}
"""Its settings that are not the autoscaler's own, and what they are unless they are given."""
_THRESHOLDS = ("up", "down")
"""Settings of the built-in rules, null for others."""
_RENAMED = {"least": "min_replicas", "every": "interval_s", "start": "startup_s"}
_EXAMPLE = "{rule: queue, up: 4, down: 1}"


def autoscale_of(settings: Any, seed: int) -> Autoscale | None:
    """What the setting describes; None if it is off, with neither `rule` nor `_target_`."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"fleet.autoscale={shown(settings)}: must be settings, such as {_EXAMPLE}, or null"
        )
    given = {
        str(key): value
        for key, value in settings.items()
        if key not in _TIMING and not (key in _THRESHOLDS and value is None)
    }
    rule = given.pop("rule", None)
    if rule is None and given.get("_target_") is None:
        timing = {key for key in _TIMING if settings.get(key, _TIMING[key]) != _TIMING[key]}
        if own := given.keys() - {"_target_"} | timing:
            raise ConfigError(
                f"fleet.autoscale.{min(own)}: needs rule or _target_ beside it, as in {_EXAMPLE}; "
                "fleet.autoscale=null is without autoscaling"
            )
        return None
    if rule is not None:
        if given.get("_target_") is not None:
            raise ConfigError(
                f"fleet.autoscale.rule={rule}: must be null beside _target_={given['_target_']}"
            )
        given["_target_"] = _path_of(rule)
        for key in given.keys() & _RENAMED.keys():
            raise ConfigError(
                f"fleet.autoscale.{key}: this setting is now called {_RENAMED[key]!r}"
            )

    def made() -> Autoscaler:
        own = seeded("fleet.autoscale", given, seed)
        return vet(make("fleet.autoscale", own, Autoscaler), CONTRACT)

    made()  # what is wrong with it is said before anything runs
    return Autoscale(made, **{key: settings[key] for key in _TIMING if key in settings})


def _path_of(rule: object) -> str:
    """The path of the class that a rule's name stands for."""
    ours = {name: _path(kind) for name, kind in AUTOSCALERS.items()}
    paths = {**plugins("autoscaler"), **ours}
    if (name := str(rule)) in paths:
        return paths[name]
    path = "; the path of a class is fleet.autoscale._target_" if "." in name else ""
    raise ConfigError(f"{unknown('fleet.autoscale.rule', name, paths)}{path}")

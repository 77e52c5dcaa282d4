"""Objects from settings with a `_target_`; each error is one line that names the key."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from inspect import isabstract, signature
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from pagedsim.build import BESIDE
from pagedsim.core import ConfigError, PagedsimError, PolicyWrapper
from pagedsim.core.contracts import raised_in_hook
from pagedsim.core.errors import is_whole, lacking, raised, refuse_settings, require_whole, unknown
from pagedsim.core.policy_validation import refuse_signatures
from pagedsim.spec.given import Given

T = TypeVar("T")
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of libraries, which may belong to another environment than this one."""
_STANDARD = Path(sysconfig.get_path("stdlib"))


def make(group: str, settings: Any, kind: Callable[..., T], **more: Any) -> T:
    """The object, of class `kind`, that a group's settings describe.

    `more` is what only the program knows. Nested settings with a `_target_` become objects first.
    A ConfigError names the group's key.
    """
    refuse_no_target(group, settings)
    for key in settings.keys() & more.keys():
        raise ConfigError(f"{group}.{key}={settings[key]}: is filled in by the run, not to be set")
    assert isinstance(kind, type)
    target = settings["_target_"]
    if isinstance(target, Given):
        # Of a memory the settings of an option stay: some are the server's.
        left = () if group == "memory" else settings.keys() - {"_target_", *BESIDE.get(group, ())}
        for key in left:
            raise ConfigError(
                f"{group}.{key}={settings[key]}: is not taken by an object of {target.name}, "
                "which has its settings"
            )
        return cast(T, _required(f"{group}: is", target.copy(), kind, "must be"))
    label = f"{group}._target_={target}"
    with said_of(group, settings):
        inner = {
            str(key): _value(f"{group}.{key}", value)
            for key, value in {**settings, **more}.items()
            if not str(key).startswith("_")
        }
        maker = _maker(group, str(target), inner, kind)
        try:
            built = maker(**inner)
        except PagedsimError:
            raise
        except Exception as error:
            if raised_in_hook(error):  # of a part that was built inside these settings
                raise
            raise ConfigError(f"{label}: {raised(error, __file__)}") from error
    return cast(T, _required(f"{label}: makes", built, kind, "must make"))


def _required(says: str, built: object, kind: type, must: str) -> object:
    """An object, once it is known to be of a class and to have its hooks."""
    if not isinstance(built, kind):
        raise ConfigError(f"{says} {_a(type(built).__name__)}, {must} {_a(kind.__name__)}")
    refuse_signatures(built, kind)
    return built


def _maker(where: str, target: str, settings: Mapping[str, Any], kind: type) -> Callable[..., Any]:
    """The class at a path, once it is known to be of a kind and to take these settings.

    A configuration may be somebody else's, so what is found is not called to see what it makes.
    """
    label = f"{where}._target_={target}"
    try:
        maker = locate(target)
    except ConfigError as error:
        raise ConfigError(f"{where}._target_={error}") from error.__cause__
    if isabstract(maker):
        raise ConfigError(f"{label}: {lacking(maker)}")
    if isinstance(maker, type) and not issubclass(maker, kind):
        raise ConfigError(f"{label}: makes {_a(maker.__name__)}, must make {_a(kind.__name__)}")
    if _is_of_a_library(maker) and not _returns(maker, kind):
        raise ConfigError(
            f"{label}: is a library's, must be a class or function of pagedsim or yours"
        )
    refuse_settings(label, settings, maker, where, beside=BESIDE.get(where, ()))
    return maker


def _is_of_a_library(maker: Callable[..., Any]) -> bool:
    """Whether it came with Python or an installed package that is not pagedsim."""
    module = sys.modules.get(str(getattr(maker, "__module__", "")))
    if module is None or module.__name__.partition(".")[0] in ("pagedsim", "__main__"):
        return module is None
    file = getattr(module, "__file__", None)  # none: built into Python
    return file is None or is_library_file(Path(file))


def is_library_file(path: Path) -> bool:
    """Whether a module's file was installed, or came with Python."""
    return not _INSTALLED.isdisjoint(path.parts) or path.is_relative_to(_STANDARD)


def _returns(maker: Callable[..., Any], kind: type) -> bool:
    """Whether it is a class of a kind other than any, or a function annotated to return one."""
    if kind is object:
        return False
    if isinstance(maker, type):
        return True
    try:
        returned = get_type_hints(maker).get("return")
    except (NameError, TypeError):
        return False
    return isinstance(returned, type) and issubclass(returned, kind)


def _value(where: str, value: Any) -> Any:
    """A setting, with all inside that has a `_target_` built."""
    if isinstance(value, Given):
        return value.copy()
    if isinstance(value, (list, tuple)):
        return [_value(f"{where}.{number}", inner) for number, inner in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if "_target_" in value:
        return make(where, value, object)
    return {key: _value(f"{where}.{key}", inner) for key, inner in value.items()}


def classes_in(settings: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """The paths of classes that settings name, each with its setting: a memory's eviction and what
    a policy wraps may be paths alone, and an object of a script may be of several."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            key_of_value = where if key == "_target_" else f"{where}.{key}" if where else str(key)
            if not isinstance(value, str):
                yield from classes_in(value, key_of_value)
            elif key in ("_target_", "of", "eviction") and "." in value:
                yield key_of_value, value
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from classes_in(value, where)
    elif isinstance(settings, Given):
        yield from ((where, path) for path in settings.classes)


def refuse_no_target(group: str, settings: Any) -> None:
    """Raise ConfigError unless the group has settings with a `_target_`, which null is not."""
    if not isinstance(settings, Mapping) or not settings.get("_target_"):
        raise ConfigError(f"{group}: needs _target_, the path of the class to make")


def script() -> Path | None:
    """The file that is run; None in a notebook and for what is typed in."""
    file = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    return file if file.is_file() else None


def needs_this_process(config: Mapping[str, Any]) -> str:
    """Why a run needs this process or a fork of it; empty where any other can build its objects."""
    typed = script() is None and getattr(sys.modules["__main__"], "__spec__", None) is None
    for key, value in flat(config).items():
        if isinstance(value, Given) and not value.pickles:
            return f"{key.removesuffix('._target_')} is an object that cannot be pickled"
        named = value.classes if isinstance(value, Given) else value
        for path in named if isinstance(named, list | tuple) else [named]:
            if typed and f"{path}.".startswith("__main__."):
                what = "a metric or plot" if path == "__main__" else path
                return f"{what} is defined in a notebook; from a file, processes can import it"
    return ""


def lives_here(config: Mapping[str, Any]) -> Iterator[str]:
    """A line for each object that no file can name, so that nothing can go on from its runs."""
    for key, value in flat(config).items():
        if isinstance(value, Given) and not value.pickles:
            where = key.removesuffix("._target_")
            yield (
                f"{where} is an object of {value.name} that cannot be pickled: no later call can "
                "go on from these runs"
            )


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
    missing = re.match(rf"({group}\.([\w.]+)): must be given(?=, for)", text)
    if missing is None:
        return text
    # What a class takes besides is not in the configuration yet.
    sign = "" if missing[2] in settings else "+"
    return f"{missing[0]} ({sign}{missing[1]}=...){text[missing.end() :]}"


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


def takes(target: str | Given, name: str) -> bool:
    """Whether what `target` names has a parameter `name`; an object of a script takes none."""
    return not isinstance(target, Given) and name in signature(locate(target)).parameters


def seeded(group: str, settings: Any, seed: int) -> Any:
    """The settings of a part, with the run's `seed` added to its own if it draws at random.

    Raises ConfigError, which names the `group`, for a seed of its own that is not a whole number.
    """
    target = settings.get("_target_") if isinstance(settings, Mapping) else None
    if not target or isinstance(target, Given):
        return settings
    try:
        default = signature(locate(str(target))).parameters["seed"].default
    except (PagedsimError, KeyError, ValueError, TypeError):  # `make` says what is wrong
        return settings
    first = settings.get("seed", default)
    if "seed" in settings and not (first is None and default is None):
        require_whole(f"{group}.seed", first, 0)
    return {**settings, "seed": first + seed} if is_whole(first) and first >= 0 else settings


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
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        try:
            target: Any = import_module(module)
        except ModuleNotFoundError as error:
            if error.name and f"{module}.".startswith(f"{error.name}."):
                continue  # the path's end may be attributes of a shorter path's module
            raise ConfigError(f"{path}: cannot be imported: {raised(error, __file__)}") from error
        except Exception as error:
            raise ConfigError(f"{path}: cannot be imported: {raised(error, __file__)}") from error
        for name in parts[cut:]:
            if not hasattr(target, name):
                known = [n for n, value in vars(target).items() if _is_of(module, n, value)]
                raise ConfigError(f"{path}: {unknown(f'name in {module}', name, known)}")
            target = getattr(target, name)
        if not callable(target):
            raise ConfigError(f"{path}: is {_a(type(target).__name__)}, must be a class")
        return cast(Callable[..., Any], target)
    if len(parts) == 1:
        raise ConfigError(f"{path}: must be the path of a class, in the form module.Class")
    raise ConfigError(f"{path}: there is no module {parts[0]!r} here")


def _is_of(module: str, name: str, value: object) -> bool:
    """Whether a name that a module has was defined there, and is no private one."""
    return not name.startswith("_") and getattr(value, "__module__", "") == module


def refuse_no_class(group: str, path: str, base: type) -> None:
    """Raise ConfigError unless a group's `_target_` is a class with all that `base` leaves open."""
    label = f"{group}._target_={path}"
    try:
        kind: Any = locate(path)
    except ConfigError as error:
        raise ConfigError(f"{group}._target_={error}") from error.__cause__
    if not isinstance(kind, type) or not issubclass(kind, base):
        raise ConfigError(f"{label}: must be a subclass of {base.__name__}")
    if isabstract(kind):
        raise ConfigError(f"{label}: {lacking(kind)}")


def _a(name: str) -> str:
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and their values."""
    if not isinstance(settings, Mapping) or (prefix and not settings):
        return {prefix[:-1]: settings}
    values: dict[str, Any] = {}
    for key, inner in settings.items():
        values |= flat(inner, f"{prefix}{key}.")
    return values

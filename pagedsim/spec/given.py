"""Objects that a script gives as settings.

A file names the class of such an object and its arguments, and never holds the object: nothing that
is read from a file is executed. Between the processes of one run it goes by pickle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from inspect import Parameter, signature
from io import BytesIO
from pickle import Pickler
from typing import Any
from weakref import WeakValueDictionary

from pagedsim.core import ConfigError
from pagedsim.core.contracts import is_ours

_PLAIN = (type(None), bool, int, float, str)
_without_pickle: WeakValueDictionary[int, Given] = WeakValueDictionary()


class Given:
    """An object as a setting: each run gets a copy."""

    def __init__(self, value: Any) -> None:
        """Raises ConfigError for an object that can be neither pickled nor copied."""
        self.value = value
        pickled, kinds = _pickled(value)
        self.pickles = pickled is not None
        """Whether other processes than forks of this one can have it."""
        self.state = "" if pickled is None else hashlib.sha256(pickled).hexdigest()[:16]
        """A digest of its state, by which a run of an equal object is recognised."""
        self.classes = sorted(_path(kind) for kind in kinds if not is_ours(kind))
        """The paths of a user's classes in it, whose code decides whether a run is reused."""
        if pickled is None:
            _without_pickle[id(self)] = self
            try:
                deepcopy(value)
            except Exception as error:  # whatever its class raises
                raise ConfigError(
                    f"cannot be copied, of which each run gets one: {error}"
                ) from error

    @property
    def name(self) -> str:
        """The name of its class."""
        return type(self.value).__name__

    def copy(self) -> Any:
        """A copy for one run."""
        return deepcopy(self.value)

    def __str__(self) -> str:
        which = f"state {self.state}" if self.state else f"object {id(self)}"
        return f"{_path(type(self.value))} ({which})"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Given) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __deepcopy__(self, memo: Any) -> Given:
        return self

    def __reduce__(self) -> tuple[Callable[..., Given], tuple[Any, ...]]:
        return (Given, (self.value,)) if self.pickles else (_of_this_process, (id(self),))


def _of_this_process(number: int) -> Given:
    """An object that cannot be pickled, in the process that has it or a fork."""
    return _without_pickle[number]


def written(settings: Any) -> Any:
    """Settings as a file has them: of objects, their classes and a digest of their states."""
    if isinstance(settings, Given):
        kind = _path(type(settings.value))
        return {"_target_": kind, **({"state": settings.state} if settings.state else {})}
    if isinstance(settings, Mapping):
        if isinstance(target := settings.get("_target_"), Given):
            return {**settings, **written(target)}
        return {key: written(value) for key, value in settings.items()}
    return (
        [written(value) for value in settings] if isinstance(settings, list | tuple) else settings
    )


def arguments_of(value: Any) -> dict[str, Any] | None:
    """The arguments that make an equal object of its class; None where they are not known.

    They are looked for in attributes that have a parameter's name, and are plain values.
    """
    kind = type(value)
    if "<locals>" in kind.__qualname__:
        return None
    try:
        arguments = dict(_arguments(value))
        same = _pickled(kind(**arguments))[0] == _pickled(value)[0] is not None
    except Exception:  # whatever its class raises
        return None
    return arguments if same else None


def _arguments(value: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in signature(type(value)).parameters.items():
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue
        argument = getattr(value, name, getattr(value, f"_{name}", parameter.default))
        if not isinstance(argument, _PLAIN):
            raise TypeError(name)
        if argument != parameter.default:
            yield name, argument


def _pickled(value: Any) -> tuple[bytes | None, set[type]]:
    """An object's pickle, None if it has none, and the classes of all in it."""
    buffer = BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(value)
    except Exception:  # whatever its class raises
        return None, set()
    return buffer.getvalue(), pickler.classes


class _Pickler(Pickler):
    """Notes the classes of all that it pickles."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self.classes: set[type] = set()

    def reducer_override(self, value: Any) -> Any:
        """Note a class; it is pickled as ever."""
        if isinstance(value, type) and value.__module__ != "builtins":
            self.classes.add(value)
        return NotImplemented


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

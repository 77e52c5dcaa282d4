"""Settings of studies and of the roots: kinds, ranges and names, from annotations of a dataclass.

Constraints stand in `Annotated` fields, and nested groups of settings become dataclasses: a field
such as `loads: Mapping[str, Load]`, where `Load` is a dataclass, takes a mapping of settings for
each load and holds the objects made of them.

    base: Annotated[str, In("policies")]
    rates: Annotated[Sequence[float], Number(above=0), Count()]
"""
# pydantic would do this, too: its import takes 0.07 s, and each of its errors would need new words.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints

from pagedsim.core import ConfigError
from pagedsim.core.errors import choices, is_number, is_whole, refuse_settings, require_number


class Constraint(Protocol):
    """What an annotation demands of a field beyond its type."""

    def require(self, where: str, value: Any, owners: Sequence[Any]) -> None:
        """Raise ConfigError unless `value` fulfils it; `owners` are the settings around it."""


@dataclass(frozen=True)
class Number:
    """Bounds of a number, or of every number in a list or mapping."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def require(self, where: str, value: Any, owners: Sequence[Any]) -> None:
        for place, number in _leaves(where, value):
            require_number(place, number, self.low, self.high, above=self.above)


@dataclass(frozen=True)
class Whole:
    """Bounds of a whole number."""

    low: int = 1

    def require(self, where: str, value: Any, owners: Sequence[Any]) -> None:
        if value < self.low:
            raise _wrong(where, value, f"a whole number of at least {self.low}")


@dataclass(frozen=True)
class Count:
    """The number of entries of a list or mapping."""

    least: int = 1

    def require(self, where: str, value: Any, owners: Sequence[Any]) -> None:
        count = len(value)
        if count < self.least:
            raise ConfigError(f"{where}: {count} of them: must be at least {self.least}")


@dataclass(frozen=True)
class In:
    """A name, each name of a list, or each key of a mapping, that another field must define.

    The field is looked up in the settings themselves, then in those around them.
    """

    field: str

    def require(self, where: str, value: Any, owners: Sequence[Any]) -> None:
        defined = (getattr(owner, self.field, None) for owner in owners)
        known = next(names for names in defined if names is not None)
        sign = "." if isinstance(value, Mapping) else "="
        for name in [value] if isinstance(value, str) else value:
            if name not in known:
                raise ConfigError(f"{where}{sign}{name}: unknown; {choices(name, known)}")


Positive = Annotated[float, Number(above=0)]


def check_settings(settings: Any, where: str = "", around: Sequence[Any] = ()) -> None:
    """Make the nested settings of a dataclass, and raise ConfigError for what its fields rule out.

    Numbers, flags, texts, lists, mappings, and what is in them; other annotations allow everything.
    `where` is its place in the settings of a study, `around` the settings that it belongs to.
    """
    kind: Any = type(settings)
    hints = _hints(kind)
    before, owners = (f"{where}." if where else ""), (settings, *around)
    for field in fields(settings):
        _require_kind(before + field.name, getattr(settings, field.name), hints[field.name])
    for field in fields(settings):
        value = getattr(settings, field.name)
        built = _built(value, hints[field.name], before + field.name, owners)
        object.__setattr__(settings, field.name, built)
    for field in fields(settings):
        value = getattr(settings, field.name)
        _require(before + field.name, value, hints[field.name], owners)


def checked(kind: Any, settings: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Settings of a dataclass as plain values, whole numbers as floats where its fields are such.

    Raises ConfigError for a key that is none of its fields, and for what they rule out. Nested
    dataclasses are checked, too; fields of any kind are passed through.
    """
    hints = _hints(kind)
    before = f"{where}." if where else ""
    values = dict(settings)
    for key in hints if not where else ():
        if key not in settings:
            raise ConfigError(f"{key}: must be given: {key}=...")
    for key, value in settings.items():
        if (hint := hints.get(key)) is None:
            raise ConfigError(f"{before}{key}: no such key; {choices(str(key), hints)}")
        plain, _ = _split(hint)
        if isinstance(plain, type) and is_dataclass(plain):
            if not isinstance(value, Mapping):
                names = ", ".join(field.name for field in fields(plain))
                raise _wrong(before + key, value, f"a mapping of settings: {names}")
            values[key] = checked(plain, value, before + key)
            continue
        _require_kind(before + key, value, hint)
        _require(before + key, value, hint, ())
        if plain is float and value is not None:
            values[key] = float(value)
    return values


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def _wrong(where: str, value: object, wanted: str) -> ConfigError:
    text = "null" if value is None else repr(value)
    return ConfigError(f"{where}={text}: must be {wanted}")


# -- kinds -----------------------------------------------------------------------------------------

_KINDS: Mapping[Any, tuple[Callable[[object], bool], str]] = {
    Mapping: (lambda value: isinstance(value, Mapping), "a mapping of names to settings"),
    Sequence: (lambda value: isinstance(value, (list, tuple)), "a list"),
    list: (lambda value: isinstance(value, (list, tuple)), "a list, such as [a,b]"),
    dict: (lambda value: isinstance(value, Mapping), "a mapping, such as {name: value}"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (is_whole, "a whole number"),
    float: (is_number, "a number"),
    str: (lambda value: isinstance(value, str), "a text"),
}


def _require_kind(where: str, value: object, hint: Any) -> None:
    plain, _ = _split(hint)
    if value is None and _is_optional(hint):
        return
    if isinstance(plain, type) and is_dataclass(plain):
        if not isinstance(value, (Mapping, plain)):
            raise _wrong(where, value, "a mapping of settings")
        return
    fits, wanted = _KINDS.get(get_origin(plain) or plain, (lambda _: True, ""))
    if not fits(value):
        raise _wrong(where, value, wanted)
    for place, inner, inner_hint in _inside(where, value, plain):
        _require_kind(place, inner, inner_hint)


def _require(where: str, value: Any, hint: Any, owners: Sequence[Any]) -> None:
    """The constraints of an annotation, and of those inside it."""
    if value is None:
        return
    plain, constraints = _split(hint)
    for constraint in constraints:
        constraint.require(where, value, owners)
    for place, inner, inner_hint in _inside(where, value, plain):
        _require(place, inner, inner_hint, owners)


def _built(value: Any, hint: Any, where: str, owners: Sequence[Any]) -> Any:
    """`value` with the dataclasses that its annotation names in the place of their settings."""
    plain, _ = _split(hint)
    kinds = get_args(plain)
    if isinstance(plain, type) and is_dataclass(plain) and isinstance(value, Mapping):
        refuse_settings(where.rpartition(".")[2], value, plain, where)
        built = plain(**value)
        check_settings(built, where, owners)
        return built
    if isinstance(value, Mapping) and len(kinds) == 2:
        return {
            key: _built(inner, kinds[1], f"{where}.{key}", owners) for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)) and len(kinds) == 1:
        return [_built(inner, kinds[0], where, owners) for inner in value]
    return value


def _inside(where: str, value: object, plain: Any) -> Iterator[tuple[str, Any, Any]]:
    """What a mapping or list holds, each with its place and its annotation."""
    kinds = get_args(plain)
    if isinstance(value, Mapping) and len(kinds) == 2:
        yield from ((f"{where}.{key}", inner, kinds[1]) for key, inner in value.items())
    elif isinstance(value, (list, tuple)) and len(kinds) == 1:
        yield from ((where, inner, kinds[0]) for inner in value)


@cache
def _split(hint: Any) -> tuple[Any, Sequence[Constraint]]:
    """X and the constraints of `Annotated[X, ...]`, also where None is allowed besides."""
    if get_origin(hint) is Annotated:
        return _split(get_args(hint)[0])[0], hint.__metadata__
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return _split(kinds[0]) if NoneType in get_args(hint) and len(kinds) == 1 else (hint, ())


def _is_optional(hint: Any) -> bool:
    """Whether an annotation allows None."""
    inside = get_args(hint)
    return NoneType in inside or (get_origin(hint) is Annotated and _is_optional(inside[0]))


def _leaves(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{where}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(where, inner)
    else:
        yield where, value

"""Reproduction of a published result: run its arms, then analyse them as the publication does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import NoneType
from typing import Annotated, Any, ClassVar, Protocol, get_args, get_origin, get_type_hints

from pagedsim.core import ConfigError
from pagedsim.core.errors import choices, refuse_settings, require_number
from pagedsim.metrics.arms import Run
from pagedsim.run.job import Arm
from pagedsim.run.objects import require_kinds
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, BackendName, Study

ByArm = Mapping[str, Sequence[Run]]
"""The runs of each arm, one per seed."""


@dataclass(frozen=True, kw_only=True)
class Reproduction(Study):
    """A figure or table of a paper: the arms that it needs, and their analysis."""

    backends: ClassVar[Sequence[BackendName]] = ("sim",)
    one_server = True
    why = "what was published is simulated here"

    title: str
    question: str
    source: str

    def __post_init__(self) -> None:
        check_settings(self)

    @abstractmethod
    def arms(self) -> Mapping[str, Sequence[str]]:
        """Names of runs, and the overrides that make them."""

    @abstractmethod
    def read_arms(self, runs: ByArm) -> Analysis:
        """The analysis of all runs."""

    def next_runs(self, runs: Runs) -> list[Arm]:
        return [Arm(name, changes) for name, changes in self.arms().items()]

    def analyse(self, runs: Runs) -> Analysis:
        by_arm: dict[str, list[Run]] = {}
        for run in runs.comparable:
            by_arm.setdefault(run.arm, []).append(run)
        reading = self.read_arms(by_arm)
        return replace(reading, notes=[*reading.notes, *runs.notices()])


def arm(*parts: str) -> str:
    """The name of an arm; empty parts are left out.

    >>> arm("chat", "", "2 per s")
    'chat, 2 per s'
    """
    return ", ".join(part for part in parts if part)


# -- checks of a study's settings ------------------------------------------------------------------
# Constraints stand in `Annotated` fields, and nested groups of settings become dataclasses: a field
# such as `loads: Mapping[str, Load]`, where `Load` is one, takes a mapping of settings for each
# load and holds the objects made of them.
#
#     base: Annotated[str, In("policies")]
#     rates: Annotated[Sequence[float], Number(above=0), Count()]


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
Names = Mapping[str, Sequence[str]]
"""The overrides of each name."""


def check_settings(of: Any, where: str = "", around: Sequence[Any] = ()) -> None:
    """Build the nested settings of a dataclass; raise ConfigError for values that its constraints
    exclude.

    `where` is the path of the settings in the study, `around` the settings that contain them.
    """
    require_kinds(of, where)
    hints = get_type_hints(type(of), include_extras=True)
    before, owners = (f"{where}." if where else ""), (of, *around)
    for field in fields(of):
        built = _built(getattr(of, field.name), hints[field.name], before + field.name, owners)
        object.__setattr__(of, field.name, built)
    for field in fields(of):
        _require(before + field.name, getattr(of, field.name), hints[field.name], owners)


def _require(where: str, value: Any, hint: Any, owners: Sequence[Any]) -> None:
    """Check the constraints of an annotation and of the annotations inside it."""
    if value is None:
        return
    plain, constraints = _split(hint)
    for constraint in constraints:
        constraint.require(where, value, owners)
    inside = get_args(plain)
    if isinstance(value, Mapping) and len(inside) == 2:
        for key, item in value.items():
            _require(f"{where}.{key}", item, inside[1], owners)
    elif isinstance(value, (list, tuple)) and len(inside) == 1:
        for item in value:
            _require(where, item, inside[0], owners)


def _built(value: Any, hint: Any, where: str, owners: Sequence[Any]) -> Any:
    """`value` with settings replaced by the dataclasses that its annotation names."""
    hint, _ = _split(hint)
    inside = get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, Mapping):
        refuse_settings(where.rpartition(".")[2], value, hint, where)
        built = hint(**value)
        check_settings(built, where, owners)
        return built
    if isinstance(value, Mapping) and len(inside) == 2:
        return {key: _built(v, inside[1], f"{where}.{key}", owners) for key, v in value.items()}
    if isinstance(value, (list, tuple)) and len(inside) == 1:
        return [_built(item, inside[0], where, owners) for item in value]
    return value


def _split(hint: Any) -> tuple[Any, Sequence[Constraint]]:
    """X and the constraints of `Annotated[X, ...]`, also inside an optional."""
    if get_origin(hint) is Annotated:
        return _split(get_args(hint)[0])[0], hint.__metadata__
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return _split(kinds[0]) if NoneType in get_args(hint) and len(kinds) == 1 else (hint, ())


def _leaves(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{where}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(where, item)
    else:
        yield where, value

"""The settings that the arms of a study vary, and those within whose values arms are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Value = str | float | bool | None
"""Of a setting; a list or a mapping as it is typed."""
Cell = tuple[Value, ...]
"""The values of the conditions."""
_REQUESTS = "workload."
"""Settings that change what is asked for: arms are compared under the same requests."""


def said(value: object) -> str:
    """A value in words: as it is typed, without quotes.

    >>> said(None), said(True), said(4)
    ('null', 'true', '4')
    """
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def are_numbers(values: Iterable[object]) -> bool:
    """Whether all of them are, so that they have an order."""
    return all(type(value) in (int, float) for value in values)


def ascending(values: Iterable[Any]) -> list[Any]:
    """Distinct values: numbers from the least on, others as they come."""
    distinct = list(dict.fromkeys(values))
    return sorted(distinct) if are_numbers(distinct) else distinct


@dataclass(frozen=True)
class Variation:
    """What differs between arms by design."""

    values: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    """By arm and setting."""
    conditions: tuple[str, ...] = ()
    """Settings within whose values arms are compared, such as the load; the first is the x axis of
    curves."""
    series: Mapping[str, str] = field(default_factory=dict)
    """What is compared within a cell of the conditions, by arm."""
    mixed: tuple[str, ...] = ()
    """Settings that would be conditions if every arm had been run under each."""

    @classmethod
    def of(
        cls,
        values: Mapping[str, Mapping[str, Value]],
        conditions: Sequence[str] = (),
        series: Mapping[str, str] | None = None,
    ) -> Variation:
        """Without `conditions` they are the settings of the workload, if arms also differ in others
        and every cell has the same series; a series is named after its other settings."""
        settings = list(dict.fromkeys(key for of in values.values() for key in of))
        chosen = conditions or [key for key in settings if key.startswith(_REQUESTS)]
        others = [key for key in settings if key not in chosen]
        names = {arm: ", ".join(said(of[key]) for key in others) for arm, of in values.items()}
        variation = cls(values, tuple(chosen), {**names, **(series or {})})
        if conditions or variation._whole:
            return variation
        return cls(values, mixed=tuple(chosen) if others else ())

    @property
    def _whole(self) -> bool:
        """Whether several series are each in every one of several cells."""
        cells: dict[Cell, list[str]] = {}
        for arm, name in self.series.items():
            cells.setdefault(self.cell_of(arm), []).append(name)
        series = set(self.series.values())
        return min(len(cells), len(series)) > 1 and all(
            len(cell) == len(series) and set(cell) == series for cell in cells.values()
        )

    @property
    def settings(self) -> list[str]:
        """Those that differ between arms."""
        return list(dict.fromkeys(key for of in self.values.values() for key in of))

    def cell_of(self, arm: str) -> Cell:
        """The values of the conditions under which an arm ran."""
        return tuple(self.values[arm][key] for key in self.conditions)

    def typed(self, arm: str) -> list[str]:
        """What an arm varies as notes have it, such as "(rate=4)"."""
        values = self.values.get(arm, {}).items()
        return [f"({key.rpartition('.')[2]}={said(value)})" for key, value in values]

    def at(self, cell: Cell) -> str:
        """A cell in words, such as "rate 4, block_size 16"; a facet, which is a cell without the
        first condition, so, too. Empty without conditions."""
        keys = self.conditions[len(self.conditions) - len(cell) :]
        pairs = zip((key.rpartition(".")[2] for key in keys), cell, strict=True)
        return ", ".join(f"{name} {said(value)}" for name, value in pairs)

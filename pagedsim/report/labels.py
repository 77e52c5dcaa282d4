"""Placement of labels beside dots without overlaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import cos, dist, hypot, pi, sin
from typing import TYPE_CHECKING, Any

from pagedsim.report.style import GRID, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DISTANCES = (7.0, 11.0, 16.0, 23.0, 32.0, 44.0, 60.0, 80.0, 104.0, 132.0)
"""Distances in points from dot to label, in the order of trial."""
_DIRECTIONS = 16
_NEAR = 12.0
"""Distance in points above which a line connects label and dot."""
_DOT, _AIR = 4.0, 1.5
"""Free space in points around a dot and around a label."""


Point = tuple[float, float]


@dataclass(frozen=True)
class Label:
    """A label of a dot."""

    text: str
    at: Point
    """The dot, in data coordinates."""
    look: Mapping[str, Any]
    """Text properties of matplotlib."""


@dataclass(frozen=True)
class _Box:
    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: _Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.bottom < other.top and other.bottom < self.top

    def within(self, other: _Box) -> bool:
        across = other.left <= self.left and self.right <= other.right
        return across and other.bottom <= self.bottom and self.top <= other.top


def place(axes: Axes, labels: Sequence[Label], line: Sequence[Point] = ()) -> list[Label]:
    """Draw the labels in order of priority; returns those that do not fit.

    Labels avoid the `line` through these points. Limits and position of the axes must be final.
    """
    to_points = 72 / axes.figure.dpi
    room = _box(axes.get_window_extent().extents, to_points)
    dots = [_dot(axes, label.at, to_points) for label in labels]
    taken = [_around_point(at, _DOT) for at in dots]
    corners = [_dot(axes, at, to_points) for at in line]
    taken += [_around_point(at, _AIR) for ends in pairwise(corners) for at in _between(*ends)]
    left_out = []
    for label, dot in zip(labels, dots, strict=True):
        width, height = _size(axes, label, to_points)
        places = (box for box in _around(dot, width, height) if box.within(room))
        free = (box for box in places if not any(box.meets(other) for other in taken))
        if (box := next(free, None)) is None:
            left_out.append(label)
            continue
        taken.append(box)
        _write(axes, label, dot, box)
    return left_out


def _dot(axes: Axes, at: Point, to_points: float) -> Point:
    """Position in the figure in points."""
    x, y = axes.transData.transform(at)
    return float(x) * to_points, float(y) * to_points


def _around_point(at: Point, free: float) -> _Box:
    return _Box(at[0] - free, at[1] - free, at[0] + free, at[1] + free)


def _between(first: Point, last: Point) -> Iterator[Point]:
    steps = int(dist(first, last) / _AIR) + 1
    for step in range(steps + 1):
        share = step / steps
        yield first[0] + share * (last[0] - first[0]), first[1] + share * (last[1] - first[1])


def _size(axes: Axes, label: Label, to_points: float) -> tuple[float, float]:
    """Width and height of a label including free space."""
    text = axes.text(0, 0, label.text, **label.look)
    box = _box(text.get_window_extent().extents, to_points)
    text.remove()
    return box.right - box.left + 2 * _AIR, box.top - box.bottom + 2 * _AIR


def _around(dot: Point, width: float, height: float) -> Iterator[_Box]:
    """Candidate boxes around a dot, by distance, starting on the right."""
    for distance in _DISTANCES:
        for turn in range(_DIRECTIONS):
            angle = 2 * pi * turn / _DIRECTIONS
            # The box touches a circle around the dot from the outside.
            x = dot[0] + cos(angle) * (distance + width / 2) - width / 2
            y = dot[1] + sin(angle) * (distance + height / 2) - height / 2
            yield _Box(x, y, x + width, y + height)


def _write(axes: Axes, label: Label, dot: Point, box: _Box) -> None:
    middle = (box.left + box.right) / 2, (box.bottom + box.top) / 2
    nearest = (
        min(max(dot[0], box.left), box.right) - dot[0],
        min(max(dot[1], box.bottom), box.top) - dot[1],
    )
    line = {"arrowstyle": "-", "color": GRID, "lw": 0.7, "shrinkA": 0, "shrinkB": 2}
    axes.annotate(
        label.text,
        label.at,
        (middle[0] - dot[0], middle[1] - dot[1]),
        textcoords="offset points",
        ha="center",
        va="center",
        arrowprops=line if hypot(*nearest) > _NEAR else None,
        **({"color": INK} | dict(label.look)),
    )


def _box(extents: Any, scale: float) -> _Box:
    return _Box(*(float(extent) * scale for extent in extents))

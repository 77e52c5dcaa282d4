"""Names beside dots, placed so that none covers another or a dot."""

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
"""Points from a dot to its name, in the order in which they are tried."""
_DIRECTIONS = 16
_NEAR = 12.0
"""Up to here it is clear whose name it is; from further away a line leads to it."""
_DOT, _AIR = 4.0, 1.5
"""Points around a dot, and around a name, that stay free."""


Point = tuple[float, float]


@dataclass(frozen=True)
class Label:
    """A name for a dot."""

    text: str
    at: Point
    """The dot, in data coordinates."""
    look: Mapping[str, Any]
    """How the text looks, as matplotlib takes it."""


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
    """Draw the names, the first with the first choice of a place; returns those without one.

    None lies on the `line` through these points. The axes must have their limits and their place
    in the figure already.
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
    """Where it is in the figure, in points."""
    x, y = axes.transData.transform(at)
    return float(x) * to_points, float(y) * to_points


def _around_point(at: Point, free: float) -> _Box:
    return _Box(at[0] - free, at[1] - free, at[0] + free, at[1] + free)


def _between(first: Point, last: Point) -> Iterator[Point]:
    """Points on a line, so near to each other that nothing fits between them."""
    steps = int(dist(first, last) / _AIR) + 1
    for step in range(steps + 1):
        share = step / steps
        yield first[0] + share * (last[0] - first[0]), first[1] + share * (last[1] - first[1])


def _size(axes: Axes, label: Label, to_points: float) -> tuple[float, float]:
    """Width and height of a name, with the air around it."""
    text = axes.text(0, 0, label.text, **label.look)
    box = _box(text.get_window_extent().extents, to_points)
    text.remove()
    return box.right - box.left + 2 * _AIR, box.top - box.bottom + 2 * _AIR


def _around(dot: Point, width: float, height: float) -> Iterator[_Box]:
    """Places around a dot, the nearest first, and of those the one to the right."""
    for distance in _DISTANCES:
        for turn in range(_DIRECTIONS):
            angle = 2 * pi * turn / _DIRECTIONS
            # The box touches a circle around the dot from outside.
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
    return _Box(*(float(one) * scale for one in extents))

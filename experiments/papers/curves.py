"""What pictures of curves share: a line through points, and a key above the panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagedsim.report.style import Look, key, margins

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def joined(axes: Axes, x: Sequence[float], y: Sequence[float], look: Look) -> None:
    """Points that a line joins."""
    axes.plot(x, y, color=look.colour, ls=look.dashes, marker="o", ms=3.2)


def keyed(figure: Figure, entries: Mapping[str, Any], left: float = 0.62, **gaps: float) -> Figure:
    """The figure, with margins, gaps between its panels, and a key; `left` is in inches."""
    margins(figure, left=left)
    figure.subplots_adjust(**gaps)
    key(figure, dict(entries))
    return figure

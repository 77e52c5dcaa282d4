"""Roofline plot of an estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagedsim.report.style import GRID, MUTED, key, looks, margins, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^D"
_MARGIN = 2.0
"""Margin of the axes, as a factor."""
_PLAIN = ("fp16", "reached")
"""The roofs that the cost model uses."""
_NAMED = 2
"""Maximum number of labelled products at one point."""

Point = tuple[float, float]
"""(FLOP per byte, FLOP/s); infinite intensity if nothing is read."""


def draw_roofline(data: Mapping[str, Any]) -> Figure:
    """FLOP/s over FLOP per byte: the roofs, each step's products, and, filled, the step itself."""
    from matplotlib.lines import Line2D

    products = {name: _by_point(found) for name, found in data["products"].items()}
    whole = {name: _point(one, one["seconds"]) for name, one in data["steps"].items()}
    points = [*whole.values(), *(point for found in products.values() for point in found)]
    figure = new_figure(4.6)
    axes = figure.subplots()
    right = _draw_roofs(axes, data, [x for x, _ in points if math.isfinite(x)])
    look, entries = looks(list(products)), {}
    labels: dict[Point, list[str]] = {}
    for (name, found), marker in zip(products.items(), _MARKERS, strict=False):
        colour = look[name].colour
        for (x, y), names in found.items():
            at = min(x, right / 1.2), y  # infinite intensity is drawn at the edge
            axes.plot(*at, marker, ms=6, color=colour, mfc="none", mew=1.4)
            near = float(f"{at[0]:.2g}"), float(f"{y:.2g}")
            labels.setdefault(near, []).extend(names)
        axes.plot(*whole[name], marker, ms=8, color=colour)
        label = _name(name, data)
        entries[label] = Line2D([], [], ls="", marker=marker, color=colour, label=label)
    for at, names in labels.items():
        _label(axes, at, list(dict.fromkeys(names)), at[0] > right / _MARGIN)
    axes.set_ylim(bottom=min(y for _, y in points) / _MARGIN**4)
    tidy(axes, x="FLOP for each byte that is read", y="FLOP/s of a GPU")
    margins(figure, left=0.75)
    key(figure, entries)
    return figure


def _draw_roofs(axes: Axes, data: Mapping[str, Any], shown: list[float]) -> float:
    """Draw the data sheet's roofs and, dashed, the attainable ones; returns the right edge."""
    peak, reached = data["peak"], data["reached"]
    ridge = max(peak["flop_rates"].values()) / peak["bandwidth"]
    left, right = min(shown) / _MARGIN, max(ridge, *shown) * _MARGIN**2
    formats: dict[float, list[str]] = {}
    for name, rate in peak["flop_rates"].items():
        formats.setdefault(rate, []).append(name)
    roofs = [(peak["bandwidth"], rate, "-", ", ".join(names)) for rate, names in formats.items()]
    roofs.append((reached["bandwidth"], reached["flop_rate"], "--", "reached"))
    for bandwidth, rate, dashes, name in roofs:
        xs, ys = [left, rate / bandwidth, right], [left * bandwidth, rate, rate]
        axes.plot(xs, ys, dashes, color=MUTED if name in _PLAIN else GRID, lw=1.2, zorder=1)
        place: Any = {"textcoords": "offset points", "ha": "right", "fontsize": 8, "color": MUTED}
        axes.annotate(name, (right, rate), (-2, 3), **place)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    return right


def _by_point(products: list[Mapping[str, Any]]) -> dict[Point, list[str]]:
    """Names of the products at each point, rounded to three digits."""
    found: dict[Point, list[str]] = {}
    for one in products:
        x, y = _point(one, max(one["computing_s"], one["reading_s"]))
        found.setdefault((float(f"{x:.3g}"), float(f"{y:.3g}")), []).append(one["name"])
    return found


def _point(work: Mapping[str, Any], seconds: float) -> Point:
    return work["flop"] / work["bytes"] if work["bytes"] else math.inf, work["flop"] / seconds


def _label(axes: Axes, at: Point, names: list[str], leftwards: bool) -> None:
    """Label a point below, on the left if there is no room on the right."""
    more = len(names) - _NAMED
    text = ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
    side, slope = ("right", 38) if leftwards else ("left", -38)
    style: Any = {"fontsize": 7, "color": MUTED, "rotation": slope, "rotation_mode": "anchor"}
    offset = -4 if leftwards else 4, -5
    axes.annotate(text, at, offset, textcoords="offset points", ha=side, va="top", **style)


def _name(step: str, data: Mapping[str, Any]) -> str:
    if step == "prefill":
        return f"prefill of {data['prompt']:,} tokens"
    return f"decode of {data['batches'][step.removeprefix('decode_')]:,}"

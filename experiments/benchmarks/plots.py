"""Pictures of results: a roofline of attention, and swap speed by the size of a copy."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from pagedsim.report.style import (
    DECODE,
    MUTED,
    PREFILL,
    YIELD,
    drawing,
    margins,
    new_figure,
    plain_log_ticks,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"decode": ("o", DECODE), "chunk": ("^", PREFILL), "prefill": ("s", PREFILL)}


def roofline(result: Mapping[str, Any]) -> Figure:
    """FLOP/s over FLOP a byte of `kernels.json`, under the limits of a copy and a product."""
    with drawing():
        figure = new_figure(4.4)
        axes = figure.subplots()
        timed = [one for one in result["cases"] if "of_limit" in one]
        for kind, (marker, colour) in KINDS.items():
            points = [one for one in timed if one["kind"] == kind]
            axes.plot(
                [one["flop"] / one["bytes"] for one in points],
                [one["tflop_s"] for one in points],
                marker,
                color=colour,
                ms=5,
                alpha=0.8,
                label=kind,
            )
        axes.set(xscale="log", yscale="log")
        if timed:
            _roof(axes, timed)
        tidy(axes, x="FLOP a byte", y="TFLOP/s")
        for axis in (axes.xaxis, axes.yaxis):
            plain_log_ticks(axis)
        axes.legend(loc="lower right")
        axes.set_title(f"Paged attention on {result['device']}, {result['dtype']}")
        margins(figure, left=0.8, top=0.4)
        return figure


def _roof(axes: Any, timed: list[dict[str, Any]]) -> None:
    """The slope of a copy up to the ceiling of a product."""
    copy = median(one["limit"]["copy_gb_s"] for one in timed) / 1e3
    product = median(one["limit"]["product_tflop_s"] for one in timed)
    intensities = [one["flop"] / one["bytes"] for one in timed]
    corner = product / copy
    low, high = min(intensities) / 2, max(*intensities, corner) * 2
    axes.plot([low, corner, high], [low * copy, product, product], color=MUTED, lw=1.2)
    where = {"color": MUTED, "fontsize": 8, "va": "bottom"}
    axes.text(corner, product, f"a product: {product:,.3g} TFLOP/s", ha="left", **where)
    axes.text(low, low * copy * 1.5, f"a copy: {copy * 1e3:,.0f} GB/s", ha="left", **where)


def swaps(result: Mapping[str, Any]) -> Figure:
    """Swap speed of `swap.json`, as a share of one pinned copy's."""
    with drawing():
        figure = new_figure(3.8)
        axes = figure.subplots()
        for layout, colour in (("block", DECODE), ("layer", YIELD)):
            points = [one for one in result["swaps"] if one["layout"] == layout and one["right"]]
            for way, marker in (("out", "^"), ("in", "v")):
                axes.plot(
                    [one["copy_bytes"] / 1024 for one in points],
                    [one[way]["of_pinned"] for one in points],
                    marker,
                    color=colour,
                    ms=5,
                    alpha=0.8,
                    label=f"a copy a {layout}, {way}",
                )
        axes.set(xscale="log")
        axes.set_ylim(bottom=0)
        plain_log_ticks(axes.xaxis)
        tidy(axes, x="KiB a copy", y="speed / one pinned copy's")
        axes.legend(loc="lower right")
        axes.set_title(f"Swap on {result['device']}")
        margins(figure, left=0.7, top=0.4)
        return figure

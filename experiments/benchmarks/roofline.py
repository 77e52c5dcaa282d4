"""A roofline: what was reached over FLOP a byte, under what a copy and a product allow."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from pagedsim.report.style import (
    DECODE,
    MUTED,
    PREFILL,
    drawing,
    margins,
    new_figure,
    plain_log_ticks,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"decode": ("o", DECODE), "chunk": ("^", PREFILL), "prefill": ("s", PREFILL)}


def draw(result: Mapping[str, Any]) -> Figure:
    """The picture of `kernels.json`."""
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
    """The copy's slope as far as the product's ceiling."""
    copy = median(one["limit"]["copy_gb_s"] for one in timed) / 1e3
    product = median(one["limit"]["product_tflop_s"] for one in timed)
    intensities = [one["flop"] / one["bytes"] for one in timed]
    low, high = min(intensities) / 2, max(*intensities, product / copy) * 2
    corner = product / copy
    axes.plot([low, corner, high], [low * copy, product, product], color=MUTED, lw=1.2)
    where = {"color": MUTED, "fontsize": 8, "va": "bottom"}
    axes.text(corner, product, f"a product: {product:,.3g} TFLOP/s", ha="left", **where)
    axes.text(low, low * copy * 1.5, f"a copy: {copy * 1e3:,.0f} GB/s", ha="left", **where)

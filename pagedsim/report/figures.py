"""Figures of a report: rendering and writing."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedsim.core import ConfigError
from pagedsim.report.style import DARK, DPI, drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FigureSpec:
    """A figure to be drawn."""

    title: str
    caption: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Plot:
    """A rendered figure."""

    name: str
    title: str
    caption: str
    png: bytes
    svg: str
    """For inlining: without a header, with colours as CSS variables of `COLOURS`."""


COLOURS = {light: f"--c{light[1:]}" for light in DARK}
"""The CSS variable of each colour in a plot's SVG."""


def drawn(drawings: Mapping[str, FigureSpec], broken: dict[str, str] | None = None) -> list[Plot]:
    """Render the figures. The error of a user's figure that fails is added to `broken` under its
    name, or raised without `broken`. matplotlib is imported here, not at module level."""
    plots = []
    with drawing():
        for name, figure in drawings.items():
            try:
                image = render(name, figure.draw())
                plots.append(Plot(name, figure.title, figure.caption, *image))
            except ConfigError as error:
                if broken is None:
                    raise
                broken[name] = str(error)
    return plots


def render(name: str, figure: Figure) -> tuple[bytes, str]:
    """A figure as PNG, and as SVG for a page."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if not axis.get_label_text():
                axis.set_label_coords(0, 0)  # skips the costly placement of empty labels
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return png.getvalue(), _for_page(name, svg.getvalue())


def _for_page(name: str, svg: str) -> str:
    """Prepare an SVG for inlining: unique ids, the page's colours and font."""
    svg = re.sub(r"^.*?(?=<svg)", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1">', svg, count=1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg).replace("xlink:href", "href")
    # Paths and other attributes to two decimals: a hundredth of a point.
    svg = re.sub(r'="[^"]*\.\d{3}[^"]*"', lambda m: re.sub(r"(?<=\d\.\d\d)\d+", "", m[0]), svg)
    svg = re.sub(
        r"#[0-9a-f]{6}\b", lambda m: f"var({COLOURS[m[0]]})" if m[0] in COLOURS else m[0], svg
    )
    return svg.replace("'DejaVu Sans'", "inherit")

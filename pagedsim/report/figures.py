"""Figures of a report: rendering and writing."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.report.style import DARK, DPI, drawing, plain_log_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pagedsim.metrics.arms import Run


FORMATS = ("png", "pdf", "svg")
"""Formats of the figures in plots/."""


def check_formats(formats: Sequence[str]) -> None:
    """Raise ConfigError for a format that figures are not written in."""
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"figures: {name}: must be of {', '.join(FORMATS)}")


@dataclass(frozen=True)
class Axis:
    """What lies along one side of a panel."""

    label: str
    unit: str = ""
    log: bool = False
    ticks: Mapping[float, str] = field(default_factory=dict)
    """Names of places, where these are no quantities."""
    limits: tuple[float, float] | None = None
    """Its ends, where these are not those of the lines."""

    @property
    def text(self) -> str:
        """The label with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


def set_scales(axes: Axes, panel: Panel) -> None:
    """Give matplotlib's axes the scales, ticks and limits of a panel; a linear y axis without
    limits has 0."""
    for side, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        wanted: Axis = getattr(panel, side)
        if wanted.log:
            axes.set(**{f"{side}scale": "log"})
            plain_log_ticks(axis)
        if wanted.ticks:
            axis.set_ticks([*wanted.ticks], [*wanted.ticks.values()])
        if wanted.limits is not None:
            axes.set(**{f"{side}lim": wanted.limits})
    if not panel.y.log and panel.y.limits is None:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    cut_intervals(axes, panel)


def cut_intervals(axes: Axes, panel: Panel) -> None:
    """Those of few seeds may reach far: they make an axis no more than twice as long as lines do,
    or a logarithmic one longer by a decade at either end."""
    bound = (line for line in panel.series if line.high is not None)
    known = [y for line in bound for y in line.y.tolist() if not math.isnan(y)]
    if not known or max(known) <= 0 or panel.y.limits is not None:
        return
    low, high = axes.get_ylim()
    if panel.y.log:
        axes.set_ylim(max(low, min(known) / 10), min(high, max(known) * 10))
    else:
        axes.set_ylim(top=min(high, 2.1 * max(known)))


def draw_band(axes: Axes, line: Series, colour: str) -> None:
    """The interval about a line, if it has any."""
    if line.low is not None and line.high is not None:
        low, high = (np.where(np.isnan(end), line.y, end) for end in (line.low, line.high))
        axes.fill_between(line.x, low, high, color=colour, alpha=0.16, lw=0)


def time_axis(runs: Sequence[Run]) -> Axis:
    """The axis of a plot over time."""
    return Axis("time" if any(run.measured for run in runs) else "simulated time", "s")


@dataclass(frozen=True, eq=False)
class Series:
    """One line: of an arm, of a client, or of a client under an arm; None: of all together."""

    arm: str | None
    client: str | None
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    low: NDArray[np.float64] | None = None
    high: NDArray[np.float64] | None = None
    """The interval about each y; NaN where there is none."""
    until: float | None = None
    """Of a line in steps, whose values hold from their x to the next: where the last one ends."""

    @property
    def edges(self) -> NDArray[np.float64]:
        """Where the steps begin, and where the last one ends."""
        assert self.until is not None
        return np.append(self.x, self.until)


@dataclass(frozen=True)
class Panel:
    """Lines over the same axes."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    shaded: Sequence[tuple[float, float]] = ()
    """Stretches of x in grey."""


@dataclass(frozen=True)
class FigureData:
    """The numbers of a figure, in the units of its axes."""

    panels: Sequence[Panel]
    across: int = 1
    """How many panels are side by side where there is room."""


@dataclass(frozen=True)
class FigureSpec:
    """A figure to be drawn."""

    title: str
    caption: str
    draw: Callable[[], Figure]
    data: Callable[[], FigureData] | None = None
    """The numbers behind its lines, where it consists of lines: for charts on the page."""


@dataclass(frozen=True)
class Plot:
    """A rendered figure."""

    name: str
    title: str
    caption: str
    png: bytes
    svg: str
    """For inlining: without a header, with colours as CSS variables of `COLOURS`."""
    data: FigureData | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Further formats, by suffix."""


COLOURS = {light: f"--c{light[1:]}" for light in DARK}
"""The CSS variable of each colour in a plot's SVG."""


def drawn(
    drawings: Mapping[str, FigureSpec],
    broken: dict[str, str] | None = None,
    formats: Sequence[str] = (),
) -> list[Plot]:
    """Render the figures, also in `formats`. The error of a user's figure that fails is added to
    `broken` under its name, or raised without `broken`. matplotlib is imported here, not at module
    level."""
    plots = []
    with drawing():
        for name, figure in drawings.items():
            try:
                canvas = figure.draw()
                data = figure.data and figure.data()
                files = {suffix: saved(canvas, suffix) for suffix in formats}
                image = render(name, canvas)
                plots.append(Plot(name, figure.title, figure.caption, *image, data, files))
            except ConfigError as error:
                if broken is None:
                    raise
                broken[name] = str(error)
    return plots


def saved(figure: Figure, suffix: str) -> bytes:
    """A figure in a vector format, the same at any time."""
    date = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    file = io.BytesIO()
    figure.savefig(file, format=suffix, metadata=date.get(suffix))
    return file.getvalue()


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


def arm_id(number: int) -> str:
    """The `gid` of an artist of the arm with this number, with which a page hides it."""
    return f"arm:{number}"


def _for_page(name: str, svg: str) -> str:
    """Prepare an SVG for inlining: unique ids, the page's colours and font."""
    svg = re.sub(r"^.*?(?=<svg)", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1">', svg, count=1)
    svg = re.sub(r'\bid="arm:(\d+)"', r'data-arm="\1"', svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg).replace("xlink:href", "href")
    # Paths and other attributes to two decimals: a hundredth of a point.
    svg = re.sub(r'="[^"]*\.\d{3}[^"]*"', lambda m: re.sub(r"(?<=\d\.\d\d)\d+", "", m[0]), svg)
    svg = re.sub(
        r"#[0-9a-f]{6}\b", lambda m: f"var({COLOURS[m[0]]})" if m[0] in COLOURS else m[0], svg
    )
    return svg.replace("'DejaVu Sans'", "inherit")

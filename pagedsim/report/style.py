"""Figure style: colour-blind safe colours in a light and a dark version, layout helpers.

The arms' colours are Okabe and Ito's. Figures are drawn once in light colours, which a page
replaces by CSS variables for light and dark mode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pagedsim.metrics.arms import Arms

INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
QUEUED, PREFILL, DECODE, YIELD = "#b1bac4", "#e69f01", "#0072b3", "#d55e01"
REJECTED = "#6e7781"
PREEMPTED, SWAPPED, AGAIN = "#f3c1a9", "#cc79a8", "#8f5a00"
_ARMS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_RAMP = ("#440154", "#443983", "#31688e", "#21918c", "#35b779", "#6ece58", "#b5c72c")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))

DARK: dict[str, str] = json.loads(
    files("pagedsim.report").joinpath("dark.json").read_text(encoding="utf-8")
)
"""Dark-mode replacement of every colour."""

_RC: Any = {
    "font.size": 9,
    "font.family": ["DejaVu Sans"],
    "svg.fonttype": "none",
    "svg.hashsalt": "pagedsim",
    "pdf.fonttype": 42,  # IEEE and ACM refuse Type 3
    "ps.fonttype": 42,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titley": 1.0,  # nothing is drawn above a panel that its title would have to avoid
    "axes.titlecolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
}
WIDTH = 9.2
DPI = 110
_LINE, _HANDLE, _LETTER = 0.2, 0.62, 0.078
"""Legend sizes in inches: line height, handle width, and width of a letter."""


@dataclass(frozen=True)
class Look:
    """Colour and dashes of an arm, the same in every figure."""

    colour: str
    dashes: Any


def looks(arms: Sequence[str], ordered: bool = False) -> dict[str, Look]:
    """A look for each arm; sweeps (`ordered`) use a ramp from dark to light.

    More arms than colours differ by their dashes.
    """
    if ordered:
        last = max(len(arms) - 1, 1)
        ramp = [_RAMP[round(i * (len(_RAMP) - 1) / last)] for i in range(len(arms))]
        return {arm: Look(ramp[i], _DASHES[i % 2]) for i, arm in enumerate(arms)}
    looked = {}
    for i, arm in enumerate(arms):
        turn, colour = divmod(i, len(_ARMS))
        looked[arm] = Look(_ARMS[colour], _DASHES[(i + turn) % len(_DASHES)])
    return looked


@contextmanager
def drawing() -> Iterator[None]:
    """Context in which matplotlib uses this style."""
    import matplotlib

    # Artists generate docstrings of all their properties, which is half of the import time.
    artists: Any = import_module("matplotlib.artist")
    artists.Artist._update_set_signature_and_docstring = lambda: None
    artists.kwdoc = lambda artist: ""
    with matplotlib.rc_context(_RC):
        yield


def new_figure(height: float) -> Figure:
    """A figure of the page's width that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    FigureCanvasAgg(figure)
    return figure


def margins(
    figure: Figure,
    *,
    left: float = 0.62,
    right: float = 0.2,
    top: float = 0.62,
    bottom: float = 0.5,
    **between: float,
) -> None:
    """Set the margins around the panels in inches, independent of the figure size; and the space
    between panels, `hspace` and `wspace`, as shares of a panel."""
    width, height = figure.get_size_inches()
    across = {"left": left / width, "right": 1 - right / width}
    upwards = {"bottom": bottom / height, "top": 1 - top / height}
    figure.subplots_adjust(**across, **upwards, **between)


def key(figure: Figure, entries: dict[str, Any]) -> None:
    """A legend at the top; an entry that is a colour is shown as a filled patch."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for name, look in entries.items():
        if isinstance(look, Look):
            line = {"color": look.colour, "linestyle": look.dashes, "lw": 2}
            handles.append(Line2D([], [], **line, label=short(name)))
        elif isinstance(look, str):
            handles.append(Patch(color=look, label=name))
        else:
            handles.append(look)
    lines = _lines([handle.get_label() for handle in handles])
    height = _make_room(figure, _LINE * (lines - 1))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.1 / WIDTH, 1 - 0.02 / height),
        ncols=-(-len(handles) // lines),
        handlelength=2.4,
        columnspacing=1.4,
        borderaxespad=0.2,
    )


def _lines(labels: Sequence[str]) -> int:
    """Number of legend lines for `labels`, in columns as wide as the widest."""
    widest = max(_HANDLE + _LETTER * len(label) for label in labels)
    columns = max(1, min(10, int((WIDTH - 0.3) / widest)))
    if sum(_HANDLE + _LETTER * len(label) for label in labels) < WIDTH - 0.3 and len(labels) < 11:
        return 1
    return -(-len(labels) // columns)


def _make_room(figure: Figure, inches: float) -> float:
    """Extend the figure at the top without changing the panels; returns its height."""
    width, height = figure.get_size_inches()
    room = figure.subplotpars
    higher = height + inches
    figure.set_size_inches(width, higher)
    figure.subplots_adjust(bottom=room.bottom * height / higher, top=room.top * height / higher)
    return float(higher)


def short(name: str, most: int = 36) -> str:
    """Truncate a name to fit a figure."""
    return name if len(name) <= most else f"{name[: most - 1].rstrip()}…"


def entries(study: Arms, look: dict[str, Look]) -> dict[str, Any]:
    """Legend entries of arms; for a sweep, preceded by the name of the setting."""
    if not study.swept:
        return dict(look)
    from matplotlib.lines import Line2D

    return {"": Line2D([], [], ls="", label=f"{study.swept}:"), **look}


def annotate(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **look: Any
) -> None:
    """A small text at an offset in points from a place."""
    look = {"va": "center", "fontsize": 8.5, **look}
    axes.annotate(text, at, offset, textcoords="offset points", **look)


def tidy(axes: Axes, *, x: str | None = None, y: str | None = None) -> None:
    """Short major ticks, no minor ones, and axis labels if given."""
    from matplotlib.ticker import NullLocator

    for axis, label in ((axes.xaxis, x), (axes.yaxis, y)):
        axis.set_minor_locator(NullLocator())
        if label is not None:
            axis.set_label_text(label)
    axes.tick_params(length=2.5, width=0.7)


def stairs(axes: Axes, values: NDArray[Any], edges: NDArray[Any], look: Look) -> None:
    """A step line; faster than Axes.stairs, which computes the extent of each segment."""
    from matplotlib.patches import StepPatch

    line: dict[str, Any] = {"edgecolor": look.colour, "linestyle": look.dashes, "linewidth": 1.3}
    line |= {"baseline": None, "fill": False}
    axes.add_artist(StepPatch(values, edges, **line))
    axes.update_datalim([(edges[0], values.min()), (edges[-1], values.max())])
    axes.autoscale_view()


def plain_log_ticks(axis: Any) -> None:
    """Plain numbers (0.1, 1, 10) instead of powers on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    narrow = high < low * 30
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,), numticks=9))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))

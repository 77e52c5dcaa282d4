"""The pictures of orders by size: latency under load, what predictions are worth, who pays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.papers.curves import joined, keyed
from pagedsim.report.style import (
    MUTED,
    Look,
    looks,
    new_figure,
    plain_log_ticks,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3


def draw_curves(data: Mapping[str, Any]) -> Figure:
    """A panel for each curve, a line for each order."""
    every = data["curves"]
    look = _looks(order for one in every.values() for order in one["lines"])
    columns = min(COLUMNS, len(every))
    rows = -(-len(every) // columns)
    figure = new_figure(0.75 + 2.45 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (name, one) in zip(panels, every.items(), strict=False):
        for order, line in one["lines"].items():
            joined(axes, line["rate"], line["seconds"], look[order])
        for order, line in one["published"].items():
            own = look[order].colour
            axes.plot(line["rate"], line["seconds"], ":", color=own, marker="o", mfc="none", ms=4)
        if one["bound"] is not None:
            axes.axhline(one["bound"], color=MUTED, lw=0.9)
        axes.set_yscale("log")
        plain_log_ticks(axes.yaxis)
        axes.set_xlim(left=0)
        axes.set_title(name)
        tidy(axes, x="requests/s")
    for axes in list(figure.axes)[len(every) :]:
        axes.set_visible(False)
    for axes in list(figure.axes)[: len(every) : columns]:
        tidy(axes, y="seconds a token")
    return keyed(figure, look, wspace=0.2, hspace=0.45)


def telling(bursts: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Of each burst the arms that go by predictions; of those with two or more alone."""
    known = {name: [arm for arm in arms if arm["tau"] is not None] for name, arms in bursts.items()}
    return {name: arms for name, arms in known.items() if len(arms) > 1}


def draw_bursts(data: Mapping[str, Any], base: str) -> Figure:
    """A panel for each burst: an arm's share of the base's latency by the agreement of orders."""
    from matplotlib.lines import Line2D

    every = telling(data["bursts"])
    figure = new_figure(3.7)
    panels = figure.subplots(1, len(every), squeeze=False, sharey=True)[0]
    own, told = (look.colour for look in looks(["ours", "published"]).values())
    for axes, (name, arms) in zip(panels, every.items(), strict=True):
        for arm in arms:
            _prediction(axes, arm, own, told)
        axes.axhline(1, color=MUTED, lw=0.9)
        axes.set_ylim(0, 1.1)
        axes.set_xlim(0, 1.05)
        axes.set_title(name)
        tidy(axes, x="Kendall's tau of predicted and true lengths")
    tidy(panels[0], y=f"seconds a token, over {base}")
    ours = Line2D([], [], ls="", marker="o", color=own, label="ours")
    theirs = Line2D([], [], ls="", marker="o", color=told, mfc="none", mew=1.5, label="published")
    return keyed(figure, {"ours": ours, "published": theirs}, wspace=0.08)


def _prediction(axes: Axes, arm: Mapping[str, Any], own: str, told: str) -> None:
    """One arm: its share with the interval, and what was published, or else its name."""
    place = arm["tau"]
    if arm["low"] is not None:
        axes.plot([place, place], [arm["low"], arm["high"]], color=own, lw=2)
    axes.plot(place, arm["share"], "o", ms=5, color=own)
    if arm["published"] is not None:
        axes.plot(place, arm["published"], "o", ms=6, color=told, mfc="none", mew=1.5)
        return
    axes.annotate(
        arm["arm"],
        (place, arm["low"] or arm["share"]),
        (0, -6),
        textcoords="offset points",
        rotation=90,
        ha="center",
        va="top",
        color=MUTED,
        fontsize=7.5,
    )


def draw_payers(data: Mapping[str, Any]) -> Figure:
    """A panel for each rate: every order's latency over the base's, a dot for each class."""
    every = data["payers"]
    orders = list(dict.fromkeys(order for rate in every.values() for order in rate))[::-1]
    figure = new_figure(1.1 + 0.27 * len(orders))
    panels = figure.subplots(1, len(every), squeeze=False, sharex=True, sharey=True)[0]
    shares = next(iter(next(iter(every.values())).values()))
    look = looks([f"class {part}" for part in range(1, len(shares) + 1)], ordered=True)
    for axes, (rate, own) in zip(panels, every.items(), strict=True):
        for order, shares in own.items():
            place = orders.index(order)
            axes.plot([min(shares), max(shares)], [place, place], color=MUTED, lw=0.8)
            for share, dot in zip(shares, look.values(), strict=True):
                axes.plot(share, place, "o", ms=6, color=dot.colour)
        axes.axvline(1, color=MUTED, lw=0.9)
        axes.set_xscale("log")
        plain_log_ticks(axes.xaxis)
        axes.set_title(f"{rate} requests/s")
        tidy(axes, x=f"mean latency over {data['base']}")
    panels[0].set_yticks(range(len(orders)), orders)
    return keyed(figure, {name: one.colour for name, one in look.items()}, left=1.75, wspace=0.08)


def _looks(names: Any) -> dict[str, Look]:
    return looks(list(dict.fromkeys(names)))

"""The picture of tails over the age of what a router sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.papers.curves import joined, keyed
from pagedsim.report.style import looks, new_figure, plain_log_ticks, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def age(seconds: float) -> str:
    """For a reader.

    >>> age(0), age(0.05), age(1)
    ('0 ms', '50 ms', '1 s')
    """
    return f"{seconds:g} s" if seconds >= 1 else f"{1e3 * seconds:g} ms"


def draw(data: Mapping[str, Any]) -> Figure:
    """A line for each router; bars are between what seeds lay as published."""
    figure = new_figure(3.6)
    axes = figure.subplots()
    look = looks(data["routers"])
    ages = data["ages"]
    for name, its in look.items():
        tails = [1e3 * seconds for seconds in data["ttft_p99"][name]]
        joined(axes, range(len(ages)), tails, its)
        for one, ends in data["published"].get(name, {}).items():
            if float(one) in ages:
                place = ages.index(float(one)) + 0.08
                axes.plot(
                    [place] * 2, [1e3 * end for end in ends], color=its.colour, lw=4, alpha=0.35
                )
    axes.set_yscale("log")
    plain_log_ticks(axes.yaxis)
    axes.set_xticks(range(len(ages)), [age(one) for one in ages])
    tidy(axes, x="age of what the router sees", y="P99 TTFT (ms)")
    return keyed(figure, look, left=0.8)

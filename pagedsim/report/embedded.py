"""What a page carries for its scripts: the numbers of its figures, and the scripts themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from pagedsim.metrics.arms import Arms
from pagedsim.report.figures import COLOURS, Axis, Panel, Plot, Series
from pagedsim.report.packed import Arrays
from pagedsim.report.replay import replay
from pagedsim.report.style import Look, looks

_MODULES = (
    *("data", "words", "shown", "charts", "tables"),
    *("course", "squares", "lane", "follow", "replay", "page"),
)
"""Scripts of the page, each after those that it imports."""
_EXACT = 64
"""Values up to which a line has doubles; longer ones have six digits."""
_POINTS = 2000
"""Maximum number of points of a line on the page."""


def numbers(plots: Sequence[Plot], study: Arms | None = None) -> dict[str, Any]:
    """The content of the page's data: all figures of lines, the looks of arms and clients, and a
    replay of a comparison."""
    arrays = Arrays()
    played = replay(study, arrays) if study is not None else None
    arms, clients = (study.arms, [*study.clients]) if study is not None else ([], [])
    swept = (study.swept if study is not None else None) or ""
    lines = [line for plot in plots if plot.data for p in plot.data.panels for line in p.series]
    arms = list(dict.fromkeys([*arms, *(line.arm for line in lines if line.arm is not None)]))
    some = (line.client for line in lines if line.client is not None)
    clients = list(dict.fromkeys([*clients, *some]))
    return {
        "arms": _looks(looks(arms, bool(swept))),
        "clients": _looks(looks(clients)),
        "swept": swept.rpartition(".")[2],
        "figures": {
            plot.name: {
                "across": plot.data.across,
                "panels": [_panel(panel, arms, clients, arrays) for panel in plot.data.panels],
            }
            for plot in plots
            if plot.data
        },
        "replay": played,
        "arrays": arrays.texts(),
    }


def _looks(some: Mapping[str, Look]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "colour": COLOURS[look.colour],
            "dash": [] if look.dashes == "-" else list(look.dashes[1]),
        }
        for name, look in some.items()
    ]


def _panel(
    panel: Panel, arms: Sequence[str], clients: Sequence[str], arrays: Arrays
) -> dict[str, Any]:
    return {
        "title": panel.title,
        "x": _axis(panel.x),
        "y": _axis(panel.y),
        "series": [_line(line, arms, clients, arrays) for line in panel.series],
        "shaded": panel.shaded,
    }


def _axis(axis: Axis) -> dict[str, Any]:
    plain = {"label": axis.label, "unit": axis.unit, "log": axis.log, "limits": axis.limits}
    return plain | {"ticks": list(axis.ticks.items())}


def _line(
    line: Series, arms: Sequence[str], clients: Sequence[str], arrays: Arrays
) -> dict[str, Any]:
    count = len(line.x)
    kind = "d" if count <= _EXACT else "f"
    kept = np.linspace(0, count - 1, _POINTS).astype(int) if count > _POINTS else slice(None)
    values = {"x": line.x, "y": line.y, "low": line.low, "high": line.high}
    return {
        "arm": None if line.arm is None else arms.index(line.arm),
        "client": None if line.client is None else clients.index(line.client),
        "until": line.until,
        **{
            name: None if some is None else arrays.add(some[kept], kind)
            for name, some in values.items()
        },
    }


def scripts(content: Mapping[str, Any]) -> str:
    """The elements that give a page its hands."""
    vendor = files("pagedsim.report").joinpath("vendor")
    licence, library = (
        vendor.joinpath(name).read_text(encoding="utf-8").strip()
        for name in ("uPlot.LICENSE", "uPlot.iife.min.js")
    )
    # No text of a study can end the element that it is in.
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f'<script type="application/json" id="study">{text}</script>\n'
        f"<script>\n/*\n{licence}\n*/\n{library}\n</script>\n"
        f'<script type="module">\n{"".join(map(_module, _MODULES))}</script>'
    )


def _module(name: str) -> str:
    """A script in a function of its own, with its imports from and exports to the others."""
    text = files("pagedsim.report").joinpath("page", f"{name}.js").read_text(encoding="utf-8")
    exported = re.findall(r"^export (?:const|class|function) (\w+)", text, flags=re.M)
    text = re.sub(r'^import (.*) from "\./(\w+)\.js";', r"const \1 = of_\2;", text, flags=re.M)
    text = re.sub(r"^export ", "", text, flags=re.M)
    return f"const of_{name} = (() => {{\n{text}return {{ {', '.join(exported)} }};\n}})();\n"


def styles() -> str:
    """The library's style sheet."""
    vendor = files("pagedsim.report").joinpath("vendor", "uPlot.min.css")
    return vendor.read_text(encoding="utf-8")

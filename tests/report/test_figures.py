"""Figures: what their lines, bars and dots show, and that names are legible."""

from __future__ import annotations

from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch
from matplotlib.text import Annotation, Text

from pagedsim.experiments.studies.zoo_pareto import Criterion, Ranking, draw_pareto
from pagedsim.metrics.arms import Arms
from pagedsim.report.gantt import draw_gantt
from pagedsim.report.load import draw_load, load_data, load_of, service_data
from pagedsim.report.plots import draw_effect, drawings_of, sweep_data
from pagedsim.report.style import DECODE, PREFILL, QUEUED, drawing
from tests.metrics.tables import (
    ranking_of,
    requests_of,
    steps_of,
    study_of,
    with_tables,
)


@pytest.fixture(autouse=True)
def styled() -> Iterator[None]:
    with drawing():
        yield


def three_clients(folder: Path) -> Arms:
    """Each has one request; their first tokens come at 3, 2 and 4."""
    study = study_of(folder, seeds=1)
    rows = [
        {"client": client, "scheduled": begun, "first_token": begun + 1, "finished": begun + 1}
        | {"prompt_tokens": prompt}
        for client, begun, prompt in (("a", 2.0, 998), ("", 1.0, 2998), ("c", 3.0, 998))
    ]
    steps = steps_of({"end": 4.0, "waiting": 1, "swapped": 2, "running": 4, "used_blocks": 5})
    study.runs = [with_tables(run, requests_of(*rows), steps) for run in study.runs]
    study.clients = ("a", "", "c")
    return study


def test_each_row_of_an_effect_is_inside_its_axes(tmp_path: Path) -> None:
    (axes,) = draw_effect(study_of(tmp_path, seeds=2)).axes
    low, high = sorted(axes.get_ylim())
    rows = axes.get_yticks()
    assert len(rows) > 2 and all(low < row < high for row in rows)


def loads(study: Arms) -> Figure:
    return draw_load(study, load_data(study))


def test_the_numbers_of_a_figure_are_those_of_its_lines(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=2)
    data = {name: spec.data() for name, spec in drawings_of(study).items() if spec.data}
    assert data.keys() == {"latency", "load", "service"}
    panels = {panel.title: panel for panel in data["latency"].panels}
    clients = [*study.clients] if len(study.clients) > 1 else [""]
    assert len(panels) == 3 * len(clients)
    for panel in panels.values():
        assert [line.arm for line in panel.series] == study.arms
    for arm in study.arms:
        every = [run.by_column() for run in study.of(arm)]
        (line,) = [one for one in data["latency"].panels[0].series if one.arm == arm]
        whose = [run.where("client", clients[0]) if clients[0] else slice(None) for run in every]
        waits = [
            (run["first_token"] - run["arrival"])[mine]
            for run, mine in zip(every, whose, strict=True)
        ]
        factor = {"s": 1, "ms": 1e3}[data["latency"].panels[0].x.unit]
        assert line.x[[0, -1]] == pytest.approx(
            [factor * np.nanmin(np.concatenate(waits)), factor * np.nanmax(np.concatenate(waits))]
        )
        (kv,) = [one for one in data["load"].panels[2].series if one.arm == arm]
        edges, series = load_of(study.of(arm)[0], len(kv.y))
        assert np.array_equal(kv.x, edges[:-1]) and kv.until == edges[-1]
        assert np.array_equal(kv.y, series["kv"])


def test_a_sweep_has_its_intervals_and_service_its_stretches_of_waiting(tmp_path: Path) -> None:
    study = study_of(tmp_path / "swept", arms=("1", "10", "nan-ary"))
    study.swept = "workload.rate"
    panel = sweep_data(study).panels[0]
    assert [panel.x.ticks[place] for place in panel.series[0].x] == study.arms
    (line,) = panel.series
    assert line.low is not None and line.high is not None
    assert np.all(line.low <= line.y) and np.all(line.y <= line.high)
    one, _ = service_data(three_clients(tmp_path)).panels
    assert [line.client for line in one.series] == ["a", "", "c"]
    ((begin, end),) = one.shaded
    assert 0 <= begin < end == pytest.approx(2.0, abs=0.02)  # then one alone still waits


def test_load_has_a_line_an_arm_and_counts_swapped_requests_as_waiting(tmp_path: Path) -> None:
    panels: list[Any] = [*loads(three_clients(tmp_path)).axes]
    for one, value in zip(panels, (3, 4, 50), strict=True):
        lines = [line for line in one.patches if isinstance(line, StepPatch)]
        assert len(lines) == 2
        assert all(line.get_data()[0] == pytest.approx(value) for line in lines)
    labels = [(one.get_ylabel(), one.get_xlabel()) for one in panels]
    assert labels == [("requests", ""), ("requests", ""), ("% of blocks", "simulated time (s)")]


def test_panels_of_load_are_as_high_where_the_memory_is_not_known(tmp_path: Path) -> None:
    study = three_clients(tmp_path)
    known = loads(study)
    for run in study.runs:
        run.summary["total_blocks"] = nan
    seen = loads(study)
    assert (len(known.axes), len(seen.axes)) == (3, 2)
    heights = [one.axes[0].get_window_extent().height for one in (known, seen)]
    assert heights[0] == pytest.approx(heights[1], rel=0.05)


def test_hits_are_shares_and_the_working_set_is_beside_memory(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1)
    assert not {"sources", "working_set"} & drawings_of(study).keys()
    tokens = {"gpu_hit_tokens": 30, "host_hit_tokens": 20, "prefill_tokens": 50}
    rows = [{"scheduled": time, "working_set": 30 * time, **tokens} for time in (2.0, 1.0)]
    steps = steps_of({"end": 1.0})
    study.runs = [with_tables(run, requests_of(*rows), steps) for run in study.runs]
    drawings = drawings_of(study)
    (axes,) = drawings["sources"].draw().axes
    widths = [part.get_width() for part in axes.patches if isinstance(part, Rectangle)]
    assert widths == [width for width in (30, 20, 50) for _ in study.arms]
    (axes,) = drawings["working_set"].draw().axes
    *lines, gpu = (line.get_data() for line in axes.lines)
    drawn = [np.asarray(line).tolist() for line in lines]
    assert drawn == [[[1.0, 2.0], [0.03, 0.06]]] * 2
    assert np.asarray(gpu).tolist()[1] == [0.04, 0.04]  # thousand tokens


def bars(axes: Any, colour: str) -> np.ndarray:
    """Begin and end of each bar of a colour."""
    [found] = [one for one in axes.collections if to_hex(one.get_facecolor()[0]) == colour]
    return np.array([[path.vertices[0, 0], path.vertices[1, 0]] for path in found.get_paths()])


def test_a_request_s_bars_are_its_stages(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1)
    study.clients = ()
    for arm, axes in zip(study.arms, draw_gantt(study).axes, strict=True):
        order = [("client", "ascending"), ("arrival", "ascending")]
        table = study.of(arm)[0].requests().sort_by(order)
        stages = ("arrival", "scheduled", "first_token", "finished")
        times = [table[name].to_numpy() for name in stages]
        for colour, begin, end in zip((QUEUED, PREFILL, DECODE), times, times[1:], strict=False):
            assert bars(axes, colour) == pytest.approx(np.stack([begin, end], axis=1))


# -- Pareto plots ----------------------------------------------------------------------------------

PLANE = Criterion("e2e_mean"), Criterion("ttft_p99")


def crowd(count: int, spread: float = 3.0) -> Ranking:
    """Arms with a frontier among them, and a heap in a corner."""
    random = np.random.default_rng(1)
    first = np.exp(spread * random.random(count) ** 2)
    second = np.exp(spread * random.random(count) ** 2) / first
    arms = {
        f"policy {i} by oracle": {"e2e_mean": [x], "ttft_p99": [y]}
        for i, (x, y) in enumerate(zip(first.tolist(), second.tolist(), strict=True))
    }
    return ranking_of(arms, "e2e_mean", "ttft_p99")


def names(axes: Axes) -> dict[str, Annotation]:
    return {one.get_text(): one for one in axes.texts if isinstance(one, Annotation)}


def boxes(figure: Figure, axes: Axes) -> list[tuple[float, ...]]:
    """Where the names are, without the lines that lead to them."""
    figure.canvas.draw()  # else offsets are not known
    return [tuple(Text.get_window_extent(one).extents) for one in names(axes).values()]


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("count", [1, 27])
def test_no_name_covers_another_or_a_dot(count: int) -> None:
    ranking = crowd(count)
    figure = draw_pareto(ranking, [PLANE])
    (axes,) = figure.axes
    found = boxes(figure, axes)
    assert len(found) == count
    assert not any(overlap(a, b) for i, a in enumerate(found) for b in found[:i])
    dots = [axes.transData.transform(np.asarray(one.get_xydata())[0]) for one in axes.lines[1:]]
    assert len(dots) == count
    assert not any(overlap(a, (x, y, x, y)) for a in found for x, y in dots)
    room = axes.get_window_extent().extents
    assert all(room[0] <= a[0] and a[2] <= room[2] for a in found)
    # Named are the frontier and the baseline; all others have numbers.
    front = {*ranking.frontier(*PLANE), ranking.baseline}
    numbers = {str(i) for i, arm in enumerate(ranking.arms.arms, 1) if arm not in front}
    assert set(names(axes)) == front | numbers
    listed = {text.get_text() for text in figure.texts}
    assert listed == {f"{i}  {arm}" for i, arm in enumerate(ranking.arms.arms, 1)}

"""Figures: what their lines, bars and dots show, and that names are legible."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from experiments.studies.zoo_pareto import Criterion, Ranking, draw_pareto
from pagedsim.metrics.arms import Arms
from pagedsim.metrics.compare import compare, estimate, values_of
from pagedsim.report.gantt import ROWS, busiest, draw_gantt
from pagedsim.report.plots import draw_effect, draw_sweep, drawings_of
from pagedsim.report.style import DECODE, PREFILL, QUEUED, REJECTED, drawing
from tests.metrics.tables import (
    Values,
    ranking_of,
    requests_of,
    study_of,
    with_rejected,
    with_tables,
)


@pytest.fixture(autouse=True)
def styled() -> Iterator[None]:
    with drawing():
        yield


def means(study: Arms, key: str) -> list[float]:
    return [estimate(list(values_of(study, arm, key).values())).mean for arm in study.arms]


def negative(study: Arms) -> Arms:
    for run in study.runs:
        run.summary["kv_waste_mean"] = -0.9 + 0.1 * study.arms.index(run.arm)
    return study


def test_a_sweep_s_lines_are_the_means_below_zero_as_well(tmp_path: Path) -> None:
    study = negative(study_of(tmp_path, arms=("1", "2", "4")))
    study.swept, study.metrics = "server.max_seqs", ("ttft_mean", "kv_waste_mean")
    first, second = draw_sweep(study).axes[:2]
    assert first.lines[0].get_xdata() == pytest.approx([1, 2, 4])
    assert first.lines[0].get_ydata() == pytest.approx(1e3 * np.array(means(study, "ttft_mean")))
    assert (first.get_title(loc="left"), first.get_ylim()[0]) == ("TTFT mean (ms)", 0)
    assert second.lines[0].get_ydata() == pytest.approx([-90, -80, -70])
    assert second.get_ylim()[0] < -90


def test_what_has_no_ratio_is_named_below_the_figure(tmp_path: Path) -> None:
    study = negative(study_of(tmp_path))
    study.metrics, study.clients = ("ttft_mean", "kv_waste_mean", "preemptions"), ()
    for run in study.of("urgent"):
        run.summary["preemptions"] = 0
    effect = drawings_of(study)["effect"]
    assert effect.caption.endswith("no ratio to 0 or below: KV waste, Preemptions.")
    [label, *_] = effect.draw().axes[0].get_yticklabels()
    assert label.get_text() == "TTFT mean"


def test_effects_are_dots_at_their_ratios(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    axes = draw_effect(study).axes[0]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [float(np.asarray(dot.get_xdata())[0]) for dot in dots] == [
        pytest.approx(one.ratio.mean) for one in compare(study)
    ]
    low, high = axes.get_xlim()
    assert low < 1 < high
    assert axes.get_yticklabels()[0].get_text().startswith("chat: TTFT")


def crowded(study: Arms) -> Arms:
    """The same, had every request begun four seconds after it came."""
    for i, run in enumerate(study.runs):
        rows = run.requests().to_pylist()
        for row in rows:
            row |= {name: row[name] + 4 for name in ("scheduled", "first_token", "finished")}
        study.runs[i] = with_tables(run, requests_of(*rows), run.steps())
    return study


def test_service_is_drawn_for_each_client_of_each_arm(tmp_path: Path) -> None:
    study = crowded(study_of(tmp_path, seeds=1))
    figure = drawings_of(study)["service"].draw()
    for axes, arm in zip(figure.axes, study.arms, strict=True):
        clients = study.of(arm)[0].summary["clients"]
        for line, name in zip(axes.lines, study.clients, strict=True):
            values = np.asarray(line.get_ydata(), dtype=np.float64)
            assert values[0] == 0 and (np.diff(values) >= 0).all()
            assert 1e3 * values[-1] == pytest.approx(clients[name]["service"], rel=0.3)
    study.clients = tuple(map(str, range(13)))
    assert "service" not in drawings_of(study), "there is no room for so many"
    calm = study_of(tmp_path / "calm", seeds=1)
    calm.runs = calm.of("urgent")
    assert "service" not in drawings_of(calm), "no two clients wait at once"


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


def test_rejected_requests_are_not_drawn_as_served(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1, arms=("a", "b"))
    study.runs[1] = with_rejected(study.runs[1], 5)
    one, other = draw_gantt(study).axes
    assert (len(bars(one, DECODE)), len(bars(other, DECODE))) == (40, 35)
    rejected = bars(other, REJECTED)
    assert len(rejected) == 5
    assert (rejected[:, 0] == rejected[:, 1]).all()  # as they came
    assert list(busiest(study.runs[1], ROWS)) == list(range(35))
    assert len(busiest(with_rejected(study.runs[1], 40), ROWS)) == 40


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


def test_the_line_joins_the_frontier_and_stays_on_its_side() -> None:
    ranking = crowd(27)
    (axes,) = draw_pareto(ranking, [PLANE]).axes
    line = np.asarray(axes.lines[0].get_xydata())
    points = {
        (ranking.mean(arm, PLANE[0]), ranking.mean(arm, PLANE[1])) for arm in ranking.arms.arms
    }
    front = {(float(x), float(y)) for x, y in line} & points
    assert len(front) == len(ranking.frontier(*PLANE))
    # No arm is beyond the line in both criteria: each of its points is reached by an arm.
    assert all(any(x <= at[0] and y <= at[1] for x, y in front) for at in line)
    assert not any(x < at[0] and y < at[1] for at in line for x, y in points)


def test_an_arm_without_a_value_is_in_the_list_alone() -> None:
    arms: dict[str, Values] = {
        "all": {"e2e_mean": [5.0], "ttft_p99": [2.0], "finished": [10]},
        "few": {"e2e_mean": [1.0], "ttft_p99": [1.0], "finished": [3]},
    }
    figure = draw_pareto(ranking_of(arms, "e2e_mean", "ttft_p99"), [PLANE])
    assert set(names(figure.axes[0])) == {"all"}
    assert [text.get_text() for text in figure.texts] == ["1  all", "2  few"]

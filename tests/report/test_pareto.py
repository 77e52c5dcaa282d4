"""Pareto plots: every arm is drawn, and every label is legible."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from pagedsim.metrics.pareto import Criterion, Standing
from pagedsim.report.labels import Label, place
from pagedsim.report.pareto import draw_pareto
from pagedsim.report.style import drawing, new_figure
from tests.metrics.standing import Values, standing_of

PLANE = Criterion("e2e_mean"), Criterion("ttft_p99")


@pytest.fixture(autouse=True)
def styled() -> Iterator[None]:
    with drawing():
        yield


def crowd(count: int, spread: float = 3.0) -> Standing:
    """Arms with a frontier among them, and a heap in a corner."""
    random = np.random.default_rng(1)
    first = np.exp(spread * random.random(count) ** 2)
    second = np.exp(spread * random.random(count) ** 2) / first
    arms = {
        f"policy {i} by oracle": {"e2e_mean": [x], "ttft_p99": [y]}
        for i, (x, y) in enumerate(zip(first.tolist(), second.tolist(), strict=True))
    }
    return standing_of(arms, "e2e_mean", "ttft_p99")


def names(axes: Axes) -> dict[str, Annotation]:
    return {one.get_text(): one for one in axes.texts if isinstance(one, Annotation)}


def boxes(figure: Figure, axes: Axes) -> list[tuple[float, ...]]:
    """Where the names are, without the lines that lead to them."""
    figure.canvas.draw()  # else offsets are not known
    return [tuple(Text.get_window_extent(one).extents) for one in names(axes).values()]


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("count", [1, 2, 9, 27, 40])
def test_no_name_covers_another_or_a_dot(count: int) -> None:
    standing = crowd(count)
    figure = draw_pareto(standing, [PLANE])
    (axes,) = figure.axes
    found = boxes(figure, axes)
    assert len(found) == count
    assert not any(overlap(a, b) for i, a in enumerate(found) for b in found[:i])
    dots = [axes.transData.transform(np.asarray(one.get_xydata())[0]) for one in axes.lines[1:]]
    assert len(dots) == count
    assert not any(overlap(a, (x, y, x, y)) for a in found for x, y in dots)
    room = axes.get_window_extent().extents
    assert all(room[0] <= a[0] and a[2] <= room[2] for a in found)


def test_named_are_the_frontier_and_the_baseline_all_others_have_numbers() -> None:
    standing = crowd(27)
    figure = draw_pareto(standing, [PLANE])
    (axes,) = figure.axes
    front = {*standing.frontier(*PLANE), standing.baseline}
    numbers = {str(i) for i, arm in enumerate(standing.arms.arms, 1) if arm not in front}
    assert set(names(axes)) == front | numbers
    listed = {text.get_text() for text in figure.texts}
    assert listed == {f"{i}  {arm}" for i, arm in enumerate(standing.arms.arms, 1)}
    (x, y) = (axes.get_xlabel(), axes.get_ylabel())
    assert (x, y) == ("E2E mean (s), less is better", "TTFT P99 (s), less is better")


def test_the_line_joins_the_frontier_and_stays_on_its_side() -> None:
    standing = crowd(27)
    (axes,) = draw_pareto(standing, [PLANE]).axes
    line = np.asarray(axes.lines[0].get_xydata())
    points = {
        (standing.mean(arm, PLANE[0]), standing.mean(arm, PLANE[1])) for arm in standing.arms.arms
    }
    front = {(float(x), float(y)) for x, y in line} & points
    assert len(front) == len(standing.frontier(*PLANE))
    # No arm is beyond the line in both criteria: each of its points is reached by an arm.
    assert all(any(x <= at[0] and y <= at[1] for x, y in front) for at in line)
    assert not any(x < at[0] and y < at[1] for at in line for x, y in points)


def test_times_far_apart_stand_on_a_logarithmic_scale_with_plain_numbers() -> None:
    (near,) = draw_pareto(crowd(9, spread=0.5), [PLANE]).axes
    (far,) = draw_pareto(crowd(9, spread=5.0), [PLANE]).axes
    assert (near.get_xscale(), far.get_xscale()) == ("linear", "log")
    low, high = far.get_xlim()
    shown = [
        text.get_text()
        for at, text in zip(far.get_xticks(), far.get_xticklabels(), strict=True)
        if low <= at <= high
    ]
    assert len(shown) >= 3 and "10" in shown


def test_an_arm_without_a_value_is_in_the_list_alone() -> None:
    arms: dict[str, Values] = {
        "all": {"e2e_mean": [5.0], "ttft_p99": [2.0], "finished": [10]},
        "few": {"e2e_mean": [1.0], "ttft_p99": [1.0], "finished": [3]},
    }
    figure = draw_pareto(standing_of(arms, "e2e_mean", "ttft_p99"), [PLANE])
    assert set(names(figure.axes[0])) == {"all"}
    assert [text.get_text() for text in figure.texts] == ["1  all", "2  few"]


def test_a_name_without_a_place_is_told_of() -> None:
    figure = new_figure(1.0)
    axes = figure.subplots()
    wide = Label("w" * 300, (0.5, 0.5), {"fontsize": 9})
    assert place(axes, [wide]) == [wide]
    assert names(axes) == {}

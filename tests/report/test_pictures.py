"""Contents of plots: numbers of lines, bars and dots, and their colours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.compare import compare, estimate, value_of, values_of
from pagedsim.report.distribution import draw_latency
from pagedsim.report.effect import draw_effect, draw_sweep
from pagedsim.report.figures import _for_page
from pagedsim.report.gantt import ROWS, busiest, draw_gantt
from pagedsim.report.load import draw_load, load_of
from pagedsim.report.plots import drawings_of
from pagedsim.report.style import DECODE, PREFILL, QUEUED, REJECTED, drawing, looks
from tests.metrics.tables import requests_of, study_of, with_rejected, with_tables


@pytest.fixture(autouse=True)
def styled() -> Iterator[None]:
    with drawing():
        yield


def sweep_of(folder: Path, *metrics: str) -> Arms:
    study = study_of(folder, arms=("1", "2", "4"))
    study.swept, study.metrics = "server.max_seqs", metrics
    return study


def means(study: Arms, key: str) -> list[float]:
    return [estimate(list(values_of(study, arm, key).values())).mean for arm in study.arms]


def test_a_sweep_s_lines_are_the_means(tmp_path: Path) -> None:
    study = sweep_of(tmp_path, "ttft_mean", "kv_utilisation_mean")
    first, second = draw_sweep(study).axes[:2]
    ttft, use = first.lines[0], second.lines[0]
    assert ttft.get_xdata() == pytest.approx([1, 2, 4])
    assert ttft.get_ydata() == pytest.approx(1e3 * np.array(means(study, "ttft_mean")))
    assert first.get_title(loc="left") == "TTFT mean (ms)"
    assert use.get_ydata() == pytest.approx(100 * np.array(means(study, "kv_utilisation_mean")))
    assert first.get_ylim()[0] == 0


def negative(study: Arms) -> Arms:
    for run in study.runs:
        run.summary["kv_waste_mean"] = -0.9 + 0.1 * study.arms.index(run.arm)
    return study


def test_a_sweep_shows_what_is_below_zero(tmp_path: Path) -> None:
    study = negative(sweep_of(tmp_path, "kv_waste_mean"))
    axes = draw_sweep(study).axes[0]
    assert axes.lines[0].get_ydata() == pytest.approx([-90, -80, -70])
    assert axes.get_ylim()[0] < -90


def test_what_has_no_ratio_is_named_below_the_picture(tmp_path: Path) -> None:
    study = negative(study_of(tmp_path))
    study.metrics, study.clients = ("ttft_mean", "kv_waste_mean", "preemptions"), ()
    for run in study.of("urgent"):
        run.summary["preemptions"] = 0
    effect = drawings_of(study)["effect"]
    assert effect.caption.endswith("no ratio to 0 or below: KV waste, Preemptions.")
    [label, *_] = effect.draw().axes[0].get_yticklabels()
    assert label.get_text() == "TTFT mean"


@pytest.mark.parametrize("factor", [0.001, 50.0, 1e5])
def test_no_difference_is_on_the_scale(factor: float, tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1)
    study.metrics, study.clients = ("ttft_mean",), ()
    study.of("urgent")[0].summary["ttft_mean"] = factor * value_of(
        study.of("fcfs")[0].summary, "ttft_mean"
    )
    low, high = draw_effect(study).axes[0].get_xlim()
    assert low < 1 < high


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
    fcfs, urgent = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["fcfs", "urgent"]
    colours = {name: look.colour for name, look in looks(study.clients).items()}
    assert [to_hex(line.get_color()) for line in fcfs.lines] == list(colours.values())
    for axes, arm in ((fcfs, "fcfs"), (urgent, "urgent")):
        clients = study.of(arm)[0].summary["clients"]
        for line, name in zip(axes.lines, colours, strict=True):
            values = np.asarray(line.get_ydata(), dtype=np.float64)
            assert values[0] == 0 and (np.diff(values) >= 0).all()
            assert 1e3 * values[-1] == pytest.approx(clients[name]["service"], rel=0.3)
        (grey,) = axes.collections
        assert len(grey.get_paths()) >= 1


def test_service_of_several_seeds_says_which_is_drawn(tmp_path: Path) -> None:
    figure = drawings_of(crowded(study_of(tmp_path, seeds=2)))["service"].draw()
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["fcfs, seed 0", "urgent, seed 0"]


def test_service_is_drawn_where_several_clients_wait_at_once_and_there_is_room(
    tmp_path: Path,
) -> None:
    calm = study_of(tmp_path / "calm", seeds=1)
    calm.runs = calm.of("urgent")
    assert "service" not in drawings_of(calm)
    study = crowded(study_of(tmp_path / "busy", seeds=1))
    assert "service" in drawings_of(study)
    study.clients = tuple(map(str, range(13)))
    assert "service" not in drawings_of(study)


def test_texts_of_a_picture_are_left_as_they_are() -> None:
    svg = '<svg viewBox="0 0 1 1"><path d="M 1.23456 2"/><text x="1.999999">×0.001</text></svg>'
    assert _for_page("x", svg).endswith('<path d="M 1.23 2"/><text x="1.99">×0.001</text></svg>')


@pytest.mark.parametrize("count", [2, 4, 9])
def test_long_names_stay_in_the_picture(count: int, tmp_path: Path) -> None:
    arms = tuple(f"{i} a policy that goes by the name of a whole sentence" for i in range(count))
    study = study_of(tmp_path, seeds=1, arms=arms)
    for figure in (draw_load(study), draw_latency(study), draw_gantt(study)):
        [legend] = figure.legends
        figure.canvas.draw()
        box = legend.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
        titles = [axes._left_title.get_window_extent() for axes in figure.axes]  # type: ignore[attr-defined]
        assert all(title.y1 <= box.y0 + 1 for title in titles)
        level = [(a, b) for a, b in pairwise(titles) if a.y0 == b.y0]
        assert all(a.x1 < b.x0 for a, b in level)


def test_each_client_has_its_latencies(tmp_path: Path) -> None:
    titles = [axes.get_title(loc="left") for axes in draw_latency(study_of(tmp_path, 1)).axes]
    assert [title for title in titles if "TTFT" in title] == ["TTFT, chat", "TTFT, batch"]


def test_latency_curves_rise_to_all_requests(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=2)
    study.clients = ()
    axes = draw_latency(study).axes[0]
    look = looks(study.arms)
    for arm, line in zip(study.arms, axes.lines, strict=True):
        times, shares = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
        assert to_hex(line.get_color()) == look[arm].colour
        assert (np.diff(times) >= 0).all() and (shares[0], shares[-1]) == (0, 1)
        runs = [run.requests() for run in study.of(arm)]
        waits = np.concatenate(
            [np.subtract(run["first_token"].to_numpy(), run["arrival"].to_numpy()) for run in runs]
        )
        assert np.interp(0.5, shares, times) == pytest.approx(1e3 * np.median(waits), rel=0.02)


def test_effects_are_dots_at_their_ratios(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    axes = draw_effect(study).axes[0]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    found = compare(study)
    assert [float(np.asarray(dot.get_xdata())[0]) for dot in dots] == [
        pytest.approx(one.ratio.mean) for one in found
    ]
    low, high = axes.get_xlim()
    assert low < 1 < high
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0].startswith("chat: TTFT")


def test_the_load_is_each_arm_s_own(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1)
    look = looks(study.arms)
    for axes, name in zip(draw_load(study).axes, ("waiting", "running", "kv"), strict=True):
        for arm, stairs in zip(study.arms, axes.patches, strict=True):
            _, series = load_of(study.of(arm)[0], 320)
            drawn: Any = stairs
            assert drawn.get_data().values == pytest.approx(series[name])
            assert to_hex(stairs.get_edgecolor()) == look[arm].colour


def bars(axes: Any, colour: str) -> np.ndarray:
    """Begin and end of each bar of a colour."""
    [found] = [one for one in axes.collections if to_hex(one.get_facecolor()[0]) == colour]
    return np.array([[path.vertices[0, 0], path.vertices[1, 0]] for path in found.get_paths()])


def test_a_request_s_bars_are_its_stages(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1)
    study.clients = ()
    for arm, axes in zip(study.arms, draw_gantt(study).axes, strict=True):
        table = (
            study.of(arm)[0].requests().sort_by([("client", "ascending"), ("arrival", "ascending")])
        )
        stages = ("arrival", "scheduled", "first_token", "finished")
        times = [table[name].to_numpy() for name in stages]
        for colour, begin, end in zip((QUEUED, PREFILL, DECODE), times, times[1:], strict=False):
            assert bars(axes, colour) == pytest.approx(np.stack([begin, end], axis=1))


def test_who_was_rejected_is_not_drawn_as_served(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1, arms=("a", "b"))
    study.runs[1] = with_rejected(study.runs[1], 5)
    one, other = draw_gantt(study).axes
    assert len(bars(one, DECODE)) == 40
    assert len(bars(other, DECODE)) == 35
    rejected = bars(other, REJECTED)
    assert len(rejected) == 5
    assert (rejected[:, 0] == rejected[:, 1]).all()  # as they came


def test_the_busiest_requests_were_served(tmp_path: Path) -> None:
    run = with_rejected(study_of(tmp_path, seeds=1).runs[0], 5)
    assert list(busiest(run, ROWS)) == list(range(35))
    assert len(busiest(with_rejected(run, 40), ROWS)) == 40


def test_arms_with_other_numbers_of_requests_are_drawn(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1, arms=("long", "short"))
    short = study.runs[1]
    config = {**short.config, "workload": {"requests": 10}}
    short = with_tables(short, short.requests().slice(0, 10), short.steps())
    study.runs[1] = replace(short, config=config)
    one, other = draw_gantt(study).axes
    assert (len(bars(one, DECODE)), len(bars(other, DECODE))) == (40, 10)

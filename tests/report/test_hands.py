"""What scripts do on the page, in a browser; and that the numbers they have are the tables'."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedsim as ps
from pagedsim.metrics.arms import Arms, Run
from pagedsim.report import html
from pagedsim.report import replay as replays
from pagedsim.report.embedded import numbers
from pagedsim.report.figures import Axis, FigureData, Panel, Plot, Series
from pagedsim.report.packed import Arrays
from pagedsim.report.replay import STAGES, replay
from tests.metrics.tables import fleet_study, result_of, study_of
from tests.serve.chromium import Chromium, find_browser

BROWSER = find_browser()
in_browser = pytest.mark.skipif(
    BROWSER is None, reason="the page needs a Chromium: apt-get install chromium"
)
KINDS = {"d": "<f8", "f": "<f4", "i": "<i4", "b": "u1"}


def data_of(page: str) -> dict[str, Any]:
    """What scripts read from a page."""
    found = re.search(r'<script type="application/json" id="study">(.*?)</script>', page)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def array(content: dict[str, Any], at: int) -> np.ndarray:
    kind, text = content["arrays"][at]
    return np.frombuffer(base64.b64decode(text), KINDS[kind])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Run]]:
    """A comparison whose memory is too small, and its runs."""
    result = ps.compare(
        {"memory.blocks": 300},
        policy={"fcfs": "fcfs", "urgent": "priority"},
        workload=ps.synthetic(
            rate=12.0,
            requests=120,
            client={"chat": 0.6, "</script>": 0.4},
            priority={0: 0.5, 1: 0.5},
        ),
        seeds=1,
        jobs=1,
    )
    path = result.report(tmp_path_factory.mktemp("served"))
    return path, [
        replace(run, folder=path.parent / run.folder.relative_to(result.folder))
        for run in result.runs
    ]


@pytest.fixture(scope="module")
def content(served: tuple[Path, list[Run]]) -> dict[str, Any]:
    return data_of(served[0].read_text(encoding="utf-8"))


def test_a_replay_has_what_the_tables_have(
    served: tuple[Path, list[Run]], content: dict[str, Any]
) -> None:
    played = content["replay"]
    assert [content["arms"][one["arm"]]["name"] for one in played["courses"]] == ["fcfs", "urgent"]
    assert sorted(one["name"] for one in content["clients"]) == ["</script>", "chat"]
    for run, course in zip(served[1], played["courses"], strict=True):
        table = run.requests().sort_by("arrival")
        assert course["ids"] == table["request"].to_pylist()
        names = [content["clients"][at]["name"] for at in array(content, course["client"])]
        assert names == table["client"].to_pylist()
        for name in ("prompt", "output"):
            assert array(content, course[name]).tolist() == table[f"{name}_tokens"].to_pylist()
        ends, first = array(content, course["end"]), array(content, course["first"])
        kinds = array(content, course["kind"])
        scheduled, finished = (ms(table[name]) for name in ("scheduled", "finished"))
        assert ends[first[1:] - 1].tolist() == finished.tolist()
        waited = kinds[first[:-1]] == STAGES.index("queued")
        assert np.array_equal(ends[first[:-1]][waited], scheduled[waited])
        steps, (server,) = run.steps("start", "used_blocks"), course["servers"]
        times, used = array(content, server["time"]), array(content, server["used"])
        assert server["every"] == 1 and len(times) >= steps.num_rows
        at = np.searchsorted(times, ms(steps["start"]), side="right") - 1
        recorded = steps["used_blocks"].to_numpy()
        # Steps that begin within a millisecond have the last one's.
        alone = np.append(np.diff(ms(steps["start"])) > 0, True)
        assert np.array_equal(used[at][alone], recorded[alone])
        lost, events = course["lost"], run.events()
        assert events.num_rows > 0
        assert array(content, lost["time"]).tolist() == ms(events["time"]).tolist()
        ids = [course["ids"][at] for at in array(content, lost["request"])]
        assert ids == events["request"].to_pylist()
        by = [None if at < 0 else course["ids"][at] for at in array(content, lost["by"])]
        assert by == events["by"].to_pylist()


def ms(column: Any) -> np.ndarray:
    return np.rint(column.to_numpy() * 1e3).astype(int)


def test_a_long_run_is_shown_where_it_is_busiest(
    served: tuple[Path, list[Run]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Arms("n", "t", "q", served[0].parent, "c", served[1])
    for name, value in (("REQUESTS", 60), ("STEPS", 50)):
        monkeypatch.setattr(replays, name, value)
    arrays = Arrays()
    played = replay(study, arrays)
    assert played is not None and "the busiest stretch" in played["note"]
    assert "one step in" in played["note"] and "requests that waited" in played["note"]
    kept = {"arrays": arrays.texts()}
    for course in played["courses"]:
        assert 0 < len(course["ids"]) <= 60
        arrival = array(kept, course["arrival"])
        assert (arrival < 0).any() and arrival.max() <= played["length"]
        assert array(kept, course["end"]).max() > played["length"]


def test_replays_of_many_arms_and_replicas_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "BYTES", 0)
    study = study_of(tmp_path, seeds=1, arms=("a", "b", "c", "d"))
    study.baseline = "b"
    played = replay(study, Arrays())
    assert played is not None
    assert [study.arms[one["arm"]] for one in played["courses"]] == ["b", "a"]  # a waits longer
    assert "2 of 4 arms, to keep this page small (b, a)" in played["note"]
    fleet = replay(fleet_study(tmp_path / "fleet", 20, ["one"]), Arrays())
    assert fleet is not None and len(fleet["courses"][0]["servers"]) == replays.SERVERS
    assert f"the first {replays.SERVERS} replicas" in fleet["note"]


def test_lines_keep_their_numbers_and_their_ends() -> None:
    x = np.linspace(0, 1, 5001)
    series = [Series("a", None, x[:3] / 3, x[:3]), Series("b", "c", x, x**2)]
    data = FigureData([Panel("", Axis("x", ticks={0.0: "zero"}), Axis("y"), series)])
    told = numbers([Plot("one", "", "", b"", "", data)])
    (panel,) = told["figures"]["one"]["panels"]
    short, long = panel["series"]
    assert array(told, short["x"]).tolist() == (x[:3] / 3).tolist()
    kept = array(told, long["x"])
    assert len(kept) == 2000 and kept[[0, -1]].tolist() == [0, 1]
    assert array(told, long["y"]) == pytest.approx(kept**2, rel=1e-6)
    assert (short["arm"], short["client"], long["arm"], long["client"]) == (0, None, 1, 0)
    assert panel["x"]["ticks"] == [(0.0, "zero")]


def test_a_page_is_the_same_every_time_and_ends_where_it_should(tmp_path: Path) -> None:
    study = study_of(tmp_path, arms=("</script><b>", "urgent"))
    pages = [html.page(result_of(study), [], study) for _ in range(2)]
    assert pages[0] == pages[1]
    assert data_of(pages[0])["arms"][0]["name"] == "</script><b>"
    assert pages[0].count("</script>") == 3


# -- in a browser ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    assert BROWSER is not None
    with Chromium(BROWSER) as one:
        yield one


@pytest.fixture
def page(browser: Chromium, served: tuple[Path, list[Run]]) -> Iterator[Chromium]:
    """The page, with all of its charts; nothing complains."""
    browser.open(served[0].as_uri())
    browser.wait(
        "document.querySelectorAll('.u-over').length === document.querySelectorAll('.chart').length"
    )
    yield browser
    assert browser.errors == []


def over(page: Chromium, selector: str, across: float, down: float) -> tuple[float, float]:
    """Move the pointer to a place in an element, in shares of its width and height."""
    x, y = page.evaluate(f"""(() => {{
        const element = document.querySelector({json.dumps(selector)});
        element.scrollIntoView({{block: "center"}});
        const box = element.getBoundingClientRect();
        return [box.x + box.width * {across}, box.y + box.height * {down}];
    }})()""")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    return x, y


def enter(page: Chromium, selector: str, value: float | str, event: str) -> None:
    """Give a field a value, as a reader does."""
    page.evaluate(f"""(() => {{
        const field = document.querySelector({json.dumps(selector)});
        field.value = {json.dumps(value)};
        field.dispatchEvent(new Event({json.dumps(event)}));
    }})()""")


VISIBLE = "[...document.querySelectorAll({})].filter((one) => !one.hidden).length"
PIXELS = """(() => {
    const canvas = document.querySelector(%s);
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return data.join("").slice(0, 200000);
})()"""


@pytest.mark.slow
@in_browser
def test_charts_tell_their_values_and_the_legend_hides_an_arm_everywhere(
    page: Chromium, content: dict[str, Any]
) -> None:
    over(page, "#figure-load .u-over", 0.5, 0.5)
    page.wait("document.querySelector('#figure-load .tip strong')?.textContent.endsWith(' s')")
    time = float(
        page.evaluate("document.querySelector('#figure-load .tip strong').textContent")[:-2]
    )
    line = content["figures"]["load"]["panels"][0]["series"][0]
    x, y = (array(content, line[name]) for name in "xy")
    told = page.evaluate("document.querySelector('#figure-load .tip b').textContent")
    near = y[np.searchsorted(x, [time * 0.999, time * 1.001]) - 1]
    assert near.min() * 0.999 <= float(told.replace(",", "")) <= near.max() * 1.001 + 1e-3
    before = page.evaluate(PIXELS % "'#figure-latency canvas'")
    page.click(".legend .arms button")
    page.wait(f"{PIXELS % repr('#figure-latency canvas')} !== {json.dumps(before)}")
    assert (
        page.evaluate("document.querySelector('.arms button').getAttribute('aria-pressed')")
        == "false"
    )
    assert page.evaluate(VISIBLE.format("'tr[data-arm=fcfs]'")) == 0
    assert page.evaluate(VISIBLE.format("'tr[data-arm=urgent]'")) == 3
    over(page, "#figure-load .u-over", 0.4, 0.5)
    page.wait("document.querySelectorAll('#figure-load .tip:not([hidden]) b').length === 1")
    page.click(".legend .clients button")
    panels = page.evaluate(VISIBLE.format("'#figure-latency .chart'"))
    assert panels == len(content["figures"]["latency"]["panels"]) / 2
    marks = "[...document.querySelectorAll('#figure-effect g[data-arm]')]"
    hidden = f"{marks}.filter((one) => one.style.display === 'none').length"
    assert page.evaluate(hidden) == 0
    page.click(".legend .arms button:nth-of-type(2)")
    assert page.evaluate(f"{hidden} === {marks}.length && {marks}.length > 0")
    page.click(".legend .all")
    assert page.evaluate(VISIBLE.format("'tr[data-arm]'")) == 6


@pytest.mark.slow
@in_browser
def test_tables_are_sorted_by_their_heads(page: Chromium) -> None:
    values = """[...document.querySelectorAll(".results tbody tr:not(.group) td:nth-child(2)")]
        .slice(0, 2).map((one) => Number(one.dataset.value))"""
    head = "document.querySelector('.results thead th:nth-child(2)')"
    sort = f"{head}.getAttribute('aria-sort')"
    assert page.evaluate(sort) == "none"
    first = page.evaluate(values)
    for way, order in (("descending", max), ("ascending", min)):
        page.click(".results thead th:nth-child(2) button")
        assert page.evaluate(sort) == way
        assert page.evaluate(values)[0] == order(first)
    page.click(".results thead th:nth-child(2) button")
    assert page.evaluate(values) == first
    page.evaluate("document.querySelector('.results .sort').focus()")
    for kind in ("keyDown", "keyUp"):
        page.call(
            "Input.dispatchKeyEvent",
            type=kind,
            key="Enter",
            code="Enter",
            text="\r",
            windowsVirtualKeyCode=13,
        )
    first_head = "document.querySelector('.results thead th').getAttribute('aria-sort')"
    page.wait(f"{first_head} === 'descending'")


@pytest.mark.slow
@in_browser
def test_the_replay_plays_and_a_request_is_followed_under_both_arms(
    page: Chromium, content: dict[str, Any]
) -> None:
    show = "document.querySelector('#replay').replay"
    canvas = PIXELS % "'#replay .blocks canvas'"
    before, time = page.evaluate(canvas), page.evaluate(f"{show}.time")
    assert page.evaluate("document.querySelector('.play').textContent") == "Play"
    page.evaluate(f"{show}.seek(0)")
    page.click(".play")
    page.wait(f"{show}.time > 500")
    assert page.evaluate("document.querySelector('.play').textContent") == "Pause"
    page.click(".play")
    held = page.evaluate(f"{show}.time")
    assert page.evaluate(canvas) != before
    enter(page, ".strip input", time, "input")
    assert page.evaluate(f"{show}.time") != held
    # What it counts is what the stages of the tables say.
    course = content["replay"]["courses"][0]
    now = page.evaluate(f"{show}.time")
    arrival, ends, first = (array(content, course[name]) for name in ("arrival", "end", "first"))
    present = (arrival <= now) & (ends[first[1:] - 1] > now)
    counts = page.evaluate(
        "[...document.querySelectorAll('.lane .count')].slice(0, 2).map((one) => one.textContent)"
    )
    assert sum(int(text.split(",")[0]) for text in counts) == present.sum()
    until = array(content, course["lost"]["time"]) <= now
    assert page.evaluate("document.querySelector('.head .count').textContent").startswith(
        f"{until.sum()} preemption"
    )

    x, y = over(page, "#replay .running canvas", 0.01, 0.1)
    for kind in ("mousePressed", "mouseReleased"):
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    running = page.evaluate(f"{show}.sides[0].course.now({now})[0].running[0].request")
    assert page.evaluate(f"{show}.id") == str(course["ids"][running])
    assert page.evaluate("document.querySelectorAll('.bars .bar').length") == 2
    assert page.evaluate("document.querySelector('.follow input').value") == str(
        course["ids"][running]
    )
    enter(page, ".follow input", "nobody", "change")
    assert (
        page.evaluate("document.querySelector('.follow .note').textContent")
        == "is not in this stretch"
    )


@pytest.mark.slow
@in_browser
def test_it_is_dark_where_the_reader_is_and_fits_a_phone(page: Chromium) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light, chart = page.evaluate(paper), page.evaluate(PIXELS % "'#figure-load canvas'")
    try:
        page.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark"}],
        )
        page.wait(f"{paper} !== {json.dumps(light)}")
        page.wait(f"{PIXELS % repr('#figure-load canvas')} !== {json.dumps(chart)}")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=400,
            height=800,
            deviceScaleFactor=1,
            mobile=True,
        )
        page.wait(
            "document.querySelector('#figure-load canvas').getBoundingClientRect().width < 400"
        )
        page.wait("document.documentElement.scrollWidth === 400")
        page.call("Emulation.setEmulatedMedia", media="print", features=[])
        assert (
            page.evaluate("getComputedStyle(document.querySelector('.charts')).display") == "none"
        )
        assert (
            page.evaluate(
                "getComputedStyle(document.querySelector('#figure-load > .scroll')).display"
            )
            == "block"
        )
    finally:
        page.call(
            "Emulation.setEmulatedMedia",
            media="",
            features=[{"name": "prefers-color-scheme", "value": "light"}],
        )
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=1280,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )

"""Capacity: the search alone, what a rate must meet, and the experiment as a whole."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from pagedsim.__main__ import main
from pagedsim.core import ConfigError
from pagedsim.experiments.studies.bisection import Bisection, bounds_of, missed, validate_clients
from pagedsim.experiments.studies.capacity_figures import _draw_rates
from pagedsim.metrics.compare import Estimate
from pagedsim.report import style
from tests.conftest import Call

# -- the search ------------------------------------------------------------------------------------


def searched(
    meets: Callable[[float], bool], start: float = 1.0, tolerance: float = 0.02
) -> Bisection:
    search = Bisection(start, tolerance)
    for _ in range(60):
        if (rate := search.next()) is None:
            return search
        assert rate not in search.answers
        search.tell(rate, meets(rate))
    raise AssertionError("it goes on and on")


@given(edge=st.floats(0.01, 500), start=st.floats(0.1, 20), tolerance=st.floats(0.005, 0.2))
def test_an_edge_is_found_from_anywhere(edge: float, start: float, tolerance: float) -> None:
    search = searched(lambda rate: rate <= edge, start, tolerance)
    low, high = search.low, search.high
    assert low is not None and high is not None
    assert low <= edge < high
    assert high / low <= 1 + tolerance
    assert search.missed_from == high
    assert search.contradictions == []
    # Both sides are looked at beyond the bracket itself.
    assert any(rate < low for rate in search.answers)
    assert any(rate > high for rate in search.answers)


def test_a_rate_that_is_met_above_a_miss_widens_the_bracket() -> None:
    search = searched(lambda rate: rate < 5.6 or 5.7 < rate < 6)
    assert (search.low, search.high) == (5.596, 5.657)
    assert search.contradictions == [5.886]
    assert search.missed_from == 8


def test_a_search_without_an_edge_ends() -> None:
    never, always = searched(lambda _: False), searched(lambda _: True)
    assert never.low is None and min(never.answers) < 1 / 2**12
    assert always.high is None and max(always.answers) > 2**12


# -- the objective ---------------------------------------------------------------------------------


def test_bounds_are_of_all_requests_or_of_a_client() -> None:
    bounds = bounds_of({"ttft_p99": 2, "batch": {"e2e_mean": 60}, "tpot_p99": None})
    assert [(bound.key, bound.seconds, bound.client) for bound in bounds] == [
        ("ttft_p99", 2.0, None),
        ("e2e_mean", 60.0, "batch"),
    ]
    summary = {"ttft_p99": 2.0, "clients": {"batch": {"e2e_mean": 61.0}}}
    assert [bound.name for bound in missed(bounds, summary)] == ["batch: E2E mean"]
    with pytest.raises(ConfigError, match="no such client in the workload; choose from a, b"):
        validate_clients(bounds, ["a", "b"])
    validate_clients(bounds, ["batch"])
    [bound] = bounds_of({"e2e_p99.9": 2})
    assert (bound.name, missed([bound], {"e2e_p99_9": 2.1})) == ("E2E P99.9", [bound])
    assert missed(bounds_of({"tpot_p99": 0.1}), {"tpot_p99": float("nan")}) == []


# -- the experiment --------------------------------------------------------------------------------

QUICK = ("experiment=capacity", "tracking=none", "seeds=2", "jobs=1", "study.bounds.ttft_p99=0.5")
ARMS = "study.arms={fcfs: [], small: ['server.max_seqs=4']}"


@pytest.fixture(name="call")
def quick_call(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A small search, with these words as well."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def called(*words: str) -> tuple[int, str, str]:
        few = [] if "workload=trace" in words else ["workload.requests=40"]
        return call(*QUICK, *few, "hydra.run.dir=out", *words)

    return called


def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out/result.json").read_text())["data"]
    return found


def test_a_search_ends_with_a_result_and_commands_that_repeat_probes(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = call(ARMS, "study.tolerance=0.2", "memory.block_size=8")
    assert code == 0
    assert "results   out\nreport    out/report.html" in out
    assert Path("out/plots/capacity.png").stat().st_size > 0
    arms = result()["arms"]
    assert list(arms) == ["fcfs", "small"]
    assert arms["small"]["requests_per_s"]["mean"] < arms["fcfs"]["requests_per_s"]["mean"]
    for arm in arms.values():
        assert set(arm["seeds"]) == {"0", "1"}
        for one in arm["seeds"].values():
            by_rate = {probe["rate"]: probe for probe in one["probes"]}
            met, over = by_rate[one["met_up_to"]], by_rate[one["missed_from"]]
            assert met["values"]["TTFT P99"] <= 0.5 and not met["missed"]
            assert over["missed"]
            assert over["rate"] / met["rate"] <= 1.2
    arm = arms["small"]
    words = (*shlex.split(arm["command"])[3:], "report=false", "hydra.run.dir=again")
    monkeypatch.setattr(sys, "argv", ["pagedsim", *words, "tracking=none"])
    with pytest.raises(SystemExit):
        main()
    summary = json.loads(Path("again/runs/run/seed-0/summary.json").read_text())
    one = arm["seeds"]["0"]
    [probe] = [p for p in one["probes"] if p["rate"] == one["met_up_to"]]
    assert summary["ttft_p99"] == pytest.approx(probe["values"]["TTFT P99"], rel=1e-5)
    assert summary["tpot_p99"] == pytest.approx(probe["values"]["TPOT P99"], rel=1e-5)
    assert summary["output_tokens_per_s"] == pytest.approx(probe["output_tokens_per_s"], rel=1e-5)


@pytest.mark.parametrize("known", [True, False])
def test_rates_of_one_seed_have_no_bars(known: bool) -> None:
    axes = Figure().subplots()
    ends = (1.0, 3.0) if known else (nan, nan)
    _draw_rates(axes, {"a": Estimate(2.0, *ends)}, style.looks(["a"]))
    assert ("confidence" in axes.get_title()) == known

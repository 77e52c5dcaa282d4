"""The cheapest fleet: the command, and what it makes of costs that are set by hand."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.experiments.studies.lattice import Counts, Lattice
from pagedsim.metrics.arms import Run
from pagedsim.run.job import Job
from pagedsim.run.runs import Runs
from pagedsim.run.store import Store
from pagedsim.spec.conf import Conf
from tests.conftest import Call

BASE = ("experiment=cheapest_fleet", "tracking=none", "hydra.run.dir=out")
FEW = (
    *(*BASE, "report=false", "jobs=1", "seeds=2", "workload.requests=120", "study.short=60"),
    *("study.gpus=[l4]", "study.routers=[least_requests]", "workload.rate=200"),
)
SPLITS = "study.splits={one: [], two: ['tensor_parallel=2']}"
ONE = "study.routers=[least_requests]"
TWO_BY_TWO = (
    *(*BASE, "report=false", "study.gpus=[l4,h100]", ONE, "~study.splits"),
    *("+study.splits={one: [], apart: {prefill: [], decode: []}}", "fleet.link.bandwidth_gb_s=10"),
)
KINDS = "~study.splits", f"+{SPLITS}"
CAPACITY = {"l4": 1.3, "a100-80gb": 9.0, "h100": 20.0}
"""Requests a second that a GPU of the made-up fleets takes."""


def result() -> dict[str, Any]:
    return json.loads(Path("out/result.json").read_text())["data"]


def _attained(job: Job) -> float:
    """Of a fleet that serves so many requests a second, and the rest too late."""
    config, fleet = job.config, job.config["fleet"]
    able = CAPACITY[config["hardware"]["name"]]
    able *= 1.02 if job.config["router"]["_target_"].endswith("LeastRequests") else 1.0
    if (only := config["backend"]["only"]) is not None:
        return min(1.0, fleet["replicas"] * _of_a_role(able, only) / config["workload"]["rate"])
    if fleet["pools"]:
        rates = [pool["replicas"] * _of_a_role(able, role) for role, pool in fleet["pools"].items()]
        return min(1.0, min(rates) / config["workload"]["rate"])
    able *= fleet["replicas"] * 1.8 ** (config["tensor_parallel"] - 1)
    return min(1.0, able / config["workload"]["rate"])


def _of_a_role(able: float, role: str) -> float:
    return able * {"prefill": 4.0, "decode": 1.5}[role]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs cost no time: what they give is made up. Returns what was asked."""
    asked: list[str] = []

    def serve(self: Runs, jobs: Sequence[Job], processes: int | None, store: Store) -> bool:
        self.jobs += jobs
        for job in jobs:
            asked.append(job.arm)
            summary = {"slo_attainment": _attained(job), "finished": 1, "requests": 1}
            run = Run(job.arm, job.number, job.folder, job.config, summary)
            self.finished[job.arm, job.number] = run
        return False

    monkeypatch.setattr(Runs, "serve", serve)
    return asked


def test_by_costs_set_by_hand_the_known_cheapest_is_found(call: Call, made_up: list[str]) -> None:
    """20 requests/s, of which 19 are to be in time: 15 L4 do it, or 4 for prompts and 10 for
    decodes, or one H100, for 5.24 € and 3.39 €."""
    code, text, errors = call(*TWO_BY_TWO, "workload.rate=20", "study.margin=1")
    assert (code, errors) == (0, ""), text
    found = result()
    assert found["cheapest"] == "1 × h100, one, least_requests"
    least = {name: (one["counts"], one["gpus"]) for name, one in found["least"].items()}
    assert least == {
        "h100, one, least_requests": ([1], 1),
        "l4, one, least_requests": ([15], 15),
        "l4, apart, least_requests": ([4, 10], 14),
        "h100, apart, least_requests": ([1, 1], 2),
    }
    assert all(one["attained"]["mean"] >= 0.95 for one in found["least"].values())


def test_every_price_has_a_vendor_which_stands_below_the_plot(
    call: Call, made_up: list[str]
) -> None:
    conf = Conf()
    priced = {gpu: conf.option("hardware", gpu) for gpu in conf.options_of("hardware")}
    for gpu, option in priced.items():
        if option.settings.get("price_per_hour"):
            assert " at " in conf.comment("hardware", gpu, "price_per_hour"), gpu
    assert conf.comment("hardware", "l4", "no_such_key") == ""
    assert call(*TWO_BY_TWO, "report=true")[0] == 0
    page = html.unescape(Path("out/report.html").read_text(encoding="utf-8"))
    for gpu in ("l4", "h100"):
        assert f"{gpu} {conf.comment('hardware', gpu, 'price_per_hour')}" in page


def test_dearer_options_are_dropped_with_their_least_cost(call: Call, made_up: list[str]) -> None:
    code, text, errors = call(*TWO_BY_TWO, "workload.rate=20", "study.margin=0")
    assert (code, errors) == (0, ""), text
    found = result()
    assert list(found["least"]) == ["h100, one, least_requests"]
    dropped = found["dropped"]
    assert dropped["h100, apart, least_requests"] == pytest.approx(2 * 3.393)
    costs = {"l4, one, least_requests": 15 * 0.3741, "l4, apart, least_requests": 14 * 0.3741}
    for name, cost in costs.items():  # at least, and no more than it would cost indeed
        assert found["limit_euros_per_hour"] < dropped[name] <= cost + 1e-6
    assert not any(arm.startswith("16 × l4, one") for arm in made_up)


def test_infeasible_traffic_is_reported(call: Call, made_up: list[str]) -> None:
    code, text, errors = call(*TWO_BY_TWO, "workload.rate=500", "study.most=4")
    assert (code, errors) == (0, "")
    assert "even 4 replicas of a kind miss it" in " ".join(text.split())
    assert result()["cheapest"] is None and len(result()["nowhere"]) == 4
    assert not any(arm.startswith("8 × ") for arm in made_up)


def test_gpus_without_a_price_and_models_that_do_not_fit_are_left_out(
    call: Call, made_up: list[str]
) -> None:
    words = ("model=llama-2-13b", "study.gpus=[l4,a30,h100]", ONE, *KINDS)
    code, text, errors = call(*BASE, "report=false", *words)
    told = " ".join(text.split())
    assert (code, errors) == (0, ""), text
    assert "left out: a30: has no price" in told
    assert "left out: l4, one: " in told
    assert {name.split(", ")[0] for name in result()["least"]} <= {"l4", "h100"}


def test_fleets_apart_without_a_known_link_are_left_out(call: Call, made_up: list[str]) -> None:
    code, text, errors = call(*TWO_BY_TWO, "fleet.link.bandwidth_gb_s=null", "study.margin=9")
    told = " ".join(text.split())
    assert (code, errors) == (0, ""), text
    assert "left out: l4, apart: fleet.link.bandwidth_gb_s=null: must be given" in told
    assert {name.rpartition(",")[0] for name in result()["least"]} == {
        *("l4, one", "h100, one", "h100, apart")
    }


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("study.attainment=1.5",), "attainment=1.5: must be a number"),
        (("study.gpus=[a30]",), "left out: a30: has no price"),
        (("slo.ttft=null", "slo.tpot=null"), "slo: must have a bound"),
        (("workload.arrivals=burst",), "workload.arrivals=burst: has no rate"),
        (
            ("~study.splits", "+study.splits.bad={prefill: []}"),
            "splits.bad={'prefill': []}: must have overrides for prefill and for decode",
        ),
        (
            ("~study.splits", "+study.splits.bad=['router=random']"),
            "router=random: is what the search varies",
        ),
        (
            ("~study.splits", "+study.splits.bad=['workload.rate=1']"),
            "must be the same for all options",
        ),
        (
            ("model=llama-2-70b", "study.gpus=[l4]", *KINDS),
            "left out: l4, one: model=llama-2-70b does not fit",
        ),
    ],
)
def test_invalid_settings_are_refused_in_one_line(
    call: Call, words: Sequence[str], complaint: str
) -> None:
    code, _, errors = call(*FEW, *words)
    assert code == 1
    assert len(errors.splitlines()) == 1, errors
    assert complaint in errors


@pytest.mark.slow
def test_the_command_finds_a_fleet_and_a_stopped_one_goes_on(call: Call) -> None:
    code, text, errors = call(*FEW, *KINDS)
    assert (code, errors) == (0, ""), text
    whole, first = Path("out/result.json").read_bytes(), result()
    assert first["cheapest"] and "again" in text
    winner = next(one for one in first["least"].values() if one["name"] == first["cheapest"])
    assert winner["attained"]["mean"] >= 0.95
    assert winner["means"]["tokens_per_euro"] > 0 and winner["means"]["mean_watts"] > 0
    summaries = sorted(Path("out/runs").glob("*/*.json"))
    for path in summaries[::2]:
        path.unlink()  # as if it had been stopped before these
    code, text, errors = call(*FEW, *KINDS)
    assert (code, errors) == (0, ""), text
    assert "runs were there already" in text
    assert Path("out/result.json").read_bytes() == whole


# -- the search over numbers of replicas, against trying all of them -------------------------------


MOST = 9


def searched(
    prices: list[float],
    short: set[Counts],
    long: set[Counts],
    most: int = MOST,
    limit: float = inf,
) -> tuple[Lattice, list[tuple[Counts, bool]]]:
    """A search to its end, where runs meet the objective with what is in these sets; and what it
    has asked."""
    lattice = Lattice(prices, most)
    asked: list[tuple[Counts, bool]] = []
    while True:
        if (counts := lattice.next_short(limit)) is not None:
            round_ = [(counts, False)]
        else:
            round_ = [(counts, True) for counts in lattice.next_long(limit)]
        if not round_:
            return lattice, asked
        for counts, is_long in round_:
            assert (counts, is_long) not in asked
            asked.append((counts, is_long))
            lattice.tell(counts, counts in (long if is_long else short), is_long)


def above(corners: list[Counts], most: int = MOST) -> set[Counts]:
    """All counts that are in each kind at least as many as one of the corners."""
    every = product(range(1, most + 1), repeat=len(corners[0]) if corners else 1)
    return {
        counts
        for counts in every
        if any(all(a >= b for a, b in zip(counts, one, strict=True)) for one in corners)
    }


def test_one_kind_takes_doubling_and_halving() -> None:
    enough = above([(21,)], most=64)
    lattice, asked = searched([2.0], enough, enough, most=64)
    assert lattice.best == (21,)
    assert [counts for (counts,), long in asked if not long][:6] == [1, 2, 4, 8, 16, 32]
    assert [counts for (counts,), long in asked if long] == [21, 20]
    assert len(asked) <= 6 + 4 + 2


counts_of = st.tuples(st.integers(1, MOST), st.integers(1, MOST))


@given(
    st.lists(counts_of, min_size=0, max_size=4),
    st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)),
)
def test_the_cheapest_is_found_if_there_is_one(
    corners: list[Counts], prices: tuple[float, float]
) -> None:
    enough = above(corners)
    lattice, _ = searched(list(prices), enough, enough)
    if not corners:
        assert lattice.best is None
        assert lattice.bound == inf
        return
    assert lattice.best in enough
    least = min(a * prices[0] + b * prices[1] for a, b in enough)
    assert lattice.bound == pytest.approx(least)


@given(
    st.sets(counts_of, max_size=60),
    st.sets(counts_of, max_size=60),
    st.floats(1, 20),
)
def test_nothing_is_returned_that_long_runs_miss_whatever_chance_does(
    short: set[Counts], long: set[Counts], limit: float
) -> None:
    lattice, asked = searched([1.0, 1.3], short, long, limit=limit)
    assert lattice.best is None or lattice.best in long
    if lattice.best is not None:  # and its neighbours were tried
        a, b = lattice.best
        for less in ((a - 1, b), (a, b - 1)):
            if min(less) > 0:
                assert (less, True) in asked and less not in long


def test_what_roles_take_alone_is_where_both_begin() -> None:
    lattice = Lattice([1.0, 1.0], MOST)
    lattice.take(0, 2)
    lattice.take(1, 3)
    assert lattice.next_short(inf) == (2, 3)
    assert lattice.bound == 5
    lattice.take(1, None)
    assert lattice.bound == inf
    assert lattice.next_short(inf) is None

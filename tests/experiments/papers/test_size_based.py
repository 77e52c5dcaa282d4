"""Orders by size on small runs: curves, bursts and classes by hand, and each once for real."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hydra import compose
from omegaconf import OmegaConf

from experiments.papers.curves import sustained
from experiments.papers.size_based import (
    MEASURES,
    Answers,
    Beside,
    Burst,
    Curve,
    Measured,
    Payers,
    SizeBased,
    against,
    answers_of,
    mean_of,
    only,
    p99_of,
    read_curves,
    read_payers,
)
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.metrics.compare import NO_ESTIMATE
from pagedsim.run.objects import make
from tests.metrics.tables import requests_of

ORDERS = {"fcfs": ["policy=fcfs"], "srpt": ["policy=srpt", "predictor=oracle"]}
CHAT: dict[str, Any] = {
    "overrides": ["workload=sharegpt"],
    "rates": {"fcfs": [1, 2], "srpt": [1, 2]},
    "more": {"srpt": ["policy.displace=false"]},
    "bound": 1.0,
}
AT_ONCE: dict[str, Any] = {"server": "big", "arms": {"sjf": ["policy=sjf"]}}


def study(**more: Any) -> SizeBased:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "orders": ORDERS,
        "base": "fcfs",
        "servers": {"big": ["model=opt-66b", "tensor_parallel=4"]},
        "curves": {"chat": CHAT},
        "bursts": {"burst": AT_ONCE},
        "payers": {"of": "chat", "rates": [2], "known": {"srpt": [0, 1]}},
    }
    return SizeBased(**(settings | more))


def answers(seconds: Sequence[float], tokens: Sequence[float] | None = None) -> Answers:
    """Of one token each, unless it says how many."""
    of = np.ones(len(seconds)) if tokens is None else np.array(tokens, dtype=float)
    return Answers(np.array(seconds, dtype=float), of, 10.0)


def runs(**latency: Sequence[float]) -> dict[str, list[Answers]]:
    """Of a curve: seconds a token at rates 1 and 2, under one seed."""
    return {
        f"chat, {order}, {rate} per s": [answers([seconds])]
        for order, both in latency.items()
        for rate, seconds in zip((1, 2), both, strict=True)
    }


# -- answers ---------------------------------------------------------------------------------------


class Two(Run):
    """Two requests that finished, and one that did not."""

    def requests(self, *columns: str) -> pa.Table:
        return requests_of(
            {"arrival": 1.0, "finished": 5.0, "output_tokens": 2},
            {"arrival": 2.0, "finished": 11.0, "output_tokens": 3},
            {"arrival": 3.0, "finished": math.nan, "output_tokens": 3, "state": "rejected"},
        ).select(columns)


class Nothing(Run):
    def requests(self, *columns: str) -> pa.Table:
        return requests_of({"finished": math.nan, "state": "rejected"}).select(columns)


def test_answers_are_of_finished_requests() -> None:
    found = answers_of(Two("arm", 0, Path(), {}, {}))
    assert found.seconds.tolist() == [4, 9] and found.a_token.tolist() == [2, 3]
    assert found.span == 10 and found.per_second == 0.2
    assert MEASURES["mean"](found) == 2.5 and MEASURES["P90"](found) == pytest.approx(2.9)


def test_a_run_without_answers_is_refused() -> None:
    with pytest.raises(ConfigError, match="arm: no request was finished"):
        answers_of(Nothing("arm", 0, Path(), {}, {}))


def test_ratios_are_paired_by_seed() -> None:
    ours, theirs = [answers([2.0]), answers([8.0])], [answers([1.0]), answers([4.0])]
    assert against(ours, theirs, mean_of).mean == 2


# -- curves ----------------------------------------------------------------------------------------


def measured(curve: Mapping[str, Any], **latency: Sequence[float]) -> Measured:
    return Measured("chat", Curve(**curve), "fcfs", runs(**latency))


def test_a_curve_beside_its_base() -> None:
    one = measured(CHAT, fcfs=(0.5, 4.0), srpt=(0.5, 2.0))
    assert one.line("fcfs") == {1: 0.5, 2: 4.0}
    assert {rate: gain.mean for rate, gain in one.gains("srpt").items()} == {1: 1, 2: 2}
    rates = [sustained({1: 0.5, 2: last}, 1.0) for last in (2.0, 4.0)]
    assert one.sustained_ratio("srpt", "mean").mean == pytest.approx(rates[0] / rates[1])
    assert one.capacity == 0.1


def test_a_bound_that_no_rate_brackets_gives_no_ratio() -> None:
    one = measured(CHAT, fcfs=(0.5, 4.0), srpt=(0.5, 0.9))
    assert one.sustained_ratio("srpt", "mean") is NO_ESTIMATE


PRINTED = {"mean": {"fcfs": {1: 0.5, 2: 9.0}, "srpt": {2: 3.0, 1: 0.5}}}


def test_rows_of_a_curve_have_what_was_published() -> None:
    curve = CHAT | {"published": PRINTED, "passes": {"srpt": 1.5}}
    arms = runs(fcfs=(0.5, 4.0), srpt=(0.5, 2.0))
    reading = read_curves({"chat": Curve(**curve)}, "fcfs", arms)
    rows = {row.what: row for row in reading.rows}
    ratio = rows["chat: rate at 1 s a token (mean), srpt / fcfs"]
    told = [sustained({1: 0.5, 2: last}, 1.0) for last in (3.0, 9.0)]
    assert ratio.published == pytest.approx(told[0] / told[1])
    assert "4.00 s here and 9.00 s there at 2/s" in ratio.why
    most = rows["chat: seconds a token, fcfs / srpt where that is most"]
    assert (most.ours, most.published) == (2, 3) and "ours at 2/s" in most.why
    passes = rows["chat: rate at which fcfs takes 1.5 times as long as srpt"]
    assert passes.ours == pytest.approx(1 + math.log(1.5) / math.log(2))
    assert reading.listings[0].rows[1] == ["2", "20.0", "4.00", "2.00", "9.00", "3.00"]


# -- bursts ----------------------------------------------------------------------------------------


def test_an_arm_of_a_burst_beside_the_base() -> None:
    burst = Burst(
        arms={"sjf": ["policy=sjf"]},
        published={"mean": {"fcfs": 4.0, "sjf": 1.0}, "P90": {"fcfs": 2.0}},
    )
    ours, theirs = [answers([1.0, 3.0])], [answers([4.0, 4.0])]
    one = Beside("burst", burst, "sjf", "fcfs", ours, theirs, 0.54)
    mean, p90 = one.rows()
    assert (mean.ours, mean.published, mean.why) == (0.5, 0.25, "tau 0.54")
    assert p90.ours == pytest.approx(2.8 / 4) and p90.published is None
    assert one.cells() == ["sjf", "0.54", "2.00", "0.500", "0.700", "0.250"]


# -- who pays --------------------------------------------------------------------------------------


def test_classes_are_equal_parts_by_length() -> None:
    every = answers([10, 20, 30, 40], [1, 2, 3, 4])
    assert [only(2, part, mean_of)(every) for part in (0, 1)] == [15, 35]
    assert only(4, 3, p99_of)(every) == 40
    alike = answers([1, 3], [5, 5])
    assert only(2, 0, mean_of)(alike) == 2  # of one length, all are the shortest


def test_shares_by_class() -> None:
    tokens = [1, 2, 3, 4]
    arms = {
        "chat, fcfs, 2 per s": [answers([8, 8, 8, 8], tokens)],
        "chat, srpt, 2 per s": [answers([2, 2, 6, 10], tokens)],
    }
    payers = Payers(of="chat", rates=[2], classes=2, known={"srpt": [0, 1]})
    reading = read_payers(payers, Curve(**CHAT), "fcfs", arms)
    mean, tail = reading.rows
    assert (mean.ours, mean.published, mean.difference) == (0.625, (0, 1), 0)
    assert tail.ours == pytest.approx((6 + 0.99 * 4) / 8) and tail.published is None
    assert reading.listings[0].rows[0][:5] == ["srpt", "0.625", "1.23", "0.250", "1.00"]


# -- the study -------------------------------------------------------------------------------------


def test_an_arm_comes_from_a_curve_or_a_burst() -> None:
    both = study(curves={"chat": CHAT, "chat, long": CHAT})
    assert both.key_of("chat, fcfs, 1 per s") == "study.curves.chat"
    assert both.key_of("chat, long, fcfs, 1 per s") == "study.curves.chat, long"
    assert both.key_of("burst, sjf") == "study.bursts.burst"


def test_some_of_it_alone() -> None:
    burst = study(only=["burst"])
    assert [arm.name for arm in burst.every_arm] == ["burst, fcfs", "burst, sjf"]
    assert not burst.every_curve


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"only": ["talk"]}, "only: unknown curve or burst 'talk'"),
        ({"curves": {"chat": CHAT | {"server": "small"}}}, "curves.chat.server=small: unknown"),
        (
            {"curves": {"chat": {"rates": {"fcfs": []}}}, "payers": None},
            r"curves.chat.rates.fcfs=\[\]: must name at least one rate",
        ),
        (
            {"curves": {"chat": {"rates": {"srpt": [1]}}}, "payers": None},
            "curves.chat.rates: lack fcfs, the base",
        ),
        (
            {"curves": {"chat": CHAT | {"published": {"P50": {}}}}},
            "curves.chat.published.P50: unknown",
        ),
        (
            {"payers": {"of": "chat", "rates": [3]}},
            "payers.rates=3: must be among those of fcfs in chat",
        ),
        ({"curves": {}, "bursts": {}, "payers": None}, "at least one must be asked for"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        study(**more)


@pytest.mark.usefixtures("hydra")
def test_the_settings_that_come_with_it_make_a_study() -> None:
    config = OmegaConf.to_container(compose("config", overrides=["experiment=size_based"]).study)
    assert isinstance(config, dict)
    made = make("study", config, SizeBased)
    assert len({arm.name for arm in made.every_arm}) == len(made.every_arm) > 80
    assert made.payers is not None

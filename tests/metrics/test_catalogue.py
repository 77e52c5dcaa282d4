"""Names, units and percentiles of metrics."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pagedsim.core import ConfigError
from pagedsim.metrics.catalogue import (
    further_percentiles,
    keys_of,
    label_of,
    lacks_percentiles,
    metric_of,
    scale_of,
    text_of,
)
from pagedsim.metrics.compare import value_of
from pagedsim.metrics.definitions import METRICS
from pagedsim.metrics.slo import Slo
from pagedsim.metrics.summary import summarise
from pagedsim.metrics.tables import Span
from tests.metrics.tables import FLEET, FLEET_STEPS, SIZES, fleet_steps, requests_of, steps_of

SETTINGS = {"total_blocks", "block_size", "max_seqs", "clients", "replicas", "tiers"}


def test_every_key_of_a_summary_is_in_the_catalogue() -> None:
    peaks: dict[str, Any] = {"flops": 1.0, "peak_flops": 1.0, "bytes": 1.0, "peak_bandwidth": 1.0}
    peaks |= {"joules": 1.0, "idle_watts": 1.0, "euros_per_hour": 1.0}
    peaks |= {"spans": [Span(0.0, 1.0, True, 1.0, 1.0)]}
    row = {"scheduled": 1.0, "session": "0", "replica": 0, "retries": 0}
    waiting = requests_of(*({"client": client, **row} for client in "ab"))
    steps = fleet_steps(*FLEET_STEPS)
    for name in ("loaded_cpu", "written_cpu"):
        steps = steps.append_column(name, pa.array([0] * steps.num_rows))
    summary = summarise(waiting, steps, **FLEET, slo=Slo(), swapped_peak=0, **peaks)
    known = {metric_of(key).name for key in summary.keys() - SETTINGS}
    assert known == set(METRICS)


@pytest.mark.parametrize(
    ("name", "key", "label"),
    [
        ("ttft_p95", "ttft_p95", "TTFT P95"),
        ("e2e_p99_9", "e2e_p99_9", "E2E P99.9"),
    ],
)
def test_any_percentile_of_a_latency_is_a_metric(name: str, key: str, label: str) -> None:
    assert (keys_of([name]), label_of(name)) == ([key], label)
    assert metric_of(name).unit == "s"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ttft_p101", "unknown metric 'ttft_p101': percentiles are from p0 to p100"),
        ("preemptions_p95", "preemptions is one number, without percentiles"),
        ("tftt_p95", "unknown metric 'tftt_p95': did you mean 'ttft'"),
    ],
)
def test_invalid_percentiles_are_refused(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        keys_of([name])


def test_a_summary_has_the_percentiles_that_settings_name() -> None:
    settings = {"metrics": ["ttft", "ttft_p95"], "bounds": {"a": {"tpot_p99.9": 1}}, "goal": "mfu"}
    more = further_percentiles(settings)
    assert more == {"ttft": {"p95": 95.0}, "tpot": {"p99_9": 99.9}}
    rows = [{"first_token": 0.3 * i**2, "finished": 900.0, "output_tokens": 9} for i in range(50)]
    table = requests_of(*({"client": "ab"[i % 2], **row} for i, row in enumerate(rows)))
    summary = summarise(table, steps_of(), **SIZES, percentiles=more)
    assert not lacks_percentiles(summary, settings)
    ttft = np.array([row["first_token"] for row in rows])
    assert value_of(summary, "ttft_p95") == pytest.approx(np.percentile(ttft, 95))
    assert value_of(summary, "ttft_p95", "b") == pytest.approx(np.percentile(ttft[1::2], 95))
    tpot = (900 - ttft) / 8
    assert value_of(summary, "tpot_p99.9") == pytest.approx(np.percentile(tpot, 99.9))
    without = summarise(table, steps_of(), **SIZES)
    assert lacks_percentiles(without, settings)
    assert {"ttft_p95", "tpot_p99_9"} == summary.keys() - without.keys()


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("ttft_mean", 1.0, "1.00 s"),
        ("itl_p50", 0.00004, "40.0 µs"),
        ("ttft_p99", float("nan"), "–"),
        ("output_tokens_per_s", 1234.5, "1,234 /s"),
        ("energy_j", 24_600.0, "24.6 kJ"),
        ("mean_watts", 5600.0, "5.60 kW"),
        ("cost_eur", 0.00471, "0.471 ct"),
        ("preemptions", 0, "0"),
    ],
)
def test_units_are_chosen_for_reading(key: str, value: float, text: str) -> None:
    assert text_of(key, value) == text


def test_a_column_has_one_unit() -> None:
    for values, suffix in (((0.5, 0.9, 3.0), "ms"), ((0.5, 0.9, 30.0), "s"), ((), "s")):
        assert scale_of("ttft_mean", values).suffix == suffix

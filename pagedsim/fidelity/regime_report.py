"""The loads of a validation: measurements, verdicts, tables and figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pagedsim.fidelity.engine_model import ModelledEngine
from pagedsim.fidelity.recorded import Recorded, predicted, samples_of
from pagedsim.metrics.arms import Run
from pagedsim.metrics.catalogue import label_of, latency_of, scale_of
from pagedsim.metrics.metric import STATISTICS
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.result import Listing
from pagedsim.metrics.summary import summarise
from pagedsim.metrics.tables import Requests
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import percent, signed
from pagedsim.report.style import key, looks, margins, new_figure, plain_log_ticks, tidy
from pagedsim.sim.cost import Fitted
from pagedsim.spec.run import RunSpec, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_NOTE = (
    "Spread: the standard deviation over the engine’s runs of the same requests. At its pace: the "
    "median error where the simulator is given the pace of the very run that it is held against, "
    "so that a machine which changes its pace is taken out; no prediction, but what is left to the "
    "model."
)
_NEAR = (
    "MAPE: the mean of how far single requests are off; engine’s own: how far one run is from the "
    "median of all; bias: of the means."
)


# -- measurements ----------------------------------------------------------------------------------


def measured(
    name: str,
    load: float,
    tolerance: float,
    engine: list[Recorded],
    simulated: Run,
    cost: Fitted,
) -> Regime:
    """A load with everything that was measured under it; `cost` is what the simulator's run had."""
    pace = []
    for run in engine:
        samples = samples_of(run.steps)
        taken = sum(sample.seconds for sample in samples)
        pace.append(taken / sum(predicted(cost, sample) for sample in samples) - 1)
    first = engine[0]
    return Regime(
        name,
        load,
        first.config["workload"]["rate"],
        tolerance,
        [_summary(run.requests, run.steps, run.machine) for run in engine],
        simulated.summary,
        pace,
        [summary_of(first.config, first.machine, first.seed, cost.slowed(1 + p)) for p in pace],
        [run.requests for run in engine],
        simulated.requests(),
    )


def summary_of(config: Settings, machine: Settings, seed: int, cost: Fitted) -> dict[str, Any]:
    """The summary of a run of the engine, as the simulator has it; nothing is kept of it."""
    recorder = Recorder()
    run_config = RunSpec(config, seed)
    ModelledEngine(run_config, machine, cost).run(run_config.workload(), recorder)
    return _summary(recorder.requests_table(), recorder.steps_table(), machine)


def _summary(requests: pa.Table, steps: pa.Table, machine: Settings) -> dict[str, Any]:
    return summarise(
        requests,
        steps,
        total_blocks=machine["blocks"],
        block_size=machine["block_size"],
        max_seqs=machine["max_seqs"],
    )


UNEVEN = 0.1
"""A spread of the engine's runs that makes a comparison with them meaningless."""


def doubts(regimes: Sequence[Regime]) -> Iterator[str]:
    """What a reader must know before believing a validation."""
    last = max(regimes, key=lambda regime: regime.load)
    if not any(summary["preemptions"] for summary in last.engine):
        yield f"no request was preempted under {last.name}: memory.blocks is too large"
    spreads = {
        (regime.name, key): agreement.spread
        for regime in regimes
        for key, agreement in regime.agreements.items()
        if key in JUDGED and agreement.spread > UNEVEN
    }
    if spreads:
        (name, key), most = max(spreads.items(), key=lambda item: item[1])
        yield (
            f"the engine is far from itself: under {name} the {label_of(key)} of its runs differs "
            f"by ± {100 * most:.0f} %, with which little can be shown; let nothing else run here"
        )


# -- statistics of a load --------------------------------------------------------------------------

SHOWN = ("ttft", "tpot", "e2e")
KEYS = (
    *(f"{name}_{statistic}" for name in SHOWN for statistic in STATISTICS),
    "output_tokens_per_s",
    "preemptions",
    "kv_utilisation_mean",
)
JUDGED = ("ttft_mean", "tpot_mean", "output_tokens_per_s")
"""Metrics that decide whether a regime agrees."""
SPREADS = 2.0
"""Errors up to this multiple of the engine's own spread count as agreement."""
WIDE = 0.25
"""A spread above which agreement within twice the spread is not conclusive."""


class Agreement(NamedTuple):
    """Agreement in one metric."""

    engine: float
    """Median over the engine's runs."""
    spread: float
    """Coefficient of variation over the engine's runs; NaN for one run."""
    simulator: float
    error: float
    """simulator / engine - 1; NaN if the engine's value is 0."""
    at_pace: float
    """Median error with the simulator scaled to the pace of each run, which excludes changes of the
    machine's speed. A diagnosis, not a prediction."""

    def verdict(self, tolerance: float) -> str:
        """Whether the error is acceptable, and by which criterion."""
        if abs(self.error) <= tolerance:
            return f"within {100 * tolerance:.0f} %"
        if abs(self.error) <= SPREADS * self.spread:
            return "within twice the spread" + ", too wide to tell" * (self.spread > WIDE)
        return "beyond"


class Nearness(NamedTuple):
    """Per-request agreement in one latency; the engine's value is the median of its runs."""

    mape: float
    """Mean of |simulator / engine - 1|."""
    pearson: float
    bias: float
    """simulator / engine - 1 of the means."""
    spread: float
    """Mean of |one run / the median - 1| over the engine's runs: the noise floor."""


@dataclass(frozen=True)
class Regime:
    """The same requests in several runs on the engine and one in the simulator."""

    name: str
    load: float
    """Offered load as a share of capacity."""
    rate: float
    tolerance: float
    engine: Sequence[Mapping[str, Any]]
    simulator: Mapping[str, Any]
    pace: Sequence[float]
    """Measured over predicted total step time of each run: the part of an error due to step times
    or to a changed speed of the machine."""
    paced: Sequence[Mapping[str, Any]]
    """The simulator's summaries, scaled to the pace of each run."""
    engine_requests: Sequence[pa.Table]
    simulator_requests: pa.Table

    @cached_property
    def agreements(self) -> dict[str, Agreement]:
        return {key: self._agreement(key) for key in KEYS}

    @cached_property
    def verdicts(self) -> dict[str, str]:
        return {key: self.agreements[key].verdict(self.tolerance) for key in JUDGED}

    @cached_property
    def nearness(self) -> dict[str, Nearness]:
        mine = Requests.of(self.simulator_requests)
        runs = [Requests.of(table) for table in self.engine_requests]
        return {
            name: _nearness(latency_of(name, mine), [latency_of(name, run) for run in runs])
            for name in SHOWN
        }

    def _agreement(self, key: str) -> Agreement:
        values = [float(summary[key]) for summary in self.engine]
        middle, mine = float(np.median(values)), float(self.simulator[key])
        spread = math.nan
        if len(values) > 1:
            spread = float(np.std(values, ddof=1) / np.mean(values)) if any(values) else 0.0
        paced = [float(summary[key]) for summary in self.paced]
        at_pace = np.median([_error(mine, run) for mine, run in zip(paced, values, strict=True)])
        return Agreement(middle, spread, mine, _error(mine, middle), float(at_pace))


def _error(simulator: float, engine: float) -> float:
    if not engine:
        return math.nan if simulator else 0.0
    return simulator / engine - 1


def _nearness(mine: NDArray[np.float64], runs: Sequence[NDArray[np.float64]]) -> Nearness:
    every = np.array([*runs, mine])
    known = ~np.isnan(every).any(axis=0) & (every > 0).all(axis=0)
    if not known.any():
        return Nearness(math.nan, math.nan, math.nan, math.nan)
    engine, mine = every[:-1, known], every[-1, known]
    middle = np.median(engine, axis=0)
    varies = middle.std() > 0 and mine.std() > 0
    return Nearness(
        float(np.abs(mine / middle - 1).mean()),
        float(np.corrcoef(middle, mine)[0, 1]) if varies else math.nan,
        float(mine.mean() / middle.mean() - 1),
        float(np.abs(engine / middle - 1).mean()) if len(engine) > 1 else math.nan,
    )


# -- report ----------------------------------------------------------------------------------------


def finding(regimes: Sequence[Regime], machine: Mapping[str, Any], steps: int) -> list[str]:
    """The verdict of each load; `steps`: engine steps that the simulator planned alike."""
    verdicts = []
    for regime in regimes:
        judged, errors = regime.verdicts, regime.agreements
        words = (f"{label_of(k)} {signed(errors[k].error)}, {judged[k]}" for k in JUDGED)
        verdicts.append(f"{regime.name}: {'; '.join(words)}")
    return [
        *verdicts,
        f"{machine['device']}, {machine['model']}, {machine['dtype']}, {machine['blocks']} "
        f"blocks of {machine['block_size']} tokens. Step times are fitted to other requests; "
        f"all {steps:,} steps of the engine are planned by the simulator alike.",
    ]


def listings(regimes: Sequence[Regime]) -> Iterator[Listing]:
    """Two tables a load: metrics, and errors request by request."""
    for regime in regimes:
        yield _metrics(regime, f" {_NOTE}" if regime is regimes[0] else "")
        rows = [
            {
                "": label_of(name),
                "MAPE": percent(near.mape),
                "engine’s own": percent(near.spread),
                "Pearson r": f"{near.pearson:.3f}",
                "bias": signed(near.bias),
            }
            for name, near in regime.nearness.items()
        ]
        yield Listing.of(f"{regime.name}: request by request", rows, _NEAR)


def _metrics(regime: Regime, note: str) -> Listing:
    """Every metric of a load, with the pace of the engine's runs in the note."""
    agreements, rows = regime.agreements, []
    for name, agreement in agreements.items():
        scale = scale_of(name, [agreement.engine, agreement.simulator])
        rows.append(
            {
                "": label_of(name),
                "engine": scale.text(agreement.engine),
                "spread": "–" if math.isnan(agreement.spread) else f"± {percent(agreement.spread)}",
                "simulator": scale.text(agreement.simulator),
                "error": signed(agreement.error),
                "at its pace": signed(agreement.at_pace),
                "verdict": regime.verdicts.get(name, ""),
            }
        )
    load = f"{percent(regime.load, 0)} of what can be served"
    count = regime.simulator_requests.num_rows
    pace = (
        f"the same steps took the engine, against what was fitted: "
        f"{', '.join(map(signed, regime.pace))}; where the simulator is given each run's pace its "
        f"errors are {', '.join(f'{label_of(k)} {signed(agreements[k].at_pace)}' for k in JUDGED)}"
    )
    title = f"{regime.name}: {count} requests at {regime.rate:.3g}/s, {load}"
    return Listing.of(title, rows, f"{pace}.{note}")


def table(regimes: Sequence[Regime]) -> list[dict[str, object]]:
    """A row a metric of a load, for comparison.csv."""
    return [
        {
            "load": regime.name,
            "metric": key,
            **agreement._asdict(),
            "verdict": regime.verdicts.get(key, ""),
        }
        for regime in regimes
        for key, agreement in regime.agreements.items()
    ]


def data(regime: Regime) -> dict[str, Any]:
    """All numbers of a load, for result.json."""
    return {
        "load": regime.load,
        "rate": regime.rate,
        "requests": regime.simulator_requests.num_rows,
        "runs": len(regime.engine),
        "tolerance": regime.tolerance,
        "pace": list(regime.pace),
        "verdicts": regime.verdicts,
        "metrics": {name: agreement._asdict() for name, agreement in regime.agreements.items()},
        "by_request": {name: nearness._asdict() for name, nearness in regime.nearness.items()},
    }


def drawing(regimes: Sequence[Regime]) -> FigureSpec:
    """Distributions of latencies."""
    caption = (
        "The share of requests served within a time: the simulator's curve over those of the "
        f"engine's runs, {len(regimes[0].engine)} of the same requests. Where these differ, so may "
        "the simulator."
    )
    return FigureSpec("Distributions", caption, partial(draw_validation, regimes))


_SHARES = np.linspace(0, 1, 241)
_WIDE = 20
"""Ratio of the largest to the smallest value above which the axis is logarithmic."""


def draw_validation(regimes: Sequence[Regime]) -> Figure:
    """A row of panels per regime with TTFT, TPOT and E2E."""
    look = looks(["engine", "simulator"])
    figure = new_figure(0.75 + 2.0 * len(regimes))
    panels = figure.subplots(len(regimes), len(SHOWN), squeeze=False, sharey=True)
    for row, regime in zip(panels, regimes, strict=True):
        runs = [Requests.of(table) for table in regime.engine_requests]
        mine = Requests.of(regime.simulator_requests)
        for axes, name in zip(row, SHOWN, strict=True):
            columns = (latency_of(name, run) for run in (*runs, mine))
            every = [values[~np.isnan(values)] for values in columns]
            scale = scale_of(f"{name}_mean", [float(np.median(every[-1]))])
            for number, values in enumerate(every):
                style = look["simulator" if number == len(runs) else "engine"]
                curve = np.quantile(values, _SHARES) * scale.factor
                axes.plot(curve, _SHARES, color=style.colour, linestyle=style.dashes)
            drawn = np.concatenate(every) * scale.factor
            if 0 < drawn.min() < drawn.max() / _WIDE:
                axes.set_xscale("log")
                plain_log_ticks(axes.xaxis)
            axes.set_title(f"{label_of(name)}, {regime.name}")
            tidy(axes, x=scale.suffix)
    for axes in panels[:, 0]:
        axes.set_ylim(0, 1.01)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 0.99], ["0", "25 %", "50 %", "75 %", "99 %"])
        axes.set_ylabel("share of requests")
    margins(figure, hspace=0.55, wspace=0.12)
    key(figure, look)
    return figure

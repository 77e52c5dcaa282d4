"""Tables and notes of a fit to a log, or of a prediction of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pagedsim.fidelity.logs.constants import FRONT, Constant
from pagedsim.fidelity.logs.fit import Cold, LogFit
from pagedsim.fidelity.logs.score import METRICS, Scores
from pagedsim.fidelity.logs.server import ExternalServer, Served
from pagedsim.metrics.result import Listing
from pagedsim.report.numbers import percent, signed

PEAK = 0.98
"""Share of a data sheet from which on the log is said to require all of it."""
SAME = 0.001
"""Increase of a mean's relative error up to which no note is made."""
_CONSTANTS = (
    "as good: two standard deviations to each side, the others making up for it, by this log and "
    "by what is known of such GPUs and servers; decided: whether that is little, else which other "
    "makes up for it"
)
_ERRORS = (
    "mean, P50, P90, P99: the predicted one against the measured, in %; bias: mean over requests "
    "of predicted / measured − 1; each: of the same without its sign; of the "
    "queue: of those that waited a millisecond or more"
)
_SPREAD = ("mean", "P50", "P90", "P99", "bias")


def constants(fit: LogFit) -> Listing:
    """The fitted constants with their intervals."""
    rows = []
    for name, interval in fit.evidence.ranges.items():
        partner = "" if interval.trades is None else f", for {interval.trades}"
        rows.append(
            {
                "": Constant(name).meaning,
                "fitted": f"{fit.constants[name]:.3g}",
                "before": f"{fit.begin[name]:.3g}",
                "unit": Constant(name).unit,
                "as good": interval.text,
                "decided": "yes" if interval.decided else f"no{partner}",
            }
        )
    return Listing.of("Constants of the server", rows, _CONSTANTS)


def errors(part: str, score: Scores) -> Listing:
    """How far off the latencies of some requests are."""
    rows = []
    for metric, error in score.errors.items():
        shares = (*error.relative, error.bias)
        rows.append(
            {
                "": _title(metric),
                "measured": _time(metric, error.measured.mean),
                "predicted": _time(metric, error.predicted.mean),
                **{k: _number(v) for k, v in zip(_SPREAD, shares, strict=True)},
                "each": _number(error.mean_absolute).lstrip("+"),
                "r": "–" if error.correlation != error.correlation else f"{error.correlation:.2f}",
            }
        )
    return Listing.of(f"{part}: {score.count} requests", rows, _ERRORS)


def logs(title: str, scores: Mapping[str, Scores], note: str) -> Listing:
    """How far off the means of whole logs are."""
    rows = [
        {
            "": part,
            "requests": f"{score.count:,}",
            "metric": metric.upper(),
            "measured": f"{error.measured.mean:.4g} s",
            "predicted": f"{error.predicted.mean:.4g} s",
            "off": signed(error.relative.mean),
            "half within": percent(error.median_absolute),
        }
        for part, score in scores.items()
        for metric, error in score.errors.items()
    ]
    return Listing.of(title, rows, note)


def spreads(part: str, score: Scores) -> Listing:
    """Measured and predicted latencies themselves."""
    rows = []
    for metric, error in score.errors.items():
        both = zip(error.measured, error.predicted, strict=True)
        cells = [f"{_time(metric, actual)} → {_time(metric, two)}" for actual, two in both]
        rows.append([_title(metric), *cells])
    return Listing(f"{part}: measured → predicted", ["", *_SPREAD[:4]], rows)


def mean_errors(score: Scores) -> str:
    """The relative errors of the mean latencies, in words."""
    return ", ".join(
        f"{metric.upper()} {signed(score.errors[metric].relative.mean)}"
        for metric in METRICS
        if metric in score.errors
    )


def data(served: Served, scores: Mapping[str, Scores]) -> dict[str, Any]:
    """All errors, and what the simulated server did."""
    return {
        "scores": {part: score.content() for part, score in scores.items()},
        "simulated": {"steps": served.steps, "preemptions": served.preemptions},
    }


def table(scores: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """A row a metric of some requests."""
    return [
        {"requests": part, "metric": metric, **error.content()}
        for part, score in scores.items()
        for metric, error in score.errors.items()
    ]


def _title(metric: str) -> str:
    return f"{metric.upper() if metric in METRICS else metric}, {'ms' if metric == 'tpot' else 's'}"


def _time(metric: str, seconds: float) -> str:
    time = 1e3 * seconds if metric == "tpot" else seconds
    return f"{time:.2f}" if time >= 0.1 else f"{time:.2g}"


def _number(share: float) -> str:
    return signed(share, unit="")


# -- what a reader must know -----------------------------------------------------------------------


def about_fit(fit: LogFit) -> Iterator[str]:
    """Notes on the fitted constants."""
    if fit.constants == fit.begin:
        yield (
            "nothing that was tried fits this log better than what cost= says, so that it is kept"
        )
    ranges = fit.evidence.ranges
    for name, interval in ranges.items():
        if not interval.decided:
            partner = "" if interval.trades is None else f", and makes up for {interval.trades}"
            yield (
                f"this log does not decide {name}: {interval.text} fit as well{partner}; do not "
                "rely on it elsewhere"
            )
    for one, other, correlation in fit.evidence.pairs:
        yield (
            f"{one} and {other} are hardly told apart: what they take has a correlation of "
            f"{correlation:.2f}"
        )
    for name in ranges:
        if Constant(name).share and fit.constants[name] >= PEAK:
            yield (
                f"{name}={fit.constants[name]:.3g}: this log asks for all that the data sheet "
                "has, or more: the GPU may be another, or faster than printed, or prompts may have "
                "been cached, or more than one server stand behind it"
            )
    if FRONT in ranges and fit.constants[FRONT] > 0:
        before = f"{fit.constants[FRONT]:.3g} ms of each TTFT ({ranges[FRONT].text} fit as well)"
        yield f"{before} are no step's: HTTP, tokenising, clocks that differ"


def worse(scores: Mapping[str, Scores]) -> Iterator[str]:
    """Notes on mean latencies that the fit made worse; `scores` has those before and after it."""
    for part in ("fitted", "unseen"):
        before, after = scores[f"{part}, before the fit"].errors, scores[part].errors
        for metric, error in after.items():
            earlier, later = before[metric].relative.mean, error.relative.mean
            if metric in METRICS and abs(later) > abs(earlier) + SAME:
                yield (
                    f"the fit made the mean {metric.upper()} of the {part} requests worse: "
                    f"{signed(earlier)} before it, {signed(later)} with it"
                )


def about_log(
    server: ExternalServer, served: Served, cold: Cold, scores: Scores, part: str
) -> Iterator[str]:
    """Of the log and of what the simulated server did with it."""
    if server.config["memory"].get("blocks") is None:
        yield (
            "memory.blocks was not given: the server is taken to have "
            f"{server.built.scheduler.memory.total:,}, by the hardware's data sheet; its own log "
            "may say otherwise"
        )
    if server.log.failed:
        yield (
            f"{server.log.failed} requests of the log failed and are left out: what the server did "
            "for them is missing"
        )
    if cold.requests:
        some = "request was" if cold.requests == 1 else f"{cold.requests} requests were"
        yield (
            f"the first {some} served by a server that had just been started: {cold.seconds:.3g} s "
            f"to the first token, where a warm one takes {cold.warm:.3g} s"
        )
    worst = scores.worst
    yield (
        f"farthest off of the {part}: {signed(worst.mean)} in the mean "
        f"{worst.metric.upper()} of the quarter with {worst.by} {worst.low:,.4g} to "
        f"{worst.high:,.4g}"
    )
    yield f"the simulated server took {served.steps:,} steps and preempted {served.preemptions:,}"
    if server.log.arrived[-1] == 0:
        yield (
            "all requests come at once: those that the log names first come first, as with a "
            "server that is fair to their order"
        )

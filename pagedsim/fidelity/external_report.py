"""What came out of a calibration to a server's log, as tables and words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pagedsim.fidelity.external_fit import Found
from pagedsim.fidelity.external_log import Log
from pagedsim.fidelity.external_score import Scores
from pagedsim.fidelity.external_server import Served
from pagedsim.metrics.result import Listing
from pagedsim.report.percent import signed

UNITS = {
    "decode_step": ("a step of decodes alone", "ms", 1e3),
    "mixed_step": ("a step with prompts", "ms", 1e3),
    "prompt_token": ("a token of a prompt", "µs", 1e6),
    "prompt_pair": ("two attending tokens of a prompt", "ns", 1e9),
    "decode": ("a sequence that decodes", "µs", 1e6),
    "context_token": ("a token that a decode attends to", "ns", 1e9),
}
"""Each coefficient in words, and the unit in which it reads well."""
LOOSE = 0.001
"""A coefficient is loose where 10 % of it change the fit by less than 0.1 %."""


_COEFFICIENTS = (
    "firm: how much farther off the fitted requests are with 10 % more of it, or less, whichever "
    "is less"
)
_ERRORS = (
    "mean, P50, P90, P99: the predicted one against the measured, in %; each: mean over requests "
    "of |predicted / measured − 1|; half: what half of them are within"
)


def coefficients(found: Found) -> Listing:
    """What each part of a step takes."""
    rows = []
    for name, (meaning, unit, scale) in UNITS.items():
        values = (getattr(of, name) * scale for of in (found.weights, found.begin))
        firm = signed(found.firmness[name], 2, unit="") if name in found.firmness else "kept"
        rows.append([meaning, *(f"{value:.3g}" for value in values), unit, firm])
    head = ["it takes", "fitted", "before", "unit", "firm, %"]
    return Listing("Step times", head, rows, _COEFFICIENTS)


def errors(part: str, score: Scores) -> Listing:
    """How far off the latencies of some requests are."""
    head = ["", "measured", "predicted", "mean", "P50", "P90", "P99", "each", "half", "r"]
    rows = []
    for metric, error in score.errors.items():
        seconds = metric != "tpot"
        times = (one if seconds else 1e3 * one for one in (error.measured, error.predicted))
        rows.append(
            [
                f"{metric.upper()}, {'s' if seconds else 'ms'}",
                *(f"{time:.2f}" if time >= 0.1 else f"{time:.2g}" for time in times),
                *(signed(one, unit="") for one in (error.mean, error.p50, error.p90, error.p99)),
                *(f"{100 * share:.1f}" for share in (error.each, error.half)),
                f"{error.correlation:.2f}",
            ]
        )
    return Listing(f"{part}: {score.count} requests", head, rows, _ERRORS)


def table(scores: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """A row a metric of some requests."""
    return [
        {"requests": part, "metric": metric, **error._asdict()}
        for part, score in scores.items()
        for metric, error in score.errors.items()
    ]


def notes(
    log: Log, found: Found, scores: Mapping[str, Scores], whole: Served, guessed: int | None
) -> Iterator[str]:
    """What a reader must know; `guessed`: the blocks it is taken to have, if nobody said."""
    if guessed is not None:
        yield (
            f"memory.blocks was not given: the server is taken to have {guessed:,}, by the "
            "hardware's data sheet; its own log may say otherwise"
        )
    for part in ("fitted", "unseen"):
        worst = scores[part].worst
        yield (
            f"farthest off of the {part}: {signed(worst.mean)} in the mean "
            f"{worst.metric.upper()} of the quarter with {worst.by} {worst.low:,.4g} to "
            f"{worst.high:,.4g}"
        )
    yield f"the simulated server took {whole.steps:,} steps and preempted {whole.preemptions:,}"
    if log.arrived[-1] == 0:
        yield (
            "all requests come at once: those that the log names first are fitted, as a server "
            "that is fair to their order begins with them"
        )
    for name, firm in found.firmness.items():
        if firm < LOOSE:
            yield f"this log hardly tells what {UNITS[name][0]} takes: do not rely on it elsewhere"

"""What came out of a calibration from outside, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.outside_fit import Found
from experiments.outside_log import Log
from experiments.outside_score import Scores
from experiments.outside_server import Served

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


def say(log: Log, found: Found, scores: Mapping[str, Scores], whole: Served) -> None:
    """Print it all."""
    console = Console()
    console.print(
        f"{log.path.name}: {len(log)} requests within {log.arrived[-1]:.1f} s, answered after "
        f"{(log.arrived + log.latencies.e2e).max():.1f} s; fitted by {found.simulations} "
        f"simulations, requests are {100 * found.distance:.1f} % off on average",
        highlight=False,
    )
    console.print(_coefficients(found))
    for part, score in scores.items():
        console.print(_errors(part, score))
    for note in _notes(log, found, scores["unseen"], whole):
        console.print(f"note: {note}", highlight=False)


def _coefficients(found: Found) -> Table:
    table = _table("coefficient", "fitted", "before", "unit", "10 % of it")
    for name, (meaning, unit, scale) in UNITS.items():
        values = (getattr(of, name) * scale for of in (found.weights, found.begin))
        table.add_row(
            meaning,
            *(f"{value:.3g}" for value in values),
            unit,
            _signed(found.firmness[name], 2) if name in found.firmness else "not fitted",
        )
    return table


def _errors(part: str, score: Scores) -> Table:
    table = _table("", "measured", "predicted", "mean", "P50", "P90", "P99", "each", "r")
    table.title, table.title_justify = f"{part}: {score.count} requests", "left"
    for metric, error in score.errors.items():
        seconds = metric != "tpot"
        times = (one if seconds else 1e3 * one for one in (error.measured, error.predicted))
        table.add_row(
            f"{metric.upper()}, {'s' if seconds else 'ms'}",
            *(f"{time:.2f}" for time in times),
            *(_signed(off) for off in (error.mean, error.p50, error.p90, error.p99)),
            f"{100 * error.each:.1f} %",
            f"{error.correlation:.2f}",
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _notes(log: Log, found: Found, unseen: Scores, whole: Served) -> Iterator[str]:
    worst = unseen.worst
    yield (
        f"farthest off: mean {worst.metric.upper()} of unseen requests with {worst.by} "
        f"{worst.low:,.4g} to {worst.high:,.4g}: {_signed(worst.mean)}"
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


def _signed(share: float, digits: int = 1) -> str:
    return f"{100 * share:+.{digits}f} %".replace("-", "−")

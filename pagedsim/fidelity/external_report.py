"""What came out of a calibration from outside, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table

from pagedsim.fidelity.external_fit import Found
from pagedsim.fidelity.external_log import Log
from pagedsim.fidelity.external_score import Scores
from pagedsim.fidelity.external_server import Served
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


def say(
    log: Log,
    found: Found,
    scores: Mapping[str, Scores],
    whole: Served,
    guessed: int | None,
) -> None:
    """Print it all; `guessed`: how many blocks the server is taken to have, if nobody said."""
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
    console.print(
        "firm: how much farther off the fitted requests are with 10 % more of it, or less. "
        "mean, P50, P90, P99: the predicted one against the measured, in %; each: "
        "mean over requests of |predicted / measured − 1|; half: what half of them are within",
        style="dim",
    )
    if guessed is not None:
        console.print(
            f"note: memory.blocks was not given: the server is taken to have {guessed:,}, by the "
            "hardware's data sheet; its own log may say otherwise",
            highlight=False,
        )
    for note in _notes(log, found, scores, whole):
        console.print(f"note: {note}", highlight=False)


def _coefficients(found: Found) -> Table:
    table = _table("it takes", "fitted", "before", "unit", "firm, %")
    for name, (meaning, unit, scale) in UNITS.items():
        values = (getattr(of, name) * scale for of in (found.weights, found.begin))
        table.add_row(
            meaning,
            *(f"{value:.3g}" for value in values),
            unit,
            signed(found.firmness[name], 2, unit="") if name in found.firmness else "kept",
        )
    return table


def _errors(part: str, score: Scores) -> Table:
    table = _table("", "measured", "predicted", "mean", "P50", "P90", "P99", "each", "half", "r")
    table.title, table.title_justify = f"{part}: {score.count} requests", "left"
    table.title_style = ""
    for metric, error in score.errors.items():
        seconds = metric != "tpot"
        times = (one if seconds else 1e3 * one for one in (error.measured, error.predicted))
        table.add_row(
            f"{metric.upper()}, {'s' if seconds else 'ms'}",
            *(f"{time:.2f}" for time in times),
            *(signed(one, unit="") for one in (error.mean, error.p50, error.p90, error.p99)),
            *(f"{100 * share:.1f}" for share in (error.each, error.half)),
            f"{error.correlation:.2f}",
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _notes(log: Log, found: Found, scores: Mapping[str, Scores], whole: Served) -> Iterator[str]:
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

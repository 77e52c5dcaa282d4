"""What the scores say: in sentences, in tables, in numbers for a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.fidelity.constants import Refits, medians, pooled, worst_tokens
from experiments.fidelity.truth_rows import FITTED
from experiments.fidelity.truth_scores import (
    CLASSES,
    ONE,
    SEVERAL,
    WITHIN,
    Scored,
    by,
    class_of,
    score,
)
from pagedsim.fidelity.external_score import Scores
from pagedsim.fidelity.step_tables.cell import METRICS
from pagedsim.metrics.result import Listing
from pagedsim.report.numbers import percent, signed

FARTHEST = 10
"""So many of the worst rows are named."""
_UNIT = "in %: median |error|, in brackets the 90th percentile, and the median with its sign"


def usable(every: Sequence[Scored]) -> list[Scored]:
    """Rows that their server could run as the table says."""
    return [one for one in every if not one.point.mark]


def table_of(one: Scored) -> str:
    """The table and the GPU."""
    cell = one.point.cell
    known = " (fitted)" if cell.table in FITTED else ""
    return f"{cell.table}, {cell.hardware.name}{known}"


def _server_of(one: Scored) -> str:
    """The model and its GPUs, besides."""
    cell = one.point.cell
    form = "" if cell.precision == "fp16" else f" {cell.precision}"
    model = f"{cell.model.name}{form} on {cell.tensor_parallel} × {cell.hardware.name}"
    return f"{cell.table}: {model}"


# -- sentences -------------------------------------------------------------------------------------


def finding(
    every: Sequence[Scored], refits: Refits | None, logs: Mapping[str, Scores]
) -> list[str]:
    """The most telling first."""
    told = usable(every)
    fitted = [one for one in told if one.point.cell.table in FITTED]
    if not told:
        return ["No server could run any row as its table says: see the last of the tables below."]
    if refits is None or not fitted:
        return [_sentence("Uncalibrated step times against these tables, median errors", told)]
    found = [
        _sentence(
            f"{len(every):,} measured numbers are held against uncalibrated step times. In the "
            "tables that the constants are fitted to, median errors are",
            fitted,
        )
    ]
    unseen, _ = pooled(refits.models)
    found.append(
        "Where the model was left out of the fit, they are "
        f"{_medians(unseen)}; limits are {_medians(WITHIN)}, and half as much again for what was "
        f"left out. {_farthest(refits)}."
    )
    found.append(
        "Tables that no fit has seen, tokens by a fit without them, and in brackets as constants "
        f"stand: {_others(refits)}."
    )
    if logs:
        means = "; ".join(f"{name}: {_means(one)}" for name, one in logs.items())
        found.append(f"Means of whole logs, before any fit: {means}.")
    return found


def _farthest(refits: Refits) -> str:
    parts = []
    for group in (refits.models, refits.gpus):
        what, of = worst_tokens(group)
        parts.append(f"{what} {percent(of.median)}")
    return f"The worst token errors of a model and a GPU left out are {' and '.join(parts)}"


def _means(scores: Scores) -> str:
    errors = scores.errors.items()
    return ", ".join(f"{metric.upper()} {signed(error.off.mean)}" for metric, error in errors)


def _sentence(begin: str, group: Sequence[Scored]) -> str:
    return f"{begin} {_medians(medians(group))}."


def _medians(of: Mapping[str, float]) -> str:
    return ", ".join(f"{percent(of[name])} ({name})" for name in CLASSES if name in of)


def _others(refits: Refits) -> str:
    parts = []
    for one in refits.others:
        unseen, stands = (
            score([each for each in group if class_of(each.point) in (ONE, SEVERAL)]).median
            for group in (one.unseen, one.seen)
        )
        parts.append(f"{one.what} {percent(unseen)} ({percent(stands)})")
    return ", ".join(parts)


# -- tables ----------------------------------------------------------------------------------------


def listings(every: Sequence[Scored]) -> Iterator[Listing]:
    """By table and GPU, by server, what could not be run so, and the worst."""
    told, marked = usable(every), [one for one in every if one.point.mark]
    yield _grouped("By table and GPU", by(told, table_of))
    yield _grouped("By model and number of GPUs", by(told, _server_of), worst=True)
    if marked:
        groups = by(marked, lambda one: f"{table_of(one)}: {one.point.mark}")
        note = f"rows that their server could not run as the table says; {_UNIT}"
        yield _grouped("Not as the table says", groups, note=note)
    apart = [one for one in told if one.point.cell.hardware.family is not None]
    yield _worst(f"The {FARTHEST} farthest off", told)
    if apart and len(apart) < len(told):
        yield _worst(f"The {FARTHEST} farthest off, of GPUs whose family is known", apart)


def _grouped(
    title: str, groups: Mapping[str, Sequence[Scored]], worst: bool = False, note: str = _UNIT
) -> Listing:
    rows = []
    for name, group in groups.items():
        classes = by(group, lambda one: class_of(one.point))
        cells = [_cell(classes[one]) if one in classes else "–" for one in CLASSES]
        if worst:
            cells.append(_named(score(group).worst))
        rows.append([name, *cells])
    head = ["", *CLASSES, *(["worst row"] if worst else [])]
    return Listing(title, head, rows, note)


def _cell(group: Sequence[Scored]) -> str:
    of = score(group)
    size = f"{100 * of.median:.1f} ({100 * of.p90:.1f})"
    return f"{of.rows}: {size} {signed(of.bias, 1, '')}"


def _named(one: Scored) -> str:
    """A row by its sizes."""
    cell = one.point.cell
    sizes = f"{cell.prompt:,}/{cell.output:,}×{cell.at_once}"
    return f"{METRICS[one.point.metric]} {sizes}: {signed(one.error, 0)}"


def _worst(title: str, group: Sequence[Scored]) -> Listing:
    order = sorted(
        group,
        key=lambda one: (
            max(one.predicted, one.point.measured) / min(one.predicted, one.point.measured)
        ),
        reverse=True,
    )
    rows = [
        [
            f"{one.point.cell.table}: {one.point.cell}",
            METRICS[one.point.metric],
            f"{1e3 * one.point.measured:,.4g} ms",
            f"{1e3 * one.predicted:,.4g} ms",
            signed(one.error, 0),
        ]
        for one in order[:FARTHEST]
    ]
    head = ["row", "what", "measured", "predicted", "off"]
    return Listing(title, head, rows, "by how many times one is the other")


# -- numbers ---------------------------------------------------------------------------------------


def data(
    every: Sequence[Scored], refits: Refits | None, logs: Mapping[str, Scores]
) -> dict[str, Any]:
    """For result.json."""
    found: dict[str, Any] = {"rows": _groups(usable(every), _server_of)}
    found["tables"] = _groups(usable(every), table_of)
    found["not as the table says"] = _groups(
        [one for one in every if one.point.mark], lambda one: f"{table_of(one)}: {one.point.mark}"
    )
    if refits is not None:
        found["constants"] = {
            name: {
                "stands": refits.standing[name],
                "fitted": value,
                "errors rise": refits.minded[name],
                "without a model": refits.reach(name, refits.models),
                "without a GPU": refits.reach(name, refits.gpus),
            }
            for name, value in refits.whole.values.items()
        }
        found["left out"] = {
            one.what: {"unseen": medians(one.unseen), "stands": medians(one.seen)}
            for one in (*refits.models, *refits.gpus, *refits.others)
        }
    if logs:
        found["logs"] = {name: one.content() for name, one in logs.items()}
    return found


def _groups(every: Sequence[Scored], key: Any) -> dict[str, Any]:
    return {
        name: {
            kind: {
                "rows": (of := score(part)).rows,
                "median": of.median,
                "p90": of.p90,
                "bias": of.bias,
                "worst": _named(of.worst),
            }
            for kind, part in by(group, lambda one: class_of(one.point)).items()
        }
        for name, group in by(every, key).items()
    }


def table(every: Sequence[Scored]) -> list[dict[str, object]]:
    """Every number, for comparison.csv."""
    return [
        {
            "table": (cell := one.point.cell).table,
            "row": cell.place.rpartition("/")[2],
            "model": cell.model.name,
            "hardware": cell.hardware.name,
            "tensor_parallel": cell.tensor_parallel,
            "products": cell.precision,
            "stack": cell.stack,
            "prompt_tokens": cell.prompt,
            "output_tokens": cell.output,
            "at_once": cell.at_once,
            "what": METRICS[one.point.metric],
            "measured_s": one.point.measured,
            "predicted_s": one.predicted,
            "error": one.error,
            "mark": one.point.mark,
        }
        for one in every
    ]

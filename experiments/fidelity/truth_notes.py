"""What may be believed, and what the tables cannot tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.fidelity.constants import NEAR, Refits
from experiments.fidelity.constants_fit import HELD, MOST_SHARE
from experiments.fidelity.truth_logs import ServerLog
from experiments.fidelity.truth_rows import ALONE, FITTED
from experiments.fidelity.truth_scores import ONE, SEVERAL, Scored, by, class_of, score
from pagedsim.fidelity.step_tables.layouts import SHAPELESS, Table
from pagedsim.report.numbers import percent

TAUGHT = {
    "vllm-0.19-rtx4090-llama-3.1-8b.csv": "what GeForce cards reach is known from this log alone, "
    "so that it tests nothing here",
    **dict.fromkeys(
        (f"{name}.csv" for name in ALONE),
        "the constants are fitted to the tokens of its requests that were alone at the server, "
        "fewer than a tenth of all, and to none under load",
    ),
}
"""Logs of which something in `hardware.py` is taken."""


def notes(
    tables: Sequence[Table],
    told: Sequence[Scored],
    refits: Refits | None,
    logs: Sequence[ServerLog],
) -> Iterator[str]:
    """What a reader must know."""
    yield (
        "a batch's time and TPOT count as tokens; TTFT is a server's, with the queue in it and "
        "server_ms of the stack on its way"
    )
    yield from _believed(told)
    for table in tables:
        for model, count in table.left_out.items():
            yield f"{table.name}: {count} rows of {model} are left out: {SHAPELESS[model]}"
    if any(one.point.mark for one in told):
        yield (
            "rows that preempt in the simulation, or whose requests have no room in memory, are "
            "told apart, and no constant is fitted to them: their times are the queue's"
        )
    if any(one.point.cell.way == "loop" for one in told):
        yield (
            "of a closed loop the tables say how many requests there are at a time, and not how "
            "they begin, nor what clients and HTTP add: here all begin at once, lengths are drawn "
            "from 0.8 of the nominal to all of it, each user asks ten times, a step computes up "
            "to 8,192 tokens, and all requests count"
        )
    for log in logs:
        if log.log.path.name in TAUGHT:
            yield f"{log.name}: {TAUGHT[log.log.path.name]}"
    if refits is not None:
        yield from _constants(refits)


def _believed(told: Sequence[Scored]) -> Iterator[str]:
    """What half and nine tenths of the rows are within, by stack; and of strangers."""
    usable = [one for one in told if not one.point.mark]
    known = [one for one in usable if one.point.cell.hardware.family is not None]
    for stack, group in by(known, lambda one: one.point.cell.stack).items():
        scores = {
            name: score(part) for name, part in by(group, lambda one: class_of(one.point)).items()
        }
        parts = [
            f"{name} {percent(of.median, 0)} and {percent(of.p90, 0)}"
            for name, of in scores.items()
        ]
        gpus = ", ".join(sorted({one.point.cell.hardware.name for one in group}))
        yield (
            f"{stack} on {gpus}: half and nine tenths of the rows are within " + ", ".join(parts)
        )
    strangers = [one for one in usable if one.point.cell.hardware.family is None]
    tokens = [one for one in strangers if class_of(one.point) in (ONE, SEVERAL)]
    for name, group in by(tokens, lambda one: one.point.cell.hardware.name).items():
        yield (
            f"{name}: no table in the repository has taught what its family reaches, nor its "
            f"software; half of its tokens are {percent(score(group).median, 0)} off and more: "
            "calibrate there"
        )


def _constants(refits: Refits) -> Iterator[str]:
    open_ones = [name for name in refits.whole.values if not refits.decided(name)]
    if open_ones:
        yield (
            "the tables do not decide these constants, since others make up for one that is held a "
            f"fifth away, or at the bound of shares, {MOST_SHARE:g}: {', '.join(open_ones)}"
        )
    yield _standing(refits)
    for name, why in HELD.items():
        yield f"{name} is not fitted, but as it stands: {why}"
    yield (
        "attention and server_ms stay as they are in every fold, so that TTFT and prompt steps are "
        "not wholly held out; and without h100, h200 and gh200 are still fitted, which have the "
        "same die"
    )
    yield (
        f"constants are fitted to {', '.join(FITTED)}; without a GPU, to all other NVIDIA GPUs, "
        "since a table that goes with it is all that tells of its stack"
    )


def _standing(refits: Refits) -> str:
    """Where the constants that stand differ from a fit, and how little errors do."""
    values = refits.whole.values
    far = [name for name in values if abs(refits.off(name)) > NEAR]
    near = max(abs(refits.off(name)) for name in values if name not in far)
    named = ", ".join(
        f"{name} ({refits.standing[name]:.3g} stands, {values[name]:.3g} is fitted)" for name in far
    )
    return (
        "the constants that stand are from an earlier fit of the same tables with other weights, "
        f"and within {percent(near)} of this fit" + (f" but for {named}" if far else "") + "; mean "
        f"errors are {percent(refits.stands, 2)} as they stand and "
        f"{percent(refits.whole.distance, 2)} fitted, so that what differs makes up for itself; "
        "held-out rows are told by both"
    )

"""The constants of the power model, fitted to what Splitwise's authors measured, and their errors.

    python -m tests.experiments.fidelity.power

A case is one batch of equal requests: a step of their prompts, then a step for each further token.
Only the mean power over the whole batch was recorded. Each model, and each number of GPUs, is also
predicted by a fit to all others. Power was recorded on the A100 only, so the error on other GPUs
is unknown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pagedsim.fidelity.rows import read_rows
from pagedsim.fidelity.sheets import settings
from pagedsim.fidelity.step_tables.tables import Cell, read_table
from pagedsim.sim.cost.base import step
from pagedsim.sim.cost.fitting import nnls
from pagedsim.sim.cost.work import Work, step_work
from pagedsim.sim.power import EnergyRoofline
from pagedsim.spec.objects import make

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "experiments" / "data" / "step-tables" / "splitwise.csv"
LONGEST = 2048
"""The longest prompt that is fitted, in tokens. Beyond it the recorded power falls as prompts grow,
for Llama to that of an idle GPU although the GPUs compute, while the power of batches with as many
tokens rises. The source gives no reason."""


class Case(NamedTuple):
    """A row of the table, with the work of its GPUs."""

    model: str
    gpus: int
    prompt: int
    batch: int
    mfu: float
    """Over the whole batch."""
    mbu: float
    share: float
    """Power of a GPU as a fraction of its TDP."""


def cases(path: Path = TABLE) -> list[Case]:
    """The rows whose power was recorded."""
    rows = zip(read_rows(path, "table"), read_table(path).cells, strict=True)
    return [_case(cell, power) for row, cell in rows if (power := row.number("power_of_tdp"))]


def _case(cell: Cell, power: float) -> Case:
    prompt, batch, output, replica = cell.prompt, cell.at_once, cell.output, cell.replica
    prefill = step_work(replica, step(prompt))
    # Weights are read once for the batch; a chunk's own keys and values are not read.
    # The mean context is half an answer longer than the prompt.
    decode = step_work(replica, step(decodes=batch, context=batch * (prompt + output // 2)))
    work = Work(
        flop=batch * prefill.flop + (output - 1) * decode.flop,
        bytes=prefill.bytes + (output - 1) * decode.bytes,
    )
    seconds = cell.measured["prompt"] + (output - 1) * cell.measured["token"]
    used = work.mfu(seconds, cell.hardware), work.mbu(seconds, cell.hardware)
    return Case(cell.model.name, cell.tensor_parallel, prompt, batch, *used, power)


def shipped() -> EnergyRoofline:
    """What `backend=sim` has."""
    return make("power", settings("backend", "sim")["power"], EnergyRoofline)


def fit(some: Sequence[Case], idle: float) -> EnergyRoofline:
    """Least squares; the power of an idle GPU is not measured here and is given."""
    loads = np.array([[1.0, case.mfu, case.mbu] for case in some])
    busy, compute, bandwidth = nnls(loads, np.array([case.share for case in some])).tolist()
    return EnergyRoofline(idle, busy, compute, bandwidth)


def errors(power: EnergyRoofline, some: Sequence[Case]) -> list[float]:
    """Relative error of each case's power."""
    return [power.share(case.mfu, case.mbu) / case.share - 1 for case in some]


def folds(some: Sequence[Case]) -> Iterator[tuple[str, list[Case], list[Case]]]:
    """Folds: the name of the held-out part, the fitted cases, and the held-out cases."""
    for title, field in (("without {}", "model"), ("without {} GPUs", "gpus")):
        of = attrgetter(field)
        for value in sorted({of(case) for case in some}, key=str):
            rest = [case for case in some if of(case) != value]
            yield title.format(value), rest, [case for case in some if of(case) == value]


def main(words: Sequence[str] | None = None) -> None:
    """Print the fits with their errors."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(words)
    every, idle = cases(), shipped().idle
    fitted = [case for case in every if case.prompt <= LONGEST]
    longer = [case for case in every if case.prompt > LONGEST]
    print(f"{'':20}   busy compute bandwidth   cases  mean error  worst  one share for all")
    for title, rest, left in [("all", fitted, fitted), *folds(fitted)]:
        power = fit(rest, idle)
        same = sum(case.share for case in rest) / len(rest)
        _line(title, power, left, same)
    _line("as shipped", shipped(), fitted)
    _line(f"prompts > {LONGEST:,}", shipped(), longer)


def _line(title: str, power: EnergyRoofline, left: list[Case], same: float | None = None) -> None:
    relative = errors(power, left)
    constants = f"{power.busy:6.3f} {power.compute:7.3f} {power.bandwidth:9.3f}"
    mean = sum(map(abs, relative)) / len(relative)
    line = f"{title:20} {constants} {len(left):7} {mean:11.1%} {max(relative, key=abs):+6.1%}"
    if same is not None:
        constant = [abs(same / case.share - 1) for case in left]
        line += f" {sum(constant) / len(constant):18.1%}"
    print(line)


if __name__ == "__main__":
    main()

"""Parity: validate one server under many settings, with a joint report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any
from urllib.parse import quote

from experiments.fidelity.validate import Validate, Validated, check_workload
from pagedsim.core import ConfigError
from pagedsim.metrics.agreement import JUDGED
from pagedsim.metrics.catalogue import label_of
from pagedsim.metrics.result import Listing
from pagedsim.report.numbers import signed
from pagedsim.run.backend import RunConfig
from pagedsim.run.job import Arm, Failure, error_of, failure_of
from pagedsim.run.objects import locate
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis
from pagedsim.user_error import line

Changes = tuple[str, ...]
"""The overrides of one validation, as on the command line."""


@dataclass(frozen=True, kw_only=True)
class Parity(Validate):
    """A validation under every combination of what `over` lists, such as `policy=fcfs,priority`.

    Where one fails, the others stand.
    """

    whole = False

    over: Sequence[str]
    _failed: dict[Changes, Failure] = field(default_factory=dict, init=False, repr=False)
    _configured: dict[Changes, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.over, (list, tuple)) or not self.over:
            raise ConfigError(f'over={self.over}: must be a list such as ["policy=fcfs,priority"]')
        for word in self.over:
            key, _, values = str(word).partition("=")
            if not key or not all(values.split(",")):
                raise ConfigError(f"over: {word}: must be of the form key=value,value")

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        self._check(runs)
        for number, changes in enumerate(self._combinations(), 1):
            if changes in self._failed:
                continue
            prefix = _prefix(changes)
            some = self._one(changes, runs)
            if not some.runs.jobs:
                runs.say(f"\n{number} of {len(self._combinations())}: {_said(changes)}")
            try:
                arms = some.ask()
            except Exception as error:
                self._fail(changes, error, runs)
                continue
            if arms:
                return [replace(arm, name=prefix + arm.name) for arm in arms]
        return []

    def analyse(self, runs: Runs) -> Analysis | None:
        """A row for each load of each validation that is complete."""
        readings: dict[Changes, Analysis] = {}
        for changes in self._combinations():
            one = self._one(changes, runs)
            if changes in self._failed or not one.complete:
                continue
            try:
                readings[changes] = one.read()
            except Exception as error:
                self._fail(changes, error, runs)
        wrong = {_said(changes): failure for changes, failure in self._failed.items()}
        if not readings and wrong:
            raise error_of(wrong)
        if not readings:
            return None
        rows = [row for changes, one in readings.items() for row in _rows(changes, one.data)]
        steps = sum(int(str(one.data["replayed_steps"])) for one in readings.values())
        beyond = sum(row[f"{key}_verdict"] == "beyond" for row in rows for key in JUDGED)
        return Analysis(
            finding=[
                f"All {steps:,} steps of {len(readings)} validations were planned alike.",
                f"{beyond} of {len(rows) * len(JUDGED)} errors are beyond the tolerance and twice "
                "the engine's own spread.",
            ],
            listings=[_listing(rows)],
            notes=[f"{_said(c)}: {note}" for c, one in readings.items() for note in one.notes],
            data={
                "steps": steps,
                "validations": {_said(changes): one.data for changes, one in readings.items()},
            },
            table=rows,
            failed={whose: str(failure) for whose, failure in wrong.items()},
            wrong=wrong,
        )

    def _fail(self, changes: Changes, error: Exception, runs: Runs) -> None:
        """Note it: the others may still tell something."""
        failure = failure_of(error, self._configured[changes], None)
        self._failed[changes] = failure
        runs.say(f"failed: {failure}")

    def progress(self, runs: Runs) -> str:
        combinations = self._combinations()
        begun = sum(bool(runs.only(_prefix(changes)).jobs) for changes in combinations)
        return f"in validation {max(begun, 1)} of {len(combinations)}"

    def _combinations(self) -> list[Changes]:
        pairs = (word.partition("=") for word in self.over)
        axes = [[f"{key}={value}" for value in values.split(",")] for key, _, values in pairs]
        return list(product(*axes))

    def _check(self, runs: Runs) -> None:
        """Raise ConfigError for an invalid combination before the first run."""
        for changes in self._combinations() if not self._configured else ():
            try:
                config = runs.command.configured(_said(changes), changes)
                if not getattr(locate(config["backend"]["_target_"]), "alone", False):
                    raise ConfigError("must be engine, which is validated")
                check_workload(config["workload"])
                RunConfig(config, config["seed"]).prepare()
            except Exception as error:
                words = [*runs.command.words, *changes]
                text = line(error, words).removeprefix(f"{_said(changes)}: ")
                raise ConfigError(f"{_said(changes)}: {text}") from error
            self._configured[changes] = config

    def _one(self, changes: Changes, runs: Runs) -> Validated:
        some = runs.only(_prefix(changes))
        place = runs.command.folder / quote(",".join(changes), safe=" =,+@")
        return Validated(self, some, changes, self._configured[changes], place)


def _said(changes: Changes) -> str:
    return " ".join(changes)


def _prefix(changes: Changes) -> str:
    return f"{_said(changes)}: "


def _rows(changes: Changes, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Results under each load: relative errors and number of preemptions."""
    rows = []
    for name, regime in found["regimes"].items():
        row: dict[str, Any] = dict(change.split("=", 1) for change in changes)
        row |= {"load": name}
        for key in JUDGED:
            metric = regime["metrics"][key]
            row |= {f"{key}_error": metric["error"], f"{key}_spread": metric["spread"]}
            row |= {f"{key}_at_pace": metric["at_pace"]}
            row |= {f"{key}_verdict": regime["verdicts"][key]}
        metric = regime["metrics"]["preemptions"]
        row |= {"preemptions_engine": metric["engine"]}
        rows.append(row | {"preemptions_simulator": metric["simulator"]})
    return rows


def _listing(rows: Sequence[Mapping[str, Any]]) -> Listing:
    """The errors of what is judged; a star where one is beyond tolerance and spread."""
    settings = list(rows[0])[: list(rows[0]).index("load") + 1]
    head = [key.rpartition(".")[2] for key in settings]
    head += [*map(label_of, JUDGED), "preemptions: engine, simulator"]
    cells = []
    for row in rows:
        errors = [
            signed(row[f"{key}_error"]) + "*" * (row[f"{key}_verdict"] == "beyond")
            for key in JUDGED
        ]
        preempted = f"{row['preemptions_engine']:,.0f}, {row['preemptions_simulator']:,.0f}"
        cells.append([*(str(row[key]) for key in settings), *errors, preempted])
    note = "* beyond the tolerance and twice the spread"
    return Listing("Errors of the simulator", head, cells, note)

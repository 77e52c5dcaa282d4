"""Parity: validate one server under many settings, one after another, and tell of all at once."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hydra import compose
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from experiments.fidelity.validate import Validate
from pagedsim.core import ConfigError
from pagedsim.metrics.agreement import JUDGED
from pagedsim.metrics.catalogue import label_of
from pagedsim.metrics.files import read_json, write_json
from pagedsim.report.percent import signed
from pagedsim.run.command import typed
from pagedsim.run.folder import keep_configuration
from pagedsim.run.objects import locate
from pagedsim.run.parts import backend_of
from pagedsim.user_error import Interruption, UserError, line, shown

Changes = tuple[str, ...]
"""The overrides of one validation, as one would type them."""


@dataclass(frozen=True, kw_only=True)
class Parity(Validate):
    """A validation under every combination of what `over` lists, such as `policy=fcfs,priority`."""

    over: Sequence[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.over, (list, tuple)) or not self.over:
            raise ConfigError(f'over={self.over}: must be a list such as ["policy=fcfs,priority"]')
        for word in self.over:
            key, _, values = str(word).partition("=")
            if not key or not all(values.split(",")):
                raise ConfigError(f"over: {word}: must be of the form key=value,value")

    def perform(self, folder: Path) -> None:
        one = Validate(**{field.name: getattr(self, field.name) for field in fields(Validate)})
        configs = {changes: self._configured(changes, one) for changes in self._combinations()}
        failed: dict[Changes, str] = {}
        for number, (changes, config) in enumerate(configs.items(), 1):
            print(f"\n{number} of {len(configs)}: {_said(changes)}")
            try:
                keep_configuration(config, _place(folder, changes))
                one.perform(_place(folder, changes))
            except KeyboardInterrupt:
                raise Interruption(
                    f"in validation {number} of {len(configs)}; the same command with "
                    f"hydra.run.dir={shown(folder)} goes on from there"
                ) from None
            except Exception as error:  # the others may still tell something
                failed[changes] = line(error)
                print(f"failed: {failed[changes]}")
        self._tell(folder, [changes for changes in configs if changes not in failed])
        if failed:
            raise UserError([f"{_said(changes)}: {why}" for changes, why in failed.items()])

    def _combinations(self) -> list[Changes]:
        pairs = (word.partition("=") for word in self.over)
        axes = [[f"{key}={value}" for value in values.split(",")] for key, _, values in pairs]
        return list(product(*axes))

    def _configured(self, changes: Changes, one: Validate) -> DictConfig:
        """The configuration under these changes; raises ConfigError for what cannot be served."""
        words = [*typed(), *changes]
        try:
            config = compose("config", overrides=words)
            plain: Any = OmegaConf.to_container(config, resolve=True)
            if not getattr(locate(plain["backend"]["_target_"]), "alone", False):
                raise ConfigError("backend=sim: experiment=parity needs backend=engine")
            one.check(plain)
            backend_of(plain).stage(plain, self.seed)
        except Exception as error:
            raise ConfigError(f"{_said(changes)}: {line(error, words)}") from error
        return config

    def _tell(self, folder: Path, done: Sequence[Changes]) -> None:
        """A row for each load of each validation: on the terminal, and as files."""
        found = {changes: read_json(_place(folder, changes) / "validate.json") for changes in done}
        if not found:
            return
        rows = [row for changes, one in found.items() for row in _rows(changes, one)]
        steps = sum(one["replayed_steps"] for one in found.values())
        Console(highlight=False).print(_table(rows))
        for changes, one in found.items():
            for note in one["notes"]:
                print(f"note: {_said(changes)}: {note}")
        print(f"all {steps:,} steps of {len(found)} validations were planned alike")
        with (folder / "parity.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        whole = {_said(changes): one for changes, one in found.items()}
        write_json(folder / "parity.json", {"steps": steps, "validations": whole})
        print(f"results   {shown(folder / 'parity.json')}")
        print(f"table     {shown(folder / 'parity.csv')}")


def _said(changes: Changes) -> str:
    return " ".join(changes)


def _place(folder: Path, changes: Changes) -> Path:
    return folder / quote(",".join(changes), safe=" =,+@")


def _rows(changes: Changes, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What came out under each load: errors as shares, and how often somebody was preempted."""
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


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The errors of what is judged; a star where one is beyond tolerance and spread."""
    settings = list(rows[0])[: list(rows[0]).index("load") + 1]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for key in settings:
        table.add_column(key.rpartition(".")[2])
    for key in JUDGED:
        table.add_column(label_of(key), justify="right")
    table.add_column("preemptions: engine, simulator", justify="right")
    for row in rows:
        errors = [
            signed(row[f"{key}_error"]) + "*" * (row[f"{key}_verdict"] == "beyond")
            for key in JUDGED
        ]
        preempted = f"{row['preemptions_engine']:,.0f}, {row['preemptions_simulator']:,.0f}"
        table.add_row(*(row[key] for key in settings), *errors, preempted)
    table.caption, table.caption_justify = "* beyond the tolerance and twice the spread", "left"
    return table

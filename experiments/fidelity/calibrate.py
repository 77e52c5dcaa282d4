"""Calibrate: step times in milliseconds, fitted to what an engine took on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.fidelity.external import Outside
from pagedsim.core import ConfigError
from pagedsim.fidelity.engine_model import data_sheet
from pagedsim.fidelity.recorded import recorded_runs
from pagedsim.fidelity.residual import Residual, Weakest, residuals, weakest
from pagedsim.fidelity.step_grid import profiled
from pagedsim.fidelity.steplog import StepLog, log_of, predicted
from pagedsim.metrics.files import write_json
from pagedsim.report.percent import percent, signed
from pagedsim.run.backend import Settings
from pagedsim.run.errand import Errand
from pagedsim.run.folder import kept_configuration
from pagedsim.run.parts import backend_of
from pagedsim.sim.cost import Fit, Fitted, Roofline
from pagedsim.sim.cost.fitting import FEATURES, SWAP, fit_kinds
from pagedsim.user_error import shown

UNITS = {
    "constant": ("ms", 1e3, "a step"),
    "prefill_tokens": ("µs", 1e6, "a token of a prompt"),
    "prefill_attention": ("ns", 1e9, "a token of a prompt and one it attends to"),
    "prefill_context": ("µs", 1e6, "a token that prompts attend to"),
    "decode_count": ("µs", 1e6, "a sequence that decodes"),
    "decode_context": ("ns", 1e9, "a token that decodes attend to"),
}
SWAP_UNITS = {"constant": ("µs", 1e6, "a swap"), "blocks": ("µs", 1e6, "a block swapped, one way")}


@dataclass(frozen=True)
class Calibrate(Errand):
    """Fit `cost=fitted` to recorded steps, to a profile, or to the log of a server elsewhere."""

    run: str | None = None
    requests: str | None = None
    split: float = 0.5
    seed: int = 0

    def perform(self, folder: Path) -> None:
        if self.requests is not None:
            if self.run is not None:
                raise ConfigError("run, requests: only one of them can be fitted to")
            Outside(self.requests, self.split).perform(folder)
            return
        log = self._log(folder)
        cost = fitted(log)
        path = folder / "cost.json"
        cost.save(path)
        report = {"source": log.source, "machine": log.machine} | told(log, cost)
        write_json(folder / "calibrate.json", report)
        print(f"results   {shown(folder / 'calibrate.json')}")
        print(f"use it    cost=fitted cost.path={shown(path)}")

    def _log(self, folder: Path) -> StepLog:
        if self.run is not None:
            runs = recorded_runs(self.run)
            some = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
            return log_of(runs, f"{some} under {shown(Path(self.run).absolute())}")
        config = kept_configuration(folder)
        if not backend_of(config).alone:
            raise ConfigError(
                "run: must be given: run=<folder of an earlier study on the engine>, "
                "requests=<log of a server elsewhere>, or backend=engine to profile it"
            )
        return profiled(config, self.seed)


def fitted(log: StepLog) -> Fitted:
    """The fit; raises ConfigError for a log that is too short."""
    machine = log.machine
    source = f"{log.source}: {machine['device']}, {machine['model']}, {machine['dtype']}"
    try:
        ahead = bool(machine.get("async_scheduling"))
        return Fitted.fit(log.samples, log.replica, echo=None, source=source, ahead=ahead)
    except ConfigError as error:
        raise ConfigError(f"{log.source}: too short to fit: {error}") from error


def told(log: StepLog, cost: Fitted) -> Settings:
    """Print coefficients and errors; returns them."""
    mine = [predicted(cost, sample) for sample in log.samples]
    roofline = Roofline(log.replica)
    theirs = [predicted(roofline, sample) for sample in log.samples]
    rest, sheet = residuals(log.samples, mine), residuals(log.samples, theirs)
    weak, fits = weakest(log.samples, mine), fit_kinds(log.samples)
    machine = log.machine
    print(
        f"{len(log.samples)} steps of {log.source}: {machine['device']}, {machine['model']}, "
        f"{machine['dtype']}, blocks of {machine['block_size']} tokens"
    )
    if data_sheet(machine) is None:
        print(
            f"hardware  there is no data sheet of {machine['device']}: "
            f"hardware={log.replica.hardware.name}, as configured, stands for it"
        )
    _show_coefficients(cost, fits)
    _show_errors(fits, rest, sheet, log.replica.hardware.name)
    if weak is not None:
        print(f"weakest   {_where(weak)}")
    return {
        "coefficients": {kind: _set(cost, kind) for kind in ("prefill", "decode", "mixed", "swap")},
        "unit": "s",
        "leave_one_out": {kind: fit.error for kind, fit in fits.items()},
        "residuals": {kind: one._asdict() for kind, one in rest.items()},
        "roofline": {kind: one.total for kind, one in sheet.items()},
        "weakest": weak and weak._asdict(),
    }


def _set(cost: Fitted, kind: str) -> dict[str, float]:
    return dict(cost.settings[kind] or {})


def _show_coefficients(cost: Fitted, fits: Mapping[str, Fit]) -> None:
    kinds = [kind for kind in ("prefill", "decode", "mixed") if kind in fits]
    table = _table("each", *kinds)
    for name in FEATURES:
        unit, scale, meaning = UNITS[name]
        values = [_set(cost, kind).get(name) for kind in kinds]
        table.add_row(meaning, *("" if v is None else f"{v * scale:,.4g} {unit}" for v in values))
    _print(table)
    for kind in (one for one in ("prefill", "decode") if one not in fits):
        print(f"{kind:<9} too few steps to fit: they take what the same work takes in mixed ones")
    for name in SWAP if cost.settings["swap"] else ():
        unit, scale, meaning = SWAP_UNITS[name]
        print(f"{meaning}: {cost.settings['swap'][name] * scale:,.4g} {unit}")
    if not cost.settings["swap"]:
        print("swaps     too few to fit: they take what the hardware's data sheet says")


def _show_errors(
    fits: dict[str, Fit], rest: dict[str, Residual], sheet: dict[str, Residual], hardware: str
) -> None:
    head = ("steps", "leave one out", "half are within", "90 % within", "in all", "stalled")
    table = _table("", *head, f"roofline of {hardware}")
    for kind, one in rest.items():
        left_out = fits[kind].percent if kind in fits else "–"
        table.add_row(
            kind,
            f"{one.steps:,}",
            left_out,
            percent(one.median),
            percent(one.p90),
            signed(one.total),
            percent(one.stalled),
            signed(sheet[kind].total),
        )
    _print(table)


def _where(weak: Weakest) -> str:
    way = "too long" if weak.total > 0 else "too short"
    return (
        f"{weak.kind} steps with {weak.feature} of {weak.low:,.0f} to {weak.high:,.0f}: "
        f"{percent(abs(weak.total))} {way} ({weak.steps} steps)"
    )


def _table(*head: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left")
    return table


def _print(table: Table) -> None:
    Console(highlight=False).print(table)

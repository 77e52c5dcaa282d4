"""Fairness among clients, validated against logs of a real server under two policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pagedsim.build import inner_policy
from pagedsim.core import ConfigError
from pagedsim.experiments.fidelity.fairness_pair import FEWEST, Pair, Paired, Rules, Side
from pagedsim.experiments.fidelity.truth_data import in_processes
from pagedsim.experiments.papers.panels import Panel, Points, draw_panels
from pagedsim.fidelity.logs.log import Log, read_log
from pagedsim.fidelity.logs.score import ClientService
from pagedsim.metrics.result import PUBLISHED, Listing, Row
from pagedsim.metrics.service import service_of
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import percent, signed
from pagedsim.report.style import short
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study
from pagedsim.spec.check import Positive, check_settings
from pagedsim.spec.run import Settings

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True, kw_only=True)
class Fairness(Rules, Study):
    """Step times are fitted to a log under FCFS; then another policy is predicted and compared with
    its own log. `fcfs` and `other` replace the listed pairs by the user's own.
    """

    backends = ("sim",)
    why = "the logs are of a server elsewhere"
    asks = False
    idle: ClassVar[Mapping[str, str]] = {
        "workload": "the requests are those of the logs",
        "seeds": "the logs are served once",
    }

    title: str
    question: str
    source: str
    fcfs: str | None
    other: str | None
    policy: str
    more: Sequence[str]
    pairs: Mapping[str, Mapping[str, Any]]
    machines: Mapping[str, Sequence[str]]
    within: Positive

    def __post_init__(self) -> None:
        check_settings(self)
        for setting, names in {"policy": [self.policy], "more": self.more}.items():
            for name in names:
                try:
                    inner_policy(name)
                except ConfigError as error:
                    said = str(error).replace("unknown of", f"unknown {setting}", 1)
                    raise ConfigError(said) from error
        if "fcfs" in (self.policy, *self.more) or self.policy in self.more:
            raise ConfigError(
                f"policy={self.policy}, more={self.more}: must be different policies, none of them "
                "fcfs, under which the first log is"
            )
        if (self.fcfs is None) != (self.other is None):
            raise ConfigError("fcfs, other: two logs make a pair: give both or neither")
        if not self.pairs and self.fcfs is None:
            raise ConfigError("pairs: none is listed: give fcfs= and other=, the logs of one")

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        self._pairs(runs)  # refused at once, if any is wrong
        return ()

    def analyse(self, runs: Runs) -> Analysis:
        pairs = list(self._pairs(runs))
        longest = sorted(pairs, key=lambda pair: len(pair.first), reverse=True)
        studied = in_processes(Pair.studied, longest, runs.config["jobs"])
        by_name = {pair.name: pair for pair in studied}
        done = [by_name[pair.name] for pair in pairs]
        rows = [row for pair in done for row in rows_of(pair, self.within)]
        gaps = {pair.name: gaps_of(pair) for pair in done}
        return Analysis(
            finding=finding(done, rows, self.within),
            rows=rows,
            beside=PUBLISHED if self.fcfs is None else ("measured", "simulated"),
            listings=[clients(done), elsewise(done), others(done)],
            notes=list(notes(done, self.cold)),
            data={"pairs": {pair.name: data(pair) for pair in done}, "gaps": gaps},
            drawings={
                "gaps": FigureSpec(
                    "How far apart clients are",
                    "The largest difference in service between two clients since the beginning, "
                    "1 for a token of a prompt and 2 for one of an answer. Circles are measured, "
                    "lines simulated with step times that are fitted to the log under FCFS.",
                    partial(draw_panels, gap_panels(gaps), 2),
                )
            },
            table=table(done),
        )

    # -- the logs ----------------------------------------------------------------------------------

    def _pairs(self, runs: Runs) -> list[Pair]:
        if self.fcfs is not None and self.other is not None:
            return [self._pair("your logs", "study", runs.config, self.fcfs, self.other)]
        return [self._listed(name, of, runs) for name, of in self.pairs.items()]

    def _listed(self, name: str, of: Mapping[str, Any], runs: Runs) -> Pair:
        where = f"study.pairs.{name}"
        if set(of) != {"machine", "fcfs", "other"}:
            raise ConfigError(f"{where}: has {', '.join(of)}: must have machine, fcfs, other")
        if of["machine"] not in self.machines:
            known = ", ".join(self.machines)
            raise ConfigError(f"{where}.machine={of['machine']}: must be one of {known}")
        config = runs.spec.configured(where, self.machines[of["machine"]])
        return self._pair(name, where, config, str(of["fcfs"]), str(of["other"]))

    def _pair(self, name: str, where: str, config: Settings, fcfs: str, other: str) -> Pair:
        if "of" not in config["policy"]:
            raise ConfigError(
                "policy: must be one that wraps another, such as past_future: it decides "
                "admission, and the logs' policies the order"
            )
        if config["memory"].get("blocks") is None:
            raise ConfigError("memory.blocks: must be given: the server's pool, in blocks")
        rules = Rules(**{field.name: getattr(self, field.name) for field in fields(Rules)})
        first, second = _log(f"{where}.fcfs", fcfs), _log(f"{where}.other", other)
        return Pair(name, config, first, second, self.policy, self.more, rules)


def _log(where: str, path: str) -> Log:
    """Read a log from a path or from the included ones."""
    file = Path(path).expanduser()
    if not file.exists() and (DATA / path).exists():
        file = DATA / path
    try:
        log = read_log(file)
    except ConfigError as error:
        raise ConfigError(str(error).replace("requests=", f"{where}=")) from error
    for place, client in zip(log.places, log.client, strict=True):
        if not client and any(log.client):
            raise ConfigError(f"{place}: client is empty: must be a name, as in other rows")
    if len(set(log.client)) < 2:
        raise ConfigError(
            f"{where}={path}: names fewer than two clients: needs a column client, and two at least"
        )
    if len(log) < FEWEST or not log.arrived[-1]:
        raise ConfigError(
            f"{where}={path}: {len(log)} requests within {log.arrived[-1]:g} s: must be at least "
            f"{FEWEST}, that come one after another"
        )
    if log.output.max() < 2:
        raise ConfigError(
            f"{where}={path}: has no answer of two tokens or more: nothing tells how long a decode "
            "takes"
        )
    return log


# -- numbers ---------------------------------------------------------------------------------------

_NEAREST = 2
"""Maximum number of alternative assumptions named for a deviating number."""
MEANINGS = {
    "light": ("light client's TTFT", "s"),
    "gap": ("largest difference", ""),
    "gap_waiting": ("while both wait", ""),
    "rate": ("answers", "tokens/s"),
    "rate_to_the_end": ("answers to the end", "tokens/s"),
}


def metrics_of(service: ClientService) -> dict[str, float | None]:
    """The numbers of a log or of its simulation, by the names of MEANINGS."""
    others = {name: getattr(service, name) for name in MEANINGS if name != "light"}
    return {"light": service.ttft(service.light), **others}


def rows_of(pair: Paired, within: float) -> Iterator[Row]:
    """Rows of measured and simulated values, of both logs."""
    for side in pair.sides:
        measured, simulated = metrics_of(side.measured), metrics_of(side.simulated)
        for name, (meaning, unit) in MEANINGS.items():
            actual, predicted = measured[name], simulated[name]
            if actual is None or predicted is None:
                continue
            row = Row(f"{pair.name}, {side.policy.upper()}: {meaning}", predicted, actual, unit)
            yield replace(row, why=_why(side, name, row)) if abs(row.difference) > within else row


def _why(side: Side, name: str, row: Row) -> str:
    reasons = []
    if name.startswith("gap"):
        mean_service = request_of(side.measured)
        assert isinstance(row.published, float)
        reasons.append(
            f"a request gets {mean_service:,.0f}: that of {row.published / mean_service:.1f} "
            f"against that of {row.ours / mean_service:.1f}"
        )
    near = []
    for what, other in side.elsewise.items():
        if (value := metrics_of(other)[name]) is not None:
            difference = Row(what, value, row.published).difference
            near.append((abs(difference), difference, what))
    nearer = [entry for entry in sorted(near) if entry[0] < abs(row.difference)][:_NEAREST]
    return "; ".join([*reasons, *(f"{signed(change)} with {what}" for _, change, what in nearer)])


def request_of(service: ClientService) -> float:
    """Mean service of a request."""
    log = service.log
    return float(service_of(log.prompt, log.output, log.arrived).mean())


def data(pair: Paired) -> dict[str, Any]:
    """All numbers of a pair, for result.json."""
    return {
        "server": dict(pair.facts),
        "weights": pair.fit.weights._asdict(),
        "distance": pair.fit.distance,
        "simulations": pair.fit.simulations,
        "pace": pair.pace,
        "logs": {
            side.policy: {
                name: metrics_of(s) | {"ttft": {name: s.ttft(name) for name in s.clients}}
                for name, s in side.every.items()
            }
            for side in pair.sides
        },
    }


def table(pairs: Sequence[Paired]) -> list[dict[str, Any]]:
    """One row per number, measured and simulated."""
    return [
        {
            "logs": pair.name,
            "policy": side.policy,
            "metric": name,
            "measured": measured,
            "simulated": metrics_of(side.simulated)[name],
        }
        for pair in pairs
        for side in pair.sides
        for name, measured in metrics_of(side.measured).items()
    ]


POINTS = 120
"""Times at which the gap is computed."""


def gaps_of(pair: Paired) -> dict[str, dict[str, Any]]:
    """For each log, times in seconds and the service gap at each."""
    curves = {}
    for side in pair.sides:
        times = np.linspace(0.0, float(side.measured.log.arrived[-1]), POINTS)
        both = {"measured": side.measured, "simulated": side.simulated}
        gaps = {name: service.gaps(times).tolist() for name, service in both.items()}
        curves[side.policy] = {"times": times.tolist(), **gaps}
    return curves


# -- report ----------------------------------------------------------------------------------------


def finding(pairs: Sequence[Paired], every: Sequence[Row], within: float) -> list[str]:
    """Sentences: the number of values within tolerance, then the effect in each pair."""
    near = sum(abs(row.difference) <= within for row in every)
    names = ", ".join(dict.fromkeys(pair.other.policy.upper() for pair in pairs))
    return [
        f"Step times are fitted to logs under FCFS alone, and {names} is then simulated: {near} of "
        f"{len(every)} numbers are within {percent(within, 0)} of what the logs say.",
        *(
            f"{pair.name}: even requests that were fitted are {percent(pair.fit.distance)} off "
            "on average, so that little follows: batching=, server.max_seqs= or memory.blocks= is "
            "another than that of the logs' server."
            for pair in pairs
            if pair.fit.distance > within
        ),
        *(_effect(pair) for pair in pairs),
    ]


def _effect(pair: Paired) -> str:
    old, new = (side.measured for side in pair.sides)
    ours, then = (side.simulated for side in pair.sides)
    light = [service.ttft(service.light) for service in (old, new, ours, then)]
    return (
        f"{pair.name}: from FCFS to {pair.other.policy.upper()} the light client's mean TTFT goes "
        f"from {light[0]:.1f} to {light[1]:.1f} s (simulated: {light[2]:.1f} to "
        f"{light[3]:.1f} s), the largest difference in service from {old.gap:,.0f} to "
        f"{new.gap:,.0f} ({ours.gap:,.0f} to {then.gap:,.0f})."
    )


def clients(pairs: Sequence[Paired]) -> Listing:
    """Mean TTFT of each client."""
    lines = []
    for pair in pairs:
        for side in pair.sides:
            for client in side.measured.clients:
                actual, predicted = (s.ttft(client) for s in (side.measured, side.simulated))
                light = " (light)" if client == side.measured.light else ""
                name = f"{pair.name}, {side.policy.upper()}, {client or 'no name'}{light}"
                error = signed(predicted / actual - 1, 1, "")
                lines.append([name, f"{actual:.2f}", f"{predicted:.2f}", error])
    head = ["client", "measured, s", "simulated, s", "off, %"]
    return Listing("Mean time to the first token", head, lines)


def _main(service: ClientService) -> tuple[float, float, float]:
    return service.ttft(service.light), service.gap, service.rate


def elsewise(pairs: Sequence[Paired]) -> Listing:
    """The effect of each assumption on the prediction of the other policy's log."""
    lines = []
    for pair in pairs:
        side = pair.other
        for what, service in {"as it is": side.simulated, **side.elsewise}.items():
            both = zip(_main(service), _main(side.measured), strict=True)
            cells = [signed(p / m - 1, 1, "") for p, m in both]
            lines.append([f"{pair.name}, {side.policy.upper()}: {what}", *cells])
    head = ["with", "light client's TTFT, %", "largest difference, %", "tokens/s, %"]
    note = "how far the simulation is from the log where one thing is assumed otherwise"
    return Listing("What each assumption is worth", head, lines, note)


def others(pairs: Sequence[Paired]) -> Listing:
    """Policies without a log."""
    lines = [
        [f"{pair.name}, {name.upper()}", f"{light:.2f}", f"{gap:,.0f}", f"{rate:.1f}"]
        for pair in pairs
        for name, s in {pair.other.policy: pair.other.simulated, **pair.other.policies}.items()
        for light, gap, rate in [_main(s)]
    ]
    head = ["simulated", "light client's TTFT, s", "largest difference", "tokens/s"]
    return Listing("Other policies on the same requests", head, lines)


_WAVE = 0.7
"""Share of the batch size; a gap of more requests is attributed to batch waves."""
_APART = 1.5
"""Ratio of simulated gaps above which there is a note."""
_COLD = 0.3
"""Additional seconds of the first answer that indicate a cold server."""
_TERMS = (
    "the light client asks for least, and its TTFT is a mean; differences are in service, 1 for a "
    "token of a prompt and 2 for one of an answer: since the beginning until the last arrival, and "
    "within times in which two clients have requests waiting; answers are tokens a second until "
    "the last arrival, and until the last token"
)


def notes(pairs: Sequence[Paired], cold: bool) -> Iterator[str]:
    """Notes of the report."""
    yield _TERMS
    for pair in pairs:
        fit, other = pair.fit, pair.other
        yield (
            f"{pair.name}: {pair.facts['model']} on {pair.facts['hardware']}; requests that were "
            f"fitted are {percent(fit.distance)} off on average, after {fit.simulations} "
            f"simulations; the log under {other.policy.upper()} took {percent(pair.pace)} of the "
            "simulated time between tokens: so much the server itself was not the same"
        )
        yield from _alike(pair)
        yield from _waves(pair)
        gaps = [service.gap for service in other.elsewise.values()]
        if gaps and max(gaps) > _APART * min(gaps):
            yield (
                f"{pair.name}: with one thing assumed otherwise the simulated difference under "
                f"{other.policy.upper()} is {min(gaps):,.0f} to {max(gaps):,.0f}: whose requests "
                "are admitted together settles early, and then comes again"
            )
    late = [
        f"{first:.2f} s in {pair.name}, {side.policy.upper()}"
        for pair in pairs
        for side in pair.sides
        if (first := float(side.measured.latencies.ttft[0])) > pair.fit.weights.mixed_step + _COLD
    ]
    if cold and late:
        yield (
            "a log's first answer says how cold its server was, and the first step takes as long: "
            f"{', '.join(late)}"
        )


def _alike(pair: Paired) -> Iterator[str]:
    """Notes if the logs have different clients, or are the same file."""
    first, other = (side.measured for side in pair.sides)
    if first.log.path.samefile(other.log.path):
        yield (
            f"{pair.name}: one file is both logs: what is measured under "
            f"{pair.other.policy.upper()} is that under FCFS"
        )
    differences = [
        f"{', '.join(sorted(alone))} only under {side.policy.upper()}"
        for side, two in zip(pair.sides, (other, first), strict=True)
        if (alone := {*side.measured.clients} - {*two.clients})
    ]
    if differences:
        yield (
            f"{pair.name}: clients are not the same in both logs, so that little can be held "
            f"against each other: {'; '.join(differences)}"
        )


def _waves(pair: Paired) -> Iterator[str]:
    """A note if the gap between clients corresponds to batch waves."""
    other = pair.other.measured
    requests = (other.gap_waiting or 0.0) / request_of(other)
    if requests > _WAVE * other.at_once:
        yield (
            f"{pair.name}: {pair.other.policy.upper()}'s {other.gap_waiting:,.0f} between clients "
            f"that both wait are what {requests:.0f} requests get, where {other.at_once:.0f} are "
            "answered at once: they are admitted together and end together, and most are of the "
            "client that was behind"
        )


LEAST = 100.0
"""Lower end of the axis: less than the service of a request."""
EVERY = 6
"""Of the measured values, each so-manieth is drawn."""


def gap_panels(pairs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Panel]:
    """One panel per pair of logs."""

    def line(of: Mapping[str, Any], kind: str, every: int) -> Points:
        return of["times"][::every], np.maximum(of[kind], LEAST)[::every].tolist()

    return [
        Panel(
            lines={policy.upper(): line(of, "simulated", 1) for policy, of in gaps.items()},
            published={policy.upper(): line(of, "measured", EVERY) for policy, of in gaps.items()},
            title=short(name),
            x="seconds",
            y="difference in service",
            log=True,
        )
        for name, gaps in pairs.items()
    ]

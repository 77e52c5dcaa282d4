"""What two logs of a server, and a simulation of both, say of fairness: in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from experiments.fidelity.fairness_pair import Paired, Side
from pagedsim.fidelity.external_service import ClientService
from pagedsim.metrics.result import Listing, Row
from pagedsim.metrics.service import service_of
from pagedsim.report.numbers import percent, signed

_NEAREST = 2
"""Of what could be assumed otherwise, so much is named where a number is far off."""


class Told(NamedTuple):
    """What is read from a log and from a simulation of it."""

    light: float
    gap: float
    gap_waiting: float | None
    rate: float
    rate_to_the_end: float

    @classmethod
    def of(cls, one: ClientService) -> Told:
        """Those of one of them."""
        light = one.ttft(one.light)
        return cls(light, one.gap, one.gap_waiting, one.rate, one.rate_to_the_end)


MEANINGS = {
    "light": ("light client's TTFT", "s"),
    "gap": ("largest difference", ""),
    "gap_waiting": ("while both wait", ""),
    "rate": ("answers", "tokens/s"),
    "rate_to_the_end": ("answers to the end", "tokens/s"),
}


def rows(pair: Paired, within: float) -> Iterator[Row]:
    """Measured beside simulated, of both logs."""
    for side in pair.sides:
        measured, simulated = Told.of(side.measured), Told.of(side.simulated)
        for name, (meaning, unit) in MEANINGS.items():
            here, there = getattr(measured, name), getattr(simulated, name)
            if here is None or there is None:
                continue
            row = Row(f"{pair.name}, {side.policy.upper()}: {meaning}", there, here, unit)
            if abs(row.difference) > within:
                row = Row(row.what, there, here, unit, _why(side, name, row))
            yield row


def _why(side: Side, name: str, row: Row) -> str:
    """Why a number is far off, in numbers."""
    reasons = []
    if name.startswith("gap"):
        each = request_of(side.measured)
        assert isinstance(row.published, float)
        reasons.append(
            f"a request gets {each:,.0f}: that of {row.published / each:.1f} against that of "
            f"{row.ours / each:.1f}"
        )
    near = []
    for what, other in side.elsewise.items():
        if (value := getattr(Told.of(other), name)) is not None:
            near.append((abs(off := Row(what, value, row.published).difference), off, what))
    nearer = [one for one in sorted(near) if one[0] < abs(row.difference)][:_NEAREST]
    return "; ".join([*reasons, *(f"{signed(off)} with {what}" for _, off, what in nearer)])


def request_of(one: ClientService) -> float:
    """What a request gets, on average."""
    log = one.log
    return float(service_of(log.prompt, log.output, log.arrived).mean())


def finding(pairs: Sequence[Paired], every: Sequence[Row], within: float) -> list[str]:
    """Sentences: first how many numbers are near, then what each pair shows."""
    near = sum(abs(row.difference) <= within for row in every)
    names = ", ".join(dict.fromkeys(pair.other.policy.upper() for pair in pairs))
    return [
        f"Step times are fitted to logs under FCFS alone, and {names} is then simulated: {near} of "
        f"{len(every)} numbers are within {percent(within, 0)} of what the logs say.",
        *(_doubt(pair) for pair in pairs if pair.found.distance > within),
        *(_effect(pair) for pair in pairs),
    ]


def _doubt(pair: Paired) -> str:
    """That the server is another than the one that was fitted."""
    return (
        f"{pair.name}: even requests that were fitted are {percent(pair.found.distance)} off on "
        "average, so that little follows: batching=, server.max_seqs= or memory.blocks= is another "
        "than that of the logs' server."
    )


def _effect(pair: Paired) -> str:
    """What the other policy changes, measured and simulated."""
    old, new = (Told.of(side.measured) for side in pair.sides)
    ours, then = (Told.of(side.simulated) for side in pair.sides)
    return (
        f"{pair.name}: from FCFS to {pair.other.policy.upper()} the light client's mean TTFT goes "
        f"from {old.light:.1f} to {new.light:.1f} s (simulated: {ours.light:.1f} to "
        f"{then.light:.1f} s), the largest difference in service from {old.gap:,.0f} to "
        f"{new.gap:,.0f} ({ours.gap:,.0f} to {then.gap:,.0f})."
    )


def clients(pairs: Sequence[Paired]) -> Listing:
    """Each client's mean time to the first token."""
    lines = []
    for pair in pairs:
        for side in pair.sides:
            for client in side.measured.clients:
                here, there = (one.ttft(client) for one in (side.measured, side.simulated))
                light = " (light)" if client == side.measured.light else ""
                name = f"{pair.name}, {side.policy.upper()}, {client or 'no name'}{light}"
                lines.append([name, f"{here:.2f}", f"{there:.2f}", signed(there / here - 1, 1, "")])
    head = ["client", "measured, s", "simulated, s", "off, %"]
    return Listing("Mean time to the first token", head, lines)


def elsewise(pairs: Sequence[Paired]) -> Listing:
    """What each assumption is worth, on the other policy's log."""
    lines = []
    for pair in pairs:
        side = pair.other
        measured = Told.of(side.measured)
        for what, one in {"as it is": side.simulated, **side.elsewise}.items():
            told = Told.of(one)
            cells = [
                signed(getattr(told, name) / getattr(measured, name) - 1, 1, "")
                for name in ("light", "gap", "rate")
            ]
            lines.append([f"{pair.name}, {side.policy.upper()}: {what}", *cells])
    head = ["with", "light client's TTFT, %", "largest difference, %", "tokens/s, %"]
    note = "how far the simulation is from the log where one thing is assumed otherwise"
    return Listing("What each assumption is worth", head, lines, note)


def others(pairs: Sequence[Paired]) -> Listing:
    """Policies that nobody measured."""
    lines = []
    for pair in pairs:
        side = pair.other
        for name, one in {side.policy: side.simulated, **side.policies}.items():
            told = Told.of(one)
            cells = [f"{told.light:.2f}", f"{told.gap:,.0f}", f"{told.rate:.1f}"]
            lines.append([f"{pair.name}, {name.upper()}", *cells])
    head = ["simulated", "light client's TTFT, s", "largest difference", "tokens/s"]
    return Listing("Other policies on the same requests", head, lines)


def data(pair: Paired) -> dict[str, Any]:
    """All numbers of a pair."""
    return {
        "server": dict(pair.facts),
        "weights": pair.found.weights._asdict(),
        "distance": pair.found.distance,
        "simulations": pair.found.simulations,
        "pace": pair.pace,
        "logs": {side.policy: _side(side) for side in pair.sides},
    }


def _side(side: Side) -> dict[str, Any]:
    named = {"measured": side.measured, "simulated": side.simulated}
    every = {**named, **side.elsewise, **side.policies}
    return {
        name: Told.of(one)._asdict() | {"ttft": {who: one.ttft(who) for who in one.clients}}
        for name, one in every.items()
    }


def table(pairs: Sequence[Paired]) -> list[dict[str, Any]]:
    """A row a number, measured and simulated."""
    return [
        {
            "logs": pair.name,
            "policy": side.policy,
            "metric": name,
            "measured": getattr(Told.of(side.measured), name),
            "simulated": getattr(Told.of(side.simulated), name),
        }
        for pair in pairs
        for side in pair.sides
        for name in MEANINGS
    ]

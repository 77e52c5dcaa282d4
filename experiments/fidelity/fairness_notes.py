"""What a reader must know of two logs of a server and their simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.fidelity.fairness_pair import Paired
from experiments.fidelity.fairness_words import request_of
from pagedsim.report.numbers import percent

_WAVE = 0.7
"""A difference of as many requests as this share of those that are answered at once is theirs."""
_APART = 1.5
"""Simulated differences that are as many times as large as another are worth a word."""
_COLD = 0.3
"""Seconds that a first answer takes longer where the server was not warm."""
_TERMS = (
    "the light client asks for least, and its TTFT is a mean; differences are in service, 1 for a "
    "token of a prompt and 2 for one of an answer: since the beginning until the last arrival, and "
    "within times in which two clients have requests waiting; answers are tokens a second until "
    "the last arrival, and until the last token"
)


def notes(pairs: Sequence[Paired], cold: bool) -> Iterator[str]:
    """What a reader must know."""
    yield _TERMS
    for pair in pairs:
        found, other = pair.found, pair.other
        yield (
            f"{pair.name}: {pair.facts['model']} on {pair.facts['hardware']}; requests that were "
            f"fitted are {percent(found.distance)} off on average, after {found.simulations} "
            f"simulations; the log under {other.policy.upper()} took {percent(pair.pace)} of the "
            "simulated time between tokens: so much the server itself was not the same"
        )
        yield from _alike(pair)
        yield from _waves(pair)
        gaps = [one.gap for one in other.elsewise.values()]
        if gaps and max(gaps) > _APART * min(gaps):
            yield (
                f"{pair.name}: with one thing assumed otherwise the simulated difference under "
                f"{other.policy.upper()} is {min(gaps):,.0f} to {max(gaps):,.0f}: whose requests "
                "are let in together settles early, and then comes again"
            )
    if cold and (late := [name for pair in pairs for name in _late(pair)]):
        yield (
            "a log's first answer says how cold its server was, and the first step takes as long: "
            f"{', '.join(late)}"
        )


def _alike(pair: Paired) -> Iterator[str]:
    """Where the two are no logs of the same clients, or not even two."""
    first, other = (side.measured for side in pair.sides)
    if first.log.path.samefile(other.log.path):
        yield (
            f"{pair.name}: one file is both logs: what is measured under "
            f"{pair.other.policy.upper()} is that under FCFS"
        )
    ends = zip(pair.sides, ((first, other), (other, first)), strict=True)
    alone = {side.policy: sorted({*one.clients} - {*two.clients}) for side, (one, two) in ends}
    told = [f"{', '.join(names)} only under {who.upper()}" for who, names in alone.items() if names]
    if told:
        yield (
            f"{pair.name}: clients are not the same in both logs, so that little can be held "
            f"against each other: {'; '.join(told)}"
        )


def _waves(pair: Paired) -> Iterator[str]:
    """Where clients differ by what is answered at once, that this is so."""
    other = pair.other.measured
    requests = (other.gap_waiting or 0.0) / request_of(other)
    if requests > _WAVE * other.at_once:
        yield (
            f"{pair.name}: {pair.other.policy.upper()}'s {other.gap_waiting:,.0f} between clients "
            f"that both wait are what {requests:.0f} requests get, where {other.at_once:.0f} are "
            "answered at once: they are let in together and end together, and most are of the "
            "client that was behind"
        )


def _late(pair: Paired) -> Iterator[str]:
    usual = pair.found.weights.mixed_step
    for side in pair.sides:
        first = float(side.measured.latencies.ttft[0])
        if first > usual + _COLD:
            yield f"{first:.2f} s in {pair.name}, {side.policy.upper()}"

"""Routing by prefixes: what it gains over turns, where prompts share long beginnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar

from experiments.papers.ladder import UNITS, Measured, by_rate
from experiments.papers.prefix_routing_drawing import draw
from experiments.papers.reproduction import Reproduction
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, unknown
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.percent import percent
from pagedsim.report.pictures import Drawing
from pagedsim.run.study import Reading
from pagedsim.workload.stages import stages_of

Rates = Mapping[float, Measured]
Published = Mapping[str, Mapping[str, Mapping[float, float]]]
"""By router, then measure, then rate."""


@dataclass(frozen=True, kw_only=True)
class PrefixRouting(Reproduction):
    """Two routers at all rates; others, and other assumptions, at the highest alone."""

    one_server: ClassVar[bool] = False

    routers: Mapping[str, Sequence[str]]
    """Names, and the overrides that make them: the base, and the one that is held against it."""
    others: Mapping[str, Sequence[str]]
    """Further routers."""
    variants: Mapping[str, Sequence[str]]
    """What is open, decided otherwise."""
    stages: Sequence[Mapping[str, float]]
    """Of `workload.stages`: the first warms caches and is not counted."""
    published: Mapping[str, Published]
    """By who ran these stages; the first is what ours is held against."""
    blocks: float
    """Tokens in the cache of a replica, as published."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.routers) != 2:
            raise ConfigError(f"study.routers: {len(self.routers)} of them: must be 2")
        if len(self.stages) < 2 or len(self._rates) != len(self.stages) - 1:
            raise ConfigError("study.stages: must be a warm-up and at least one other, each once")
        if not self.published:
            raise ConfigError("study.published: must name at least one source")
        for source, routers in self.published.items():
            for router, measures in routers.items():
                if router not in self.routers:
                    raise unknown(f"router of study.published.{source}", router, self.routers)
                for measure, values in measures.items():
                    where = f"study.published.{source}.{router}.{measure}"
                    if measure not in UNITS:
                        raise unknown(f"measure of study.published.{source}", measure, UNITS)
                    for rate, value in values.items():
                        require_number(f"{where}.{rate}", value, above=0)
        if lacking := [name for name in self.routers if not self._told(name, "tokens")]:
            raise ConfigError(f"study.published: its first source lacks tokens of {lacking[0]}")

    def _told(self, name: str, measure: str) -> Mapping[float, float]:
        """By rate, what the first source has of a router."""
        return next(iter(self.published.values())).get(name, {}).get(measure, {})

    @property
    def _rates(self) -> list[float]:
        return list(dict.fromkeys(stage.rate for stage in stages_of(list(self.stages))[1:]))

    def arms(self) -> dict[str, list[str]]:
        last = _stages([self.stages[0], self.stages[-1]])
        made = {name: [*own, _stages(self.stages)] for name, own in self.routers.items()}
        made |= {name: [*own, last] for name, own in self.others.items()}
        for variant, changes in self.variants.items():
            for name, own in self.routers.items():
                made[_varied(name, variant)] = [*own, last, *changes]
        return made

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        found = {arm: by_rate(own) for arm, own in runs.items()}
        source = next(iter(self.published))
        data = {
            "ours": {
                name: {f"{rate:g}": asdict(one) for rate, one in found[name].items()}
                for name in self.routers
            },
            "published": {
                name: {
                    measure: {f"{rate:g}": value for rate, value in values.items()}
                    for measure, values in measures.items()
                }
                for name, measures in self.published[source].items()
            },
            "at the highest rate": {arm: asdict(_last(rates)) for arm, rates in found.items()},
        }
        cache = _cache(runs[next(iter(self.routers))][0])
        return Reading(
            finding=list(self._finding(found)),
            rows=[
                *self._rows(found),
                Row("tokens in the cache of a replica", cache, self.blocks),
            ],
            listings=[self._all_rates(found), self._last_rate(found), self._elsewhere(found)],
            data=data,
            drawings={
                "routing": Drawing(
                    "By prefix or in turn",
                    f"Lines are ours, hollow points those of {source}.",
                    partial(draw, data),
                )
            },
        )

    def _rows(self, found: Mapping[str, Rates]) -> Iterator[Row]:
        last = self._rates[-1]
        base, best = self.routers
        for name in self.routers:
            most = max(found[name], key=lambda rate: found[name][rate].tokens)
            printed = self._told(name, "tokens")
            why = f"ours at {most:g}/s, theirs at {max(printed, key=printed.__getitem__):g}/s"
            yield Row(
                f"{name}: most output tokens",
                found[name][most].tokens,
                max(printed.values()),
                "/s",
                f"{why}; {self._otherwise(found, name, 'tokens')}",
            )
        yield Row(
            f"{best} / {base}: most output tokens",
            _most(found[best]) / _most(found[base]),
            max(self._told(best, "tokens").values()) / max(self._told(base, "tokens").values()),
            "×",
        )
        for measure in UNITS:
            for name in self.routers:
                printed = self._told(name, measure)
                if last in printed and measure != "tokens":
                    yield Row(
                        f"{name}, {last:g}/s: {_WORDS[measure]}",
                        getattr(found[name][last], measure),
                        printed[last],
                        UNITS[measure],
                        self._otherwise(found, name, measure),
                    )

    def _otherwise(self, found: Mapping[str, Rates], name: str, measure: str) -> str:
        """What the highest rate gives by other assumptions, and what others measured there."""
        ours = [
            f"{_cell(measure, getattr(_last(found[_varied(name, variant)]), measure))} ({variant})"
            for variant in self.variants
        ]
        theirs = [
            f"{_cell(measure, values[self._rates[-1]])} in {source}"
            for source, routers in list(self.published.items())[1:]
            if self._rates[-1] in (values := routers.get(name, {}).get(measure, {}))
        ]
        at = f"at {self._rates[-1]:g}/s "
        return at + "; ".join([", ".join(ours), *theirs])

    def _all_rates(self, found: Mapping[str, Rates]) -> Listing:
        head = ["requests/s"]
        rows = [[f"{rate:g}"] for rate in self._rates]
        for measure in ("tokens", "ttft_p50", "ttft_p90"):
            for name in self.routers:
                head += [f"{name}: {_SHORT[measure]}", "published"]
                for row, rate in zip(rows, self._rates, strict=True):
                    printed = self._told(name, measure).get(rate)
                    row.append(_cell(measure, getattr(found[name][rate], measure)))
                    row.append("–" if printed is None else _cell(measure, printed))
        note = "Output tokens a second, and seconds to the first token."
        return Listing("Every rate", head, rows, note)

    def _last_rate(self, found: Mapping[str, Rates]) -> Listing:
        measures = ("tokens", "ttft_p50", "ttft_p90", "ntpot_p50")
        rows = [
            [
                arm,
                *(_cell(measure, getattr(_last(rates), measure)) for measure in measures),
                percent(_last(rates).cached, 0),
                f"{_last(rates).preemptions:.2f}",
            ]
            for arm, rates in found.items()
        ]
        head = ["", *(_SHORT[measure] for measure in measures), "cached", "preempted"]
        title = f"Other routers and assumptions, {self._rates[-1]:g} requests/s"
        return Listing(title, head, rows, "Shares of prompt tokens, and preemptions a request.")

    def _elsewhere(self, found: Mapping[str, Rates]) -> Listing:
        """The same stages as others have measured them."""
        rows = [
            [
                f"{source}: {name}, {rate:g}/s, {_WORDS[measure]}",
                _cell(measure, value),
                _cell(measure, getattr(found[name][rate], measure)),
            ]
            for source, routers in list(self.published.items())[1:]
            for name, measures in routers.items()
            for measure, values in measures.items()
            for rate, value in values.items()
            if rate in found[name]
        ]
        return Listing("Other runs of the same stages", ["", "published", "ours"], rows)

    def _finding(self, found: Mapping[str, Rates]) -> Iterator[str]:
        base, best = self.routers
        most = {name: _most(found[name]) for name in self.routers}
        printed = {name: max(self._told(name, "tokens").values()) for name in self.routers}
        yield (
            f"By prefix the fleet gives at most {most[best]:,.0f} output tokens/s and in turn "
            f"{most[base]:,.0f}, {most[best] / most[base]:.2f} times as many (published: "
            f"{printed[best]:,.0f} and {printed[base]:,.0f}, {printed[best] / printed[base]:.2f} "
            "times)."
        )
        last = self._rates[-1]
        waits = [
            f"{self._beside(found, name, 'ttft_p50')} and {self._beside(found, name, 'ttft_p90')} "
            f"{how}"
            for name, how in ((base, "in turn"), (best, "by prefix"))
        ]
        yield (
            f"At {last:g} requests/s the P50 and P90 of the time to the first token are "
            f"{', '.join(waits)}: {percent(_last(found[base]).cached, 0)} of prompt tokens are "
            f"cached in turn and {percent(_last(found[best]).cached, 0)} by prefix."
        )
        each = ", ".join(f"{_last(found[name]).tokens:,.0f} with {name}" for name in self.others)
        yield f"Others at that rate, in output tokens/s: {each}."

    def _beside(self, found: Mapping[str, Rates], name: str, measure: str) -> str:
        """At the highest rate: ours, and what was published."""
        printed = self._told(name, measure).get(self._rates[-1])
        ours = _cell(measure, getattr(_last(found[name]), measure))
        told = "" if printed is None else f" (published: {printed:g})"
        return f"{ours} {UNITS[measure]}{told}"


_SHORT = {
    "tokens": "tokens/s",
    "ttft_mean": "mean TTFT",
    "ttft_p50": "P50",
    "ttft_p90": "P90",
    "ntpot_p50": "ms a token",
}
_WORDS = {
    "tokens": "output tokens a second",
    "ttft_mean": "mean time to the first token",
    "ttft_p50": "P50 time to the first token",
    "ttft_p90": "P90 time to the first token",
    "ntpot_p50": "P50 latency a token",
}


def _cell(measure: str, value: float) -> str:
    return f"{value:,.0f}" if measure == "tokens" else f"{value:.3g}"


def _stages(stages: Sequence[Mapping[str, float]]) -> str:
    each = (f"{{rate: {stage['rate']:g}, seconds: {stage['seconds']:g}}}" for stage in stages)
    return f"workload.stages=[{', '.join(each)}]"


def _varied(name: str, variant: str) -> str:
    return f"{name}, {variant}"


def _last(rates: Rates) -> Measured:
    return list(rates.values())[-1]


def _most(rates: Rates) -> float:
    return max(one.tokens for one in rates.values())


def _cache(run: Run) -> float:
    """Tokens that one replica's cache holds."""
    summary = run.summary
    return summary["total_blocks"] * summary["block_size"] / len(summary["replicas"])

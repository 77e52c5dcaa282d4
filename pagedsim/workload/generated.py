"""Synthetic workloads: one class of traffic, a mix of named classes, or stages of constant rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.errors import refuse_settings, require_number, require_whole
from pagedsim.workload.arrivals import (
    Arrivals,
    ClosedLoop,
    Gamma,
    Merged,
    Poisson,
    Source,
    Timed,
    make_arrivals,
    merge,
)
from pagedsim.workload.draws import Labelled, Labels, SharedPrefixes, make_prefixes, stream
from pagedsim.workload.lengths import Lengths, make_lengths
from pagedsim.workload.limits import (
    LONGEST,
    MOST,
    Tokens,
    capped_notice,
    clip,
    notice,
    refuse_late,
    within,
)
from pagedsim.workload.tokens import PrefixedPrompts
from pagedsim.workload.workload import Workload


@dataclass(frozen=True)
class Rows:
    """The columns of one class of requests, in order of arrival."""

    prompt_len: Tokens
    output_len: Tokens
    prefix: NDArray[np.int32]  # -1: none
    prefix_len: NDArray[np.int32]
    labels: Labelled
    clipped: int
    capped: int  # clipped by their distribution


@dataclass(frozen=True, kw_only=True)
class Traffic(Labels):
    """One class of requests: arrivals, lengths and, as `Labels` has them, attributes.

    `requests` bounds their number, `start` is the time of the first in seconds; the other settings
    are those of `synthetic`.
    """

    name: str = ""
    arrivals: str | Arrivals = "poisson"
    rate: float | None = None
    cv: float | None = None
    users: int | None = None
    think_time: float | None = None
    requests: int | None = None
    start: float = 0.0
    lengths: str | Mapping[str, Any] | Lengths = "sharegpt"
    max_len: int | None = None
    prefixes: Mapping[str, Any] | SharedPrefixes | None = None

    def checked(self) -> Traffic:
        """Resolve names to objects; raises ConfigError for invalid settings."""
        if self.max_len is not None:
            require_whole("max_len", self.max_len, 2, LONGEST)
        if self.requests is not None:
            require_whole("requests", self.requests, 1, MOST)
        require_number("start", self.start, low=0)
        _ = self.params  # n and beam may contradict each other
        prefixes = make_prefixes(self.prefixes)
        if prefixes and self.max_len is not None and prefixes.tokens > self.max_len - 2:
            raise ConfigError(
                f"prefixes.tokens={prefixes.tokens}: must leave room for a prompt and an answer "
                f"in max_len={self.max_len}"
            )
        return replace(
            self,
            arrivals=self.process,
            lengths=make_lengths(self.lengths, self.max_len),
            prefixes=prefixes,
        )

    @property
    def process(self) -> Arrivals:
        return make_arrivals(
            self.arrivals,
            rate=self.rate,
            cv=self.cv,
            users=self.users,
            think_time=self.think_time,
        )

    @property
    def drawn(self) -> bool:
        """Whether it is random; only after `checked`."""
        lengths = make_lengths(self.lengths, self.max_len)
        drawn = self.process.drawn or lengths.drawn or super().drawn
        return drawn or self.prefixes is not None

    @property
    def requests_per_second(self) -> float:
        """The mean rate; 0 for bursts and closed loops."""
        return self.process.rate if isinstance(self.process, Timed) else 0.0

    def source(self, seed: int) -> Source:
        def times(count: int) -> NDArray[np.float64]:
            # The stream is restarted each time, so that more arrivals extend fewer.
            return self.start + self.process.times(count, stream(seed, "arrivals", self.name))

        cv = self.process.cv if isinstance(self.process, Gamma) else 1.0
        return Source(times, self.requests_per_second, cv, self.requests, self.name)

    def rows(self, arrival: NDArray[np.float64], seed: int) -> Rows:
        """The other columns of requests with these arrivals."""
        count = len(arrival)
        lengths, prefixes = make_lengths(self.lengths, self.max_len), make_prefixes(self.prefixes)
        draw = partial(stream, seed, owner=self.name)
        prompt, output = lengths.sample(count, draw("lengths"))
        capped = lengths.capped(prompt, output)
        prefix, prefix_len = np.array(-1, np.int32), np.array(0, np.int32)
        if prefixes:
            prefix = prefixes.sample(count, draw("prompts"))
            prefix_len = np.where(prefix >= 0, prefixes.tokens, 0).astype(np.int32)
            prompt = prompt + prefix_len
        prompt, output, clipped = clip(prompt, self.cut(output), self.max_len)
        labels = self.draw(arrival, draw)
        return Rows(prompt, output, prefix, prefix_len, labels, clipped, capped)


def synthetic(
    *,
    requests: int | None = None,
    duration: float | None = None,
    arrivals: str | Arrivals = "poisson",
    rate: float | None = None,
    cv: float | None = None,
    users: int | None = None,
    think_time: float | None = None,
    lengths: str | Mapping[str, Any] | Lengths = "sharegpt",
    max_len: int | None = None,
    prefixes: Mapping[str, Any] | SharedPrefixes | None = None,
    priority: float | Mapping[float, float] = 0.0,
    client: str | Mapping[str, float] = "",
    deadline: float | None = None,
    n: int = 1,
    beam: int | None = None,
    max_tokens: int | str | None = None,
    seed: int = 0,
) -> Workload:
    """A workload of one class of traffic.

    It ends after `requests` or `duration` seconds, whichever is first. `arrivals` is poisson,
    gamma (with `cv`), fixed, burst or closed (with `users`, `think_time`); `rate` is in requests
    a second. `lengths` is a shape (see `SHAPES`), or a mapping with `shape` and its settings.
    `max_len` bounds prompt plus output. `priority` and `client` are a constant or a mapping of
    values to probabilities. `deadline` is in seconds after arrival. Each prompt has `n` output
    sequences of one length, or a beam search of width `beam`. `max_tokens` is what a request asks
    for at most: a number, exact (the length of its answer, as benchmarks do), or None.

    >>> fixed = {"shape": "fixed", "prompt": 8, "output": 4}
    >>> synthetic(requests=3, arrivals="burst", lengths=fixed)
    Workload(3 requests at once, 8 tokens in and 4 out on average)
    """
    only = Traffic(
        arrivals=arrivals,
        rate=rate,
        cv=cv,
        users=users,
        think_time=think_time,
        lengths=lengths,
        max_len=max_len,
        prefixes=prefixes,
        priority=priority,
        client=client,
        deadline=deadline,
        n=n,
        beam=beam,
        max_tokens=max_tokens,
    )
    only = only.checked()
    process = only.process
    workload = _build([only], requests, duration, seed)
    if isinstance(process, ClosedLoop):
        workload = replace(workload, users=process.users, think_time=process.think_time)
    return replace(workload, mode=process.mode)


def mix(
    *,
    classes: Mapping[str, Mapping[str, Any] | Traffic],
    requests: int | None = None,
    duration: float | None = None,
    rate: float | None = None,
    max_len: int | None = None,
    seed: int = 0,
) -> Workload:
    """A workload of several named classes, merged by arrival.

    A class has the settings of `synthetic` without `duration` and `seed`, and `start` in seconds;
    `requests` bounds it and is required for a burst. Its client defaults to its name. `rate` scales
    all classes to that total rate; `max_len` is the default of classes without one. Each class has
    random streams of its own.
    """
    if not classes:
        raise ConfigError("classes: must be a mapping of names to settings, with at least one")
    traffics = [_class(str(name), settings, max_len) for name, settings in classes.items()]
    if rate is not None:
        traffics = _scaled(traffics, require_number("rate", rate, above=0))
    return _build(traffics, requests, duration, seed)


def _class(name: str, settings: Any, max_len: int | None) -> Traffic:
    with within(f"classes.{name}"):
        if isinstance(settings, Mapping):
            given: dict[str, Any] = {"client": name, "max_len": max_len}
            given |= {str(key): value for key, value in settings.items()}
            refuse_settings("a class", given, partial(Traffic, name=name), hidden=("name",))
            settings = Traffic(name=name, **given)
        if not isinstance(settings, Traffic):
            raise ConfigError(f"{settings!r}: must be a mapping of settings")
        if isinstance(settings.process, ClosedLoop):
            raise ConfigError("arrivals=closed: only for a workload of one class")
        return replace(settings, name=name).checked()


def _scaled(classes: Sequence[Traffic], rate: float) -> list[Traffic]:
    total = sum(traffic.requests_per_second for traffic in classes)
    if not total:
        raise ConfigError(f"rate={rate:g}: no class has a rate that could be scaled")
    return [
        replace(traffic, arrivals=traffic.process.scaled(rate / total))
        if isinstance(traffic.process, Timed)
        else traffic
        for traffic in classes
    ]


def _build(
    classes: Sequence[Traffic], requests: int | None, duration: float | None, seed: int
) -> Workload:
    """`classes` must be checked."""
    if requests is not None:
        require_whole("requests", requests, 1, MOST)
    if duration is not None:
        require_number("duration", duration, above=0)
    with np.errstate(over="ignore"):
        merged = merge([traffic.source(seed) for traffic in classes], requests, duration)
    slowest = min(
        (traffic.requests_per_second for traffic in classes if traffic.requests_per_second),
        default=0,
    )
    refuse_late(f"rate={slowest:g}", merged.arrival[-1])
    parts = []
    for traffic, arrival in zip(classes, merged.split(), strict=True):
        with within(traffic.name and f"classes.{traffic.name}"):
            parts.append(traffic.rows(arrival, seed))
    return _joined(classes, merged, parts)


def _joined(classes: Sequence[Traffic], merged: Merged, parts: Sequence[Rows]) -> Workload:
    labels = [part.labels for part in parts]
    prompt_len = merged.join([part.prompt_len for part in parts])
    prompts = None
    if any(traffic.prefixes is not None for traffic in classes):
        prefixes = merged.join(_numbered([part.prefix for part in parts]))
        prefix_len = merged.join([part.prefix_len for part in parts])
        prompts = PrefixedPrompts(prefixes, prefix_len, prompt_len)
    clients = sorted({name for label in labels for name in label.clients})
    columns = [part.labels.asked(part.output_len) for part in parts]
    asked = tuple(dict.fromkeys(params for _, distinct in columns for params in distinct))
    place = {params: index for index, params in enumerate(asked)}
    return Workload.of(
        merged.arrival,
        prompt_len,
        merged.join([part.output_len for part in parts]),
        priority=merged.join([label.priority for label in labels]),
        client=merged.join(
            [np.array(list(map(clients.index, lb.clients)), np.int32)[lb.client] for lb in labels]
        ),
        clients=clients,
        deadline=merged.join([label.deadline for label in labels]),
        sampling=merged.join(
            [
                np.array([place[params] for params in distinct], np.int32)[index]
                for index, distinct in columns
            ]
        ),
        asked=asked,
        prompts=prompts,
        drawn=any(traffic.drawn for traffic in classes),
        clipped=sum(part.clipped for part in parts),
        notices=_notices(classes, parts),
    )


def _notices(classes: Sequence[Traffic], parts: Sequence[Rows]) -> list[str]:
    """Notices on clipping, per class, since each has its own bound."""
    rows = sum(len(part.output_len) for part in parts)
    lines: list[str] = []
    for traffic, part in zip(classes, parts, strict=True):
        lines += notice(part.clipped, rows, traffic.max_len, traffic.name)
        lines += capped_notice(
            part.capped, len(part.output_len), rows, traffic.max_len, traffic.name
        )
    return lines


def _numbered(prefixes: Sequence[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
    """Renumber prefixes so that those of different classes differ."""
    numbered, first = [], 0
    for prefix in prefixes:
        numbered.append(np.where(prefix >= 0, prefix + first, -1).astype(np.int32))
        first += int(prefix.max(initial=-1)) + 1
    return numbered


@dataclass(frozen=True)
class Stage:
    """A request rate held for a number of seconds."""

    rate: float
    seconds: float

    @property
    def requests(self) -> int:
        """Number of requests, at least one."""
        return max(round(self.rate * self.seconds), 1)


def shared_prefix(
    *,
    stages: object,
    pause: float,
    groups: int,
    questions: int,
    prefix_len: int,
    question_len: int,
    output_len: int,
    seed: int = 0,
) -> Workload:
    """Poisson arrivals at each stage's rate, `pause` seconds after the last of the stage before.

    Prompts are of `groups` with a common prefix of `prefix_len` tokens, each with `questions`
    different suffixes of `question_len`. All are sent round robin over all stages, in an order that
    is shuffled once.

    >>> shared_prefix(stages=[{"rate": 2, "seconds": 5}], pause=0, groups=3, questions=2,
    ...               prefix_len=30, question_len=10, output_len=5)
    Workload(10 requests over 5.35877 s, 40 tokens in and 5 out on average)
    """
    parsed = stages_of(stages)
    require_number("pause", pause, low=0)
    for name, value in (("groups", groups), ("questions", questions)):
        require_whole(name, value, 1, 1_000_000)
    lengths = {"prefix_len": prefix_len, "question_len": question_len, "output_len": output_len}
    for name, value in lengths.items():
        require_whole(name, value, 1, LONGEST)
    arrival = _arrivals(parsed, pause, stream(seed, "arrivals"))
    refuse_late("stages", arrival[-1])
    order = stream(seed, "prompts").permutation(groups * questions)
    asked = order[np.arange(len(arrival)) % len(order)].astype(np.int32)
    prompt_len = np.full(len(arrival), prefix_len + question_len, np.int32)
    shared = np.full(len(arrival), prefix_len, np.int32)
    prompts = PrefixedPrompts(asked // questions, shared, prompt_len, suffix=asked)
    return Workload.of(arrival, prompt_len, output_len, prompts=prompts)


def stages_of(stages: object) -> list[Stage]:
    """Stages from settings; raises ConfigError that names an invalid one."""
    if not isinstance(stages, Sequence) or isinstance(stages, str) or not stages:
        raise ConfigError(f"stages={stages!r}: must be a list with at least one {{rate, seconds}}")
    return [_stage(f"stages.{place}", settings) for place, settings in enumerate(stages)]


def _stage(where: str, settings: Any) -> Stage:
    if not isinstance(settings, dict):
        raise ConfigError(f"{where}={settings!r}: must be {{rate, seconds}}")
    refuse_settings("a stage", settings, Stage, where)
    for name, value in settings.items():
        require_number(f"{where}.{name}", value, above=0)
    stage = Stage(**settings)
    if stage.rate * stage.seconds > MOST:
        raise ConfigError(
            f"{where}: {stage.rate * stage.seconds:g} requests: must be at most {MOST}"
        )
    return stage


def _arrivals(
    stages: Sequence[Stage], pause: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    parts, begin = [], 0.0
    for stage in stages:
        times = begin + Poisson(stage.rate).times(stage.requests, rng)
        parts.append(times)
        begin = float(times[-1]) + pause
    return np.concatenate(parts)

"""Workloads drawn at random: one kind of traffic, or a mix of named classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown
from pagedsim.workload.arrivals import Arrivals, Burst, ClosedLoop, make_arrivals
from pagedsim.workload.choices import SharedPrefixes, make_prefixes
from pagedsim.workload.labels import Labels, Named, draw_labels
from pagedsim.workload.lengths import Lengths, Tokens, make_lengths
from pagedsim.workload.limits import clip
from pagedsim.workload.merge import Times, merge
from pagedsim.workload.settings import number, refuse_unknown, whole
from pagedsim.workload.streams import stream
from pagedsim.workload.tokens import PrefixedPrompts
from pagedsim.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class TrafficClass:
    """One kind of requests: when they come, how long they are, and what they are labelled.

    `requests` bounds their number, where the workload does not; `start` shifts them in time.
    The other settings are those of `synthetic`.
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
    priority: float | Mapping[float, float] = 0.0
    client: str | Mapping[str, float] = ""
    deadline: float | None = None
    prediction_sigma: float | None = None

    @cached_property
    def process(self) -> Arrivals:
        """Its arrival process."""
        if isinstance(self.arrivals, Arrivals):
            return self.arrivals
        return make_arrivals(
            self.arrivals,
            rate=self.rate,
            cv=self.cv,
            users=self.users,
            think_time=self.think_time,
        )

    @property
    def labels(self) -> Labels:
        """Its labels."""
        return Labels(self.priority, self.client, self.deadline, self.prediction_sigma)

    def stream(self, seed: int, name: str) -> np.random.Generator:
        """Its own random stream of that name."""
        return stream(seed, f"{self.name}/{name}" if self.name else name)


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
    prediction_sigma: float | None = None,
    seed: int = 0,
) -> Workload:
    """A workload of one kind of traffic.

    `requests` or `duration` (seconds), whichever ends first, bounds it. `arrivals` is poisson,
    gamma (with `cv`), fixed, burst or closed (with `users`, `think_time`); `rate` is in requests
    a second. `lengths` is a shape (see `SHAPES`), or a mapping with `shape` and its settings.
    `max_len` bounds prompt and output together. `priority` and `client` are one value, or a
    mapping of values to probabilities. `deadline` is in seconds after the arrival.
    `prediction_sigma` gives every request a predicted length: 0 is the truth.

    >>> synthetic(requests=3, rate=1.0, lengths={"shape": "fixed", "prompt": 8, "output": 4})
    Workload(3 requests over 2.49684 s, 8 tokens in and 4 out on average)
    """
    only = TrafficClass(
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
        prediction_sigma=prediction_sigma,
    )
    return _build([only], requests, duration, seed)


def mix(
    *,
    classes: Mapping[str, Mapping[str, Any] | TrafficClass],
    requests: int | None = None,
    duration: float | None = None,
    rate: float | None = None,
    max_len: int | None = None,
    seed: int = 0,
) -> Workload:
    """A workload of several named classes, merged by arrival.

    Each class takes the settings of `synthetic`, and `start` in seconds; its own `requests` ends
    it early, and is needed where it comes as a burst. Its client is its name unless it says
    otherwise. `rate` scales all classes so that together they send that many a second; `max_len`
    is for classes that name none. Each class draws from streams of its own.
    """
    if not isinstance(classes, Mapping) or not classes:
        raise ConfigError("classes: must be a mapping of names to settings, with at least one")
    made = [_class(str(name), settings, max_len) for name, settings in classes.items()]
    if any(isinstance(one.process, ClosedLoop) for one in made):
        raise ConfigError("classes: arrivals=closed is only for a workload of one class")
    if rate is not None:
        made = _scaled(made, number("rate", rate, above=0))
    return _build(made, requests, duration, seed)


def _class(
    name: str, settings: Mapping[str, Any] | TrafficClass, max_len: int | None
) -> TrafficClass:
    if isinstance(settings, TrafficClass):
        return settings
    if not isinstance(settings, Mapping):
        raise ConfigError(f"classes.{name}={settings!r}: must be a mapping of settings")
    given = {str(key): value for key, value in settings.items()}
    refuse_unknown(f"classes.{name}", given, TrafficClass, hidden=("name",))
    if "name" in given:
        raise unknown(f"setting of classes.{name}", "name", set(TrafficClass.__annotations__))
    made = TrafficClass(**{"client": name, "max_len": max_len, **given}, name=name)
    try:
        _ = made.process
    except ConfigError as error:
        raise ConfigError(f"classes.{name}: {error}") from None
    return made


def _rate_of(one: TrafficClass) -> float:
    """Requests a second, 0 for a burst."""
    return float(getattr(one.process, "rate", 0.0))


def _scaled(classes: Sequence[TrafficClass], rate: float) -> list[TrafficClass]:
    total = sum(map(_rate_of, classes))
    if not total:
        raise ConfigError(f"rate={rate:g}: no class has a rate that could be scaled")
    scaled = []
    for one in classes:
        settings = {**one.__dict__}
        settings.pop("process", None)  # cached
        own = one.process
        if _rate_of(one):
            changed = {**own.__dict__, "rate": _rate_of(one) * rate / total}
            settings["arrivals"] = type(own)(**changed)
        scaled.append(TrafficClass(**settings))
    return scaled


def _build(
    classes: Sequence[TrafficClass], requests: int | None, duration: float | None, seed: int
) -> Workload:
    if requests is not None:
        whole("requests", requests, 1)
    if duration is not None:
        number("duration", duration, above=0)
    lengths = [make_lengths(one.lengths, one.max_len) for one in classes]
    prefixes = [make_prefixes(one.prefixes) for one in classes]
    arrival, counts, order = merge([_times(one, seed) for one in classes], requests, duration)
    parts, clipped = [], 0
    shared = any(prefix is not None for prefix in prefixes)
    first_prefix = 0
    for one, shape, prefix, count in zip(classes, lengths, prefixes, counts, strict=True):
        prompt, output = shape.sample(count, one.stream(seed, "lengths"))
        which = None
        if prefix is not None:
            which = prefix.sample(count, one.stream(seed, "prompts"))
            prompt = _lengthened(prompt, which, prefix)
            which[which >= 0] += first_prefix
            first_prefix += prefix.count
        cut = clip(prompt, output, one.max_len)
        clipped += cut.clipped
        parts.append((cut.prompt, cut.output, which, prefix))
    def joined(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return columns[0] if order is None else np.concatenate(columns)[order]
    prompt_len = joined([part[0] for part in parts])
    output_len = joined([part[1] for part in parts])
    ...

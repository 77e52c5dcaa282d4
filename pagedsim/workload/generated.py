"""Workloads drawn at random: one kind of traffic, or a mix of named classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.errors import refuse_settings, require_number, require_whole
from pagedsim.workload.arrivals import Arrivals, ClosedLoop, Timed
from pagedsim.workload.choices import SharedPrefixes
from pagedsim.workload.lengths import Lengths
from pagedsim.workload.limits import MOST, capped_notice, notice, refuse_late
from pagedsim.workload.merge import Merged, merge
from pagedsim.workload.settings import within
from pagedsim.workload.tokens import PrefixedPrompts
from pagedsim.workload.traffic import Rows, Traffic
from pagedsim.workload.workload import Workload


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
    seed: int = 0,
) -> Workload:
    """A workload of one kind of traffic.

    `requests` or `duration` (seconds), whichever ends first, bounds it. `arrivals` is poisson,
    gamma (with `cv`), fixed, burst or closed (with `users`, `think_time`); `rate` is in requests
    a second. `lengths` is a shape (see `SHAPES`), or a mapping with `shape` and its settings.
    `max_len` bounds prompt and output together. `priority` and `client` are one value, or a
    mapping of values to probabilities. `deadline` is in seconds after the arrival.
    Each prompt gets `n` answers of one length, or is the start of a search with so many beams as
    `beam` says.

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
    )
    only = only.checked()
    process = only.process
    made = _build([only], requests, duration, seed)
    if isinstance(process, ClosedLoop):
        made = replace(made, users=process.users, think_time=process.think_time)
    return replace(made, mode=process.mode)


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

    Each class takes the settings of `synthetic` but the bounds and the seed, and `start` in
    seconds; `requests` ends it early, and is needed where it comes as a burst. Its client is its
    name unless it says otherwise. `rate` scales all classes, so that together they send that many
    a second; `max_len` is for classes that name none. Each class draws from streams of its own.
    """
    if not classes:
        raise ConfigError("classes: must be a mapping of names to settings, with at least one")
    made = [_class(str(name), settings, max_len) for name, settings in classes.items()]
    if rate is not None:
        made = _scaled(made, require_number("rate", rate, above=0))
    return _build(made, requests, duration, seed)


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
    total = sum(one.requests_per_second for one in classes)
    if not total:
        raise ConfigError(f"rate={rate:g}: no class has a rate that could be scaled")
    return [
        replace(one, arrivals=one.process.scaled(rate / total))
        if isinstance(one.process, Timed)
        else one
        for one in classes
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
        merged = merge([one.source(seed) for one in classes], requests, duration)
    slowest = min(
        (one.requests_per_second for one in classes if one.requests_per_second), default=0
    )
    refuse_late(f"rate={slowest:g}", merged.arrival[-1])
    parts = []
    for one, arrival in zip(classes, merged.split(), strict=True):
        with within(one.name and f"classes.{one.name}"):
            parts.append(one.rows(arrival, seed))
    return _joined(classes, merged, parts)


def _joined(classes: Sequence[Traffic], merged: Merged, parts: Sequence[Rows]) -> Workload:
    labels = [part.labels for part in parts]
    prompt_len = merged.join([part.prompt_len for part in parts])
    prompts = None
    if any(one.prefixes is not None for one in classes):
        prefixes = merged.join(_numbered([part.prefix for part in parts]))
        prefix_len = merged.join([part.prefix_len for part in parts])
        prompts = PrefixedPrompts(prefixes, prefix_len, prompt_len)
    clients = sorted({name for label in labels for name in label.clients})
    asked = tuple(dict.fromkeys(label.params for label in labels))
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
        sampling=merged.join([np.array(asked.index(lb.params), np.int32) for lb in labels]),
        asked=asked,
        prompts=prompts,
        drawn=any(one.drawn for one in classes),
        clipped=sum(part.clipped for part in parts),
        notices=_notices(classes, parts),
    )


def _notices(classes: Sequence[Traffic], parts: Sequence[Rows]) -> list[str]:
    """What was cut, a line each class: each has a bound of its own."""
    rows = sum(len(part.output_len) for part in parts)
    lines: list[str] = []
    for one, part in zip(classes, parts, strict=True):
        lines += notice(part.clipped, rows, one.max_len, one.name)
        lines += capped_notice(part.capped, len(part.output_len), rows, one.max_len, one.name)
    return lines


def _numbered(prefixes: Sequence[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
    """Each class's prefixes numbered after those of the classes before it."""
    numbered, first = [], 0
    for prefix in prefixes:
        numbered.append(np.where(prefix >= 0, prefix + first, -1).astype(np.int32))
        first += int(prefix.max(initial=-1)) + 1
    return numbered

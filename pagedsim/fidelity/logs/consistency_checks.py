"""Checks of a log against the settings of its server, and the server's load over time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError, Scheduler
from pagedsim.fidelity import sheets
from pagedsim.fidelity.logs.constants import Constants
from pagedsim.fidelity.logs.log import STATED, Column, Latencies, Log
from pagedsim.fidelity.logs.server import ExternalServer, Served
from pagedsim.sim.cost.base import step
from pagedsim.spec.run import Settings

FASTER = 1.05
"""A request is too fast if the data sheet's peak takes this factor longer than was measured."""
MANY = 0.05
"""Share of the requests that must be too fast: single ones may be, by chance."""
FEW = 10
"""And so many where prompts are taken together."""
OVER = 1.1
"""Factor by which a log must seem to use more memory than there is."""
AMISS = 0.25
"""Relative error of first tokens from which on other settings are tried."""
BETTER = 0.5
"""Other settings are named if they leave at most this share of the error."""
NEARLY = 1.25
"""What leaves so many times as much as the best is named before it where it changes less."""
MARGIN = 2
"""Steps by which a client's times of a beginning and an end may be wrong."""
CACHED = (
    "the server had parts of them in a prefix cache, and beginnings that prompts share must be "
    f"stated, in columns of the log ({STATED}), with memory=prefix"
)
OTHERWISE = (
    "more than one replica may be behind this log, or another GPU, another batching, or prompts "
    "that it had cached"
)


def inconsistencies(server: ExternalServer, served: Served, constants: Constants) -> Iterator[str]:
    """Contradictions between the log and the settings, a line each.

    `served`: the simulation of the log. `constants` are used to try other settings; they must not
    be fitted to this log under the present settings.
    """
    if server.log.contents is not None and not server.finds_prefixes:
        yield (
            "the log says which prompts begin alike, and this server computes all of each: "
            "memory=prefix has a prefix cache"
        )
    yield from _of_speed(server)
    if not served.preemptions:  # a preempted request has begun, and holds no memory
        yield from _of_size(server)
    yield from _of_settings(server, constants)


def _of_speed(server: ExternalServer) -> Iterator[str]:
    log, peak = server.log, server.at_its_peak()
    latencies = peak.serve().latencies
    faster = latencies.e2e > FASTER * log.latencies.e2e
    if faster.mean() > MANY:
        yield (
            f"{int(faster.sum()):,} of {len(log):,} requests were answered faster than one server "
            "can at the full rates of the data sheet and with no work of the host: " + OTHERWISE
        )
    if log.contents is not None:
        return
    lengths, where = np.unique(log.prompt, return_inverse=True)
    plans, cost = [step(int(length)) for length in lengths], peak.roofline
    alone = np.array([cost.step_seconds(plan) for plan in plans])[where]
    sooner = alone > FASTER * log.latencies.ttft
    if sooner.mean() > MANY:
        yield (
            f"{int(sooner.sum()):,} of {len(log):,} first tokens came sooner than their prompts "
            f"can be computed at the full rates of the data sheet: {CACHED}"
        )
        return
    products = np.array([cost.work(plan).flop / cost.flop_rate for plan in plans])[where]
    needed, span, prompts = _busiest(log, products)
    if needed > FASTER * span:
        yield (
            f"{prompts:,} prompts came and had their first tokens within {span:.3g} s, and their "
            f"FLOP take {needed:.3g} s at the full rate of the data sheet: {CACHED}"
        )


def _busiest(log: Log, seconds: Column) -> tuple[float, float, int]:
    """The prompts that came and were computed within a time for which they need most of it, each
    `seconds` of the GPU: what they need, that time, and their number."""
    first = log.arrived + log.latencies.ttft
    order, least = np.argsort(first, kind="stable"), max(int(MANY * len(log)), FEW)
    busiest = 0.0, 1.0, 0
    for begin in log.arrived[:: max(len(log) // POINTS, 1)]:
        later = order[log.arrived[order] >= begin]
        needed, spans = np.cumsum(seconds[later]), first[later] - begin
        loads = (needed / spans)[least - 1 :]
        if len(loads) and loads.max() > busiest[0] / busiest[1]:
            last = least - 1 + int(loads.argmax())
            busiest = float(needed[last]), float(spans[last]), last + 1
    return busiest


def _of_size(server: ExternalServer) -> Iterator[str]:
    log, scheduler = server.log, server.built.scheduler
    surely, most = int(_surely_running(log).max()), scheduler.max_seqs
    if surely > most:
        yield (
            f"up to {surely:,} requests had begun and not ended at a time, and "
            f"server.max_seqs={most} lets one server run no more than that: it may have been "
            f"{surely} there, or {OTHERWISE}"
        )
    kv = load_over_time(log, log.latencies, scheduler)["kv"].max()
    if kv > 100 * OVER:
        yield (
            f"the requests that ran at a time took up to {kv:.0f} % of the memory for "
            f"keys and values, by their lengths: {OTHERWISE}"
        )


def _surely_running(log: Log) -> NDArray[np.int64]:
    """Number of running requests at each beginning and end of one.

    A client sees the last token some steps after the server has given the seat to another request.
    So a request counts from `MARGIN` token gaps after its beginning until as many before its end.
    """
    latencies = log.latencies
    margin = MARGIN * np.nan_to_num(latencies.tpot)
    scheduled = latencies.ttft if latencies.queue is None else latencies.queue
    begin, end = log.arrived + scheduled + margin, log.arrived + latencies.e2e - margin
    known = begin < end
    times = np.concatenate([begin[known], end[known]])
    changes = np.concatenate([np.ones(known.sum(), int), -np.ones(known.sum(), int)])
    order = np.lexsort((changes, times))  # at one time, ends first
    return np.concatenate([[0], np.cumsum(changes[order])])


# -- settings --------------------------------------------------------------------------------------


def _of_settings(server: ExternalServer, constants: Constants) -> Iterator[str]:
    """Settings under which first tokens fit the log better, if the server's own are far off."""
    log = server.log
    error = _amiss(log, server.serve_with(constants))
    if error < AMISS:
        return
    tried = []
    for words, changes in _others(server).items():
        with suppress(ConfigError):  # such as prompts that are never split and longer than a step
            served = ExternalServer({**server.config, **changes}, log).serve_with(constants)
            tried.append((_amiss(log, served), words, len(changes)))
    least = min((amiss for amiss, *_ in tried), default=error)
    near = [trial for trial in tried if trial[0] <= NEARLY * least]
    best_error, best, _ = min(near, key=lambda trial: trial[2], default=(error, "", 0))
    if best_error < BETTER * error:
        yield (
            f"half of the first tokens are {100 * error:.0f} % off and more with these settings; "
            f"with {best} it would be {100 * best_error:.0f} %: are these the server's?"
        )


def _amiss(log: Log, served: Served) -> float:
    """By what factor half of the times to first tokens are off at least, less 1."""
    ratios = served.latencies.ttft / log.latencies.ttft
    return float(np.expm1(np.median(np.abs(np.log(np.maximum(ratios, 1e-9))))))


def _others(server: ExternalServer) -> dict[str, Settings]:
    """Batchings and numbers of sequences that this log may be of: changes of the configuration."""
    target = server.config["batching"].get("_target_")
    batchings: list[tuple[list[str], Settings]] = [([], {})]
    for name in ("unified", "prefill_first"):
        if (batching := sheets.settings("batching", name))["_target_"] != target:
            batchings.append(([f"batching={name}"], {"batching": batching}))
    seats: list[tuple[list[str], Settings]] = [([], {})]
    peak = int(_surely_running(server.log).max())
    if peak < server.built.scheduler.max_seqs:
        limits = {**server.config["server"], "max_seqs": peak}
        seats.append(([f"server.max_seqs={peak}"], {"server": limits}))
    return {
        " ".join([*batching, *two]): {**changes, **limits}
        for (batching, changes), (two, limits) in product(batchings, seats)
        if batching or two
    }


# -- load over time --------------------------------------------------------------------------------

POINTS = 400
"""Times at which the load is computed."""


def load_over_time(log: Log, latencies: Latencies, scheduler: Scheduler) -> dict[str, Column]:
    """Running and waiting requests, and used KV memory in %, over time.

    A request runs from its first step, if the log knows it, else from its first token; before that
    it waits. Preempted requests count as running, with their memory. Kept and shared blocks do not
    count, since no log has them.
    """
    scheduled = latencies.ttft if latencies.queue is None else latencies.queue
    begin, end = log.arrived + scheduled, log.arrived + latencies.e2e
    first = log.arrived + latencies.ttft
    times = np.linspace(0.0, float(end.max()), POINTS)
    now = times[:, None]
    runs = (begin <= now) & (now < end)
    waits = (log.arrived <= now) & (now < begin)
    gone = np.clip((now - first) / np.maximum(end - first, 1e-9), 0.0, 1.0)
    tokens = np.where(runs, log.prompt + log.output * gone, 0.0).sum(axis=1)
    room = scheduler.memory.total * scheduler.memory.block_size
    return {
        "times": times,
        "running": runs.sum(axis=1, dtype=float),
        "waiting": waits.sum(axis=1, dtype=float),
        "kv": 100 * tokens / room,
    }

"""A second accountant: every metric of a run, from the times of its tokens and what its steps did.

`of_requests` and `of_run` have a line or a few for each metric, under its name; a metric that they
lack fails the comparison. No code of `pagedsim.metrics` has a part in it, and no shortcut: a slow
recording (`ledger.py`) has every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from math import inf, nan
from statistics import fmean
from typing import Any

from pagedsim.metrics.definitions import METRICS
from pagedsim.sim.cost.work import step_work
from pagedsim.workload.working_set import WINDOW
from tests.metrics.accounts import (
    Books,
    Group,
    batch,
    imbalance_over_time,
    load,
    ratio,
    replicas,
    service_gap,
    service_jain,
    statistics,
    tiers,
    union,
)
from tests.metrics.ledger import Life, Step
from tests.workload.test_working_set import touched

STATES = ("finished", "rejected", "aborted", "unfinished")


def of_requests(books: Books, group: Group) -> dict[str, Any]:
    """Metrics of requests: a number, the values of a latency, or None where it is not defined."""
    done = [life for life in group if life.state == "finished"]
    asked = [life for life in group if life.state != "rejected"]
    met = within(books, done)
    columns = books.recording.run.request_columns([life.id for life in group])
    cached = sum(life.cached for life in group)
    account: dict[str, Any] = {
        "requests": len(group),
        **{state: sum(life.state == state for life in group) for state in STATES},
        "ttft": [life.ttft for life in done],
        "tpot": [life.tpot for life in done if len(life.tokens) > 1],
        "itl": [after - before for life in done for before, after in pairwise(life.tokens)],
        "e2e": [life.e2e for life in done],
        "normalized_latency": [life.e2e / len(life.tokens) for life in done],
        "queue_time": [
            life.scheduled - life.arrival for life in done if life.scheduled is not None
        ],
        "requests_per_s": ratio(len(done), books.makespan),
        "output_tokens_per_s": ratio(sum(life.generated for life in done), books.makespan),
        "goodput_per_s": None if met is None else goodput(books, len(met)),
        "slo_attainment": None if met is None else ratio(len(met), len(group)),
        "preemptions": sum(life.preemptions for life in group),
        **{
            name: sum(columns[name].to_pylist()) if name in columns else None
            for name in ("retries", "fetched_tokens")
        },
        "recomputed_tokens": sum(life.recomputed for life in group),
        "swapped_blocks": sum(life.swapped for life in group),
        "cached_tokens": cached,
        "gpu_hit_tokens": sum(life.found for life in group),
        "host_hit_tokens": 0,
        "storage_hit_tokens": 0,
        "prefill_tokens": sum(life.prefilled for life in group),
        "hit_rate": ratio(cached, sum(life.prompt for life in asked)),
        "service": sum(life.service for life in group),
        "qoe": fmean(qoe(books, life) for life in done) if done else nan,
    }
    return account | of_sessions(books, group)


def within(books: Books, done: Group) -> list[Life] | None:
    """The requests that met the objective; None where there is none."""
    slo = books.recording.parts.slo
    if slo is None:
        return None
    met = []
    for life in done:
        own = slo.clients.get(life.client, slo)
        bounds = [(life.ttft, own.ttft), (life.e2e, own.e2e)]
        bounds += [(life.tpot, own.tpot)] if len(life.tokens) > 1 else []
        if all(bound is None or value <= bound for value, bound in bounds):
            met.append(life)
    return met


def goodput(books: Books, met: int) -> float:
    """Over the arrivals, between n of which lie n - 1 intervals; if they are open, and a time."""
    times = [life.arrival for life in books.lives]
    window = max(times) - min(times)
    if books.recording.parts.workload.mode == "open" and window:
        return met / len(times) * (len(times) - 1) / window
    return ratio(met, books.makespan)


def qoe(books: Books, life: Life) -> float:
    """The share of a reader's time that was no delay, token by token."""
    reader = books.recording.parts.reader
    pace, read, late, whole = 1 / reader.tokens_per_s, -inf, 0.0, 0.0
    for number, time in enumerate(life.tokens):
        best = life.arrival + reader.ttft + number * pace
        read = max(time, best, read + pace)
        late += read - best
        whole += read - life.arrival
    return 1 - late / whole if whole else 1.0


def of_sessions(books: Books, group: Group) -> dict[str, Any]:
    """Of the sessions all of whose requests finished."""
    members = defaultdict(list)
    for life in group:
        if life.session:  # neither none nor one that was cut off
            members[life.session].append(life)
    done = [some for some in members.values() if all(life.state == "finished" for life in some)]
    lasted = [max(o.tokens[-1] for o in some) - min(o.arrival for o in some) for some in done]
    served = [union((life.arrival, life.tokens[-1]) for life in some) for some in done]
    tokens = [sum(life.generated for life in some) for some in done]
    account = {
        "sessions_finished": len(done),
        "session_time": lasted,
        "session_served_time": [sum(end - begin for begin, end in some) for some in served],
        "session_time_per_token": [
            time / count for time, count in zip(lasted, tokens, strict=True)
        ],
        "sessions_per_s": ratio(len(done), books.makespan),
    }
    known = any(life.session is not None for life in books.lives)
    return account if known else dict.fromkeys(account)


def of_run(books: Books) -> dict[str, Any]:
    """Metrics of the whole run; None where one is not defined."""
    done = [life for life in books.lives if life.state == "finished"]
    answered, joules, euros = sum(life.generated for life in done), energy(books), cost(books)
    memories = [server.scheduler.memory for server in books.servers]
    slots = sum(memory.total * memory.block_size for memory in memories)
    used = over_time(books, lambda step: step.plan.used_blocks * step.block_size)
    shared = over_time(books, lambda step: step.plan.shared_blocks * step.block_size)
    mean_batch = ratio(over_time(books, batch), books.busy)
    below, loads = tiers(books), [load(books, i) for i in range(len(books.servers))]
    up, down = (books.there(lambda span: 1.0, up=there) for there in (True, False))
    return {
        "written_blocks": below and below["host"]["written_blocks"],
        "swapped_peak": swapped_peak(books),
        "working_set_peak": working_set(books),
        "service_gap": service_gap(books),
        "service_jain": service_jain(books),
        "makespan": books.makespan,
        "in_system_mean": ratio(sum(life.e2e for life in done), books.makespan),
        "kv_utilisation_mean": ratio(used, slots * books.makespan),
        "kv_shared_mean": ratio(shared, used + shared),
        "kv_waste_mean": waste(books),
        "batch_size_mean": mean_batch,
        "batch_fill_mean": mean_batch / fmean(one.scheduler.max_seqs for one in books.servers),
        "mfu": ratio(sum(work(books, step).flop for step in books.steps), peak(books, "flop_rate")),
        "mbu": ratio(
            sum(work(books, step).bytes for step in books.steps), peak(books, "bandwidth")
        ),
        "energy_j": joules,
        "mean_watts": None if joules is None else ratio(joules, books.makespan),
        "tokens_per_joule": None if joules is None else ratio(answered, joules),
        "availability": None if books.spans is None else ratio(up, up + down),
        "cost_eur": euros,
        "tokens_per_euro": None if euros is None else ratio(answered, euros),
        "euro_per_million_tokens": None if euros is None else ratio(1e6 * euros, answered),
        "load_imbalance": max((x for x in loads if x == x), default=nan) if books.several else None,
        "imbalance_over_time": imbalance_over_time(books) if books.several else None,
    }


def over_time(books: Books, value: Callable[[Step], float]) -> float:
    return sum(value(step) * (step.end - step.start) for step in books.steps)


def peak(books: Books, what: str) -> float:
    """What the hardware could have done in the time of the steps."""
    gpus = [server.replica.hardware for server in books.servers]
    return over_time(books, lambda step: getattr(gpus[step.replica], what))


def work(books: Books, step: Step) -> Any:
    return step_work(books.servers[step.replica].replica, step.plan)


def waste(books: Books) -> float:
    moving = {"came_from", "fetched_tokens"} & books.recording.run.request_columns([]).keys()
    if moving or any(life.cached or life.width > 1 for life in books.lives):
        return nan
    waste = known = 0.0
    for step in books.steps:
        plan, seconds = step.plan, step.end - step.start
        if plan.decode_count and len(step.decodes) == plan.running:
            known += seconds
            waste += seconds * (1 - plan.decode_context / (plan.used_blocks * step.block_size))
    return ratio(waste, known)


def energy(books: Books) -> float | None:
    total, idle = 0.0, []
    for server in books.servers:
        if server.power is None or server.replica.hardware.tdp_w is None:
            return None
        idle.append(server.power.idle * server.replica.hardware.tdp_w * server.replica.gpus)
    for step in books.steps:
        seconds, server = step.end - step.start, books.servers[step.replica]
        total -= idle[step.replica] * seconds
        done, power, gpu = work(books, step), server.power, server.replica.hardware
        share = power.busy + power.compute * done.flop / (seconds * gpu.flop_rate or inf)
        share += power.bandwidth * done.bytes / (seconds * gpu.bandwidth or inf)
        share = min(share, 1.0) if done.flop else power.idle
        total += share * seconds * gpu.tdp_w * server.replica.gpus
    if books.spans is None:
        return total + sum(idle) * books.makespan
    return total + books.there(lambda span: span.idle_watts)


def cost(books: Books) -> float | None:
    prices = [server.replica.euros_per_hour for server in books.servers]
    if None in prices:
        return None
    if books.spans is None:
        return sum(prices) * books.makespan / 3600
    return books.there(lambda span: span.euros_per_hour) / 3600


def working_set(books: Books) -> float | None:
    workload = books.recording.parts.workload
    if workload.turns is None:
        return None
    spans = [
        (one.scheduled, one.left or inf, touched(workload, int(one.id), len(one.tokens)))
        for one in books.lives
        if one.scheduled is not None
    ]
    there = [[what for b, e, what in spans if b <= now < e + WINDOW] for now, _, _ in spans]
    return max((len(set[object]().union(*some)) for some in there), default=0)


def swapped_peak(books: Books) -> float | None:
    pools = [i for i, one in enumerate(books.servers) if one.scheduler.memory.cpu_peak is not None]
    peaks = [[s.on_cpu for s in books.steps if s.replica == replica] for replica in pools]
    return max((max(some, default=0) for some in peaks), default=None)


# -- the whole summary -----------------------------------------------------------------------------


def summary_of(books: Books) -> dict[str, Any]:
    """What `summary.json` must say; notices, which are words, and what went over links left out."""
    summary = _of_group(books, books.lives)
    summary |= {name: value for name, value in of_run(books).items() if value is not None}
    clients = sorted({life.client for life in books.lives})
    summary["clients"] = {
        one: _of_group(books, [life for life in books.lives if life.client == one])
        for one in clients
    }
    levels = sorted({life.priority for life in books.lives})
    if len(levels) > 1:
        summary["classes"] = {
            f"{level:g}": _of_group(books, [one for one in books.lives if one.priority == level])
            for level in levels
        }
    if (use := tiers(books)) is not None:
        summary["tiers"] = use
    if books.several:
        summary["replicas"] = replicas(books)
    sizes = [(one.scheduler.memory, one.scheduler.max_seqs) for one in books.servers]
    widths = {memory.block_size for memory, _ in sizes}
    return summary | {
        "total_blocks": sum(memory.total for memory, _ in sizes),
        "block_size": widths.pop() if len(widths) == 1 else nan,
        "max_seqs": fmean(seats for _, seats in sizes),
    }


def _of_group(books: Books, group: Group) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in of_requests(books, group).items():
        if METRICS[name].latency and value is not None:
            entries |= {f"{name}_{which}": one for which, one in statistics(value).items()}
        elif value is not None:
            entries[name] = value
    return entries


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Where two summaries differ by more than rounding, a line each."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = dict.fromkeys((*ours, *theirs))
        return [
            line
            for name in names
            for line in differences(ours.get(name), theirs.get(name), f"{where}.{name}".strip("."))
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [line for i, pair in pairs for line in differences(*pair, f"{where}[{i}]")]
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        near = abs(ours - theirs) <= 1e-9 * max(abs(ours), abs(theirs)) + 1e-12
        same = near or (ours != ours and theirs != theirs)
    else:
        same = ours == theirs
    return [] if same else [f"{where}: {theirs} is printed, and it is {ours}"]

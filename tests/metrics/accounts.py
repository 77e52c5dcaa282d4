"""Parts of the second accountant: service over time, memory below the GPU, replicas, and rows of
tables; each in plain loops over what `ledger.py` recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import inf, nan, sqrt
from statistics import fmean
from typing import Any

import numpy as np

from pagedsim.core.transfers import Direction
from tests.metrics.ledger import Life, Recording, Step

Number = float | None
Group = Sequence[Life]
Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class Books:
    """A recorded run, with what its metrics are measured by."""

    recording: Recording

    @property
    def lives(self) -> list[Life]:
        return self.recording.lives

    @property
    def steps(self) -> list[Step]:
        return self.recording.ledger.seen

    @cached_property
    def servers(self) -> list[Any]:
        """The simulations of the replicas."""
        run = self.recording.run
        return [place.simulation for place in getattr(run, "places", ())] or [run]

    @cached_property
    def roles(self) -> list[str]:
        return [place.role for place in getattr(self.recording.run, "places", ())] or ["both"]

    @property
    def several(self) -> bool:
        return len(self.servers) > 1

    @cached_property
    def begin(self) -> float:
        return min((life.arrival for life in self.lives), default=nan)

    @cached_property
    def end(self) -> float:
        """The last finish; of a run that was stopped, the end of its last step."""
        if any(life.state == "unfinished" for life in self.lives):
            return max((step.end for step in self.steps), default=nan)
        return max((one.tokens[-1] for one in self.lives if one.state == "finished"), default=nan)

    @cached_property
    def spans(self) -> Any:
        """When replicas were up, or dead; None where all were up all the time."""
        return self.recording.run.sizes().get("spans")

    @property
    def makespan(self) -> float:
        return self.end - self.begin

    @cached_property
    def busy(self) -> float:
        return sum(step.end - step.start for step in self.steps)

    def there(self, value: Callable[[Any], Number], up: bool = True) -> float:
        """The sum over replicas and seconds of the makespan in which they were up, or dead."""
        if self.spans is None:
            return sum(value(server) or 0.0 for server in self.servers) * self.makespan * up
        total = 0.0
        for span in self.spans:
            seconds = min(span.end, self.end) - max(span.begin, self.begin)
            total += max(seconds, 0.0) * (value(span) or 0.0) * (span.there is up)
        return total


def ratio(some: float, of: float) -> float:
    return some / of if of else nan


def statistics(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p99"), nan)
    percentiles = {f"p{percent}": float(np.percentile(values, percent)) for percent in (50, 90, 99)}
    return {"mean": fmean(values), **percentiles}


# -- service over time -----------------------------------------------------------------------------


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


class Service:
    """What one client got up to any time, and when it waited."""

    def __init__(self, books: Books, client: str) -> None:
        group = [life for life in books.lives if life.client == client]
        over = max([step.end for step in books.steps], default=0.0)
        self.jumps: list[tuple[float, float]] = []
        waits = []
        for life in group:
            for number, time in enumerate(life.tokens):
                self.jumps.append((time, 2.0 * life.width + (life.prompt if not number else 0)))
            left = over if life.left is None else life.left
            waits.append((life.arrival, left if life.scheduled is None else life.scheduled))
        self.waits = union(waits)
        self.times = np.array(sorted(time for time, _ in self.jumps))
        self.sums = np.cumsum([0.0, *(amount for _, amount in sorted(self.jumps))])

    def at(self, time: float, before: bool = False) -> float:
        return float(self.sums[np.searchsorted(self.times, time, "left" if before else "right")])


def services(books: Books) -> list[Service] | None:
    clients = sorted({life.client for life in books.lives})
    return [Service(books, client) for client in clients] if len(clients) > 1 else None


def service_gap(books: Books) -> Number:
    widest: list[float] = []
    for one, other in combinations(services(books) or (), 2):
        for begin, end in overlaps(one.waits, other.waits):
            inside = [t for t in (*one.times, *other.times) if begin < t <= end]
            looks = [(begin, False), *((t, before) for t in inside for before in (True, False))]
            gaps = [one.at(*look) - other.at(*look) for look in (*looks, (end, False))]
            widest.append(max(gaps) - min(gaps))
    return max(widest, default=None)


def overlaps(one: Intervals, other: Intervals) -> Intervals:
    pairs = [(max(a, c), min(b, d)) for a, b in one for c, d in other]
    return [(begin, end) for begin, end in pairs if begin < end]


def service_jain(books: Books) -> Number:
    rates = []
    for one in services(books) or ():
        if seconds := sum(end - begin for begin, end in one.waits):
            gain = sum(one.at(end) - one.at(begin) for begin, end in one.waits)
            rates.append(gain / seconds)
    if len(rates) < 2 or not any(rates):
        return None
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))


# -- steps and memory ------------------------------------------------------------------------------


def batch(step: Step) -> int:
    prefilled = {chunk.request for chunk in step.plan.chunks}
    return sum(request.num_seqs for request in step.decodes) + len(prefilled)


def tiers_of(books: Books, steps: Iterable[Step]) -> dict[str, dict[str, int]]:
    """Blocks and tokens loaded from each tier, and blocks written to it, swaps left out."""
    offloading = [one.scheduler for one in books.servers if one.scheduler.offloads]
    names = {name: None for one in offloading for name in ("host", *one.memory.lower_tiers)}
    what = ("loaded_blocks", "loaded_tokens", "written_blocks")
    use = {name: dict.fromkeys(what, 0) for name in names}
    for step in steps:
        moves = [
            ("host", one.direction is Direction.LOAD, len(one.blocks))
            for one in step.plan.transfers
        ]
        below = books.servers[step.replica].scheduler.memory.lower_tiers
        moves += [(below[tier - 1], loads, blocks) for tier, loads, blocks in step.plan.lower_moves]
        for name, loads, blocks in moves:
            use[name]["loaded_blocks" if loads else "written_blocks"] += blocks
            use[name]["loaded_tokens"] += blocks * step.block_size * loads
    return use


def tiers(books: Books) -> dict[str, dict[str, int]] | None:
    use = tiers_of(books, books.steps)
    for one in use.values():
        del one["loaded_blocks"]
    return use or None


# -- replicas --------------------------------------------------------------------------------------


def of_role(books: Books, replica: int) -> list[int]:
    return [i for i, role in enumerate(books.roles) if role == books.roles[replica]]


def computed(books: Books, replica: int) -> int:
    """Tokens of prompts and answers that its steps computed."""
    mine = [step for step in books.steps if step.replica == replica]
    chunks = sum(chunk.length for step in mine for chunk in step.plan.chunks)
    return chunks + sum(request.num_seqs for step in mine for request in step.decodes)


def load(books: Books, replica: int) -> float:
    mean = fmean(computed(books, other) for other in of_role(books, replica))
    return ratio(computed(books, replica), mean)


def present(step: Step) -> int:
    return step.plan.waiting + step.plan.running + step.plan.swapped


def imbalance_over_time(books: Books) -> float:
    off = there = 0.0
    for role in sorted(set(books.roles)):
        mine = [i for i, one in enumerate(books.roles) if one == role]
        changes = []
        for step in books.steps:
            if step.replica in mine:
                changes.append((step.start, step.replica, present(step)))
                changes.append((step.end, step.replica, -present(step)))
        changes.sort(key=lambda change: change[0])
        now = dict.fromkeys(mine, 0)
        for (time, replica, change), (until, *_) in pairwise([*changes, (inf, -1, 0)]):
            now[replica] += change
            total, squares = sum(now.values()), sum(count * count for count in now.values())
            if total:
                mean = total / len(mine)
                spread = sqrt(max(squares / len(mine) - mean * mean, 0.0))
                off += (until - time) * total * spread / mean
                there += (until - time) * total
    return ratio(off, there)


def replicas(books: Books) -> list[dict[str, Any]]:
    """A row each; a prompt, what was cached of it and its first token are those of the replica that
    computed it, everything else of the one that the request left."""
    return [_replica(books, replica) for replica in range(len(books.servers))]


def _replica(books: Books, replica: int) -> dict[str, Any]:
    steps = [step for step in books.steps if step.replica == replica]
    left = [life for life in books.lives if life.replica == replica]
    came = [life for life in books.lives if life.source == replica]
    busy = sum(step.end - step.start for step in steps)
    place = books.recording.run.places[replica]  # type: ignore[union-attr]
    memory, gpu = place.simulation.scheduler.memory, place.simulation.replica
    group = f"{gpu.tensor_parallel} × " if gpu.tensor_parallel > 1 else ""

    def seconds(value: Callable[[Step], float]) -> float:
        return sum(value(step) * (step.end - step.start) for step in steps)

    prompts, cached = sum(one.prompt for one in came), sum(one.cached for one in came)
    row = {
        "name": place.name,
        "pool": place.pool,
        "role": place.role,
        "hardware": f"{group}{gpu.hardware.name}",
        "total_blocks": memory.total,
        "requests": len({life.id for life in (*left, *came)}),
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "hit_rate": ratio(cached, prompts),
        "output_tokens": sum(life.generated for life in left),
        "computed_tokens": computed(books, replica),
        "load": load(books, replica),
        "preemptions": sum(life.preemptions for life in left),
        "busy": busy / books.makespan,
        "kv_utilisation_mean": seconds(lambda s: s.plan.used_blocks)
        / (books.makespan * memory.total),
        "batch_size_mean": ratio(seconds(batch), busy),
        "in_system_mean": seconds(present) / books.makespan,
    }
    for name, values in (
        ("ttft", [life.ttft for life in came if life.state == "finished"]),
        ("tpot", [life.tpot for life in left if life.state == "finished" and len(life.tokens) > 1]),
        ("e2e", [life.e2e for life in left if life.state == "finished"]),
    ):
        of = statistics(values)
        row |= {f"{name}_{which}": of[which] for which in ("mean", "p99")}
    return row


# -- rows of tables --------------------------------------------------------------------------------


def request_rows(books: Books) -> list[dict[str, Any]]:
    """`requests.parquet`, without the reasons, which are words."""
    return [_request_row(books, life) for life in books.lives]


def _request_row(books: Books, life: Life) -> dict[str, Any]:
    ended = nan if life.left is None else life.left
    return {
        "request": life.id,
        "client": life.client,
        "priority": life.priority,
        "arrival": life.arrival,
        "scheduled": nan if life.scheduled is None else life.scheduled,
        "first_token": life.tokens[0] if life.tokens else nan,
        "finished": life.tokens[-1] if life.state == "finished" else ended,
        "prompt_tokens": life.prompt,
        "output_tokens": len(life.tokens),
        "sequences": life.width,
        "preemptions": life.preemptions,
        "recomputed_tokens": life.recomputed,
        "swapped_blocks": life.swapped,
        "cached_tokens": life.cached,
        "gpu_hit_tokens": life.found,
        "host_hit_tokens": 0,
        "storage_hit_tokens": 0,
        "prefill_tokens": life.prefilled,
        "service": life.service,
        "state": life.state,
    }


def step_rows(books: Books) -> list[dict[str, Any]]:
    """`steps.parquet`, replica by replica."""
    ordered = sorted(books.steps, key=lambda step: (step.replica, step.plan.number))
    return [_step_row(books, step) for step in ordered]


def _step_row(books: Books, step: Step) -> dict[str, Any]:
    plan, chunks = step.plan, step.plan.chunks
    row: dict[str, Any] = {"replica": step.replica} if books.several else {}
    for name, use in tiers_of(books, [step]).items():
        row |= {f"loaded_{name}": use["loaded_blocks"], f"written_{name}": use["written_blocks"]}
    return row | {
        "start": step.start,
        "end": step.end,
        "step": plan.number,
        "prefill_tokens": sum(chunk.length for chunk in chunks),
        "prefill_context": sum(chunk.start + chunk.length for chunk in chunks),
        "prefill_attention": sum(c.length * (c.start + c.length) for c in chunks),
        "prefill_pairs": sum(c.start + i + 1 for c in chunks for i in range(c.length)),
        "prefill_requests": len({chunk.request for chunk in chunks}),
        "sampled_prefills": sum(chunk.samples for chunk in chunks),
        "decode_seqs": sum(request.num_seqs for request in step.decodes),
        "decode_context": step.context,
        "waiting": plan.waiting,
        "running": plan.running,
        "swapped": plan.swapped,
        "used_blocks": plan.used_blocks,
        "shared_blocks": plan.shared_blocks,
        "preempted": sum(not cause.displaced for cause in plan.preemptions),
        "displaced": sum(cause.displaced for cause in plan.preemptions),
        "swap_out": len(plan.swap_out),
        "swap_in": len(plan.swap_in),
        "rejected": len(plan.rejected),
    }

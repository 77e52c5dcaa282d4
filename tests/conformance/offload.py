"""What vLLM's recordings with KV offloading have beyond the others: copies and aborts.

The copy engine here is that of the recordings: its times are in steps.
"""

from dataclasses import dataclass, field
from typing import Any

from pagedsim.core import Scheduler, StepPlan
from pagedsim.core.offload import ARC, OffloadConnector
from pagedsim.core.transfers import Direction, Transfer
from tests.conformance.lower_tier import ConstantTier


def make_connector(config: dict[str, Any]) -> OffloadConnector:
    offload = config["offload"]
    return OffloadConnector(
        offload["cpu_chunks"],
        blocks_per_chunk=offload["blocks_per_chunk"],
        eviction=offload["policy"],
        store_threshold=offload["store_threshold"],
        tracked_chunks=offload["max_tracker"],
        prompt_only=offload["prompt_only"],
        sync_tokens=offload["sync_tokens"],
        tiers=[_tier(tier) for tier in offload["tiers"]],
    )


def _tier(tier: dict[str, Any]) -> ConstantTier:
    if tier["kind"] == "example":
        return ConstantTier(at_once=True)
    return ConstantTier(tier["store_steps"], tier["load_steps"], tier["lookup_steps"])


@dataclass
class Lane:
    """One direction of the copy engine: jobs end in order."""

    latency: int = 0
    rate: int = 0
    busy: int = 0  # blocks, counted from step 0 on at `rate` a step
    jobs: list[list[int]] = field(default_factory=list)  # job, step in which it is reported

    def submit(self, job: int, blocks: int, now: int) -> None:
        end = now
        if self.rate:
            self.busy = max(self.busy, now * self.rate) + blocks
            end = -(-self.busy // self.rate)
        self.jobs.append([job, end + self.latency])

    def flush(self, flushed: set[int], now: int) -> None:
        places = [place for place, (job, _) in enumerate(self.jobs) if job in flushed]
        if not places:
            return
        for entry in self.jobs[: places[-1] + 1]:
            entry[1] = min(entry[1], now)
        if places[-1] == len(self.jobs) - 1:
            self.busy = now * self.rate

    def ended(self, now: int) -> list[int]:
        ended = []
        while self.jobs and self.jobs[0][1] <= now:
            ended.append(self.jobs.pop(0)[0])
        return ended


class Host:
    """The host side of one workload: carries transfers out, aborts requests, and records."""

    def __init__(
        self, config: dict[str, Any], requests: list[dict[str, Any]], scheduler: Scheduler
    ) -> None:
        assert scheduler.queues.connector is not None
        self.scheduler = scheduler
        self.connector = scheduler.queues.connector
        self.offload = config["offload"]
        self.store, self.load = Lane(**self.offload["store"]), Lane(**self.offload["load"])
        self.at_once = Lane()
        self.aborts = [
            (entry["abort_step"], entry["id"])
            for entry in requests
            if entry.get("abort_step") is not None
        ]
        self.aborting = bool(self.aborts)
        self.aborted: list[int | str] = []
        self.loaded: dict[int, int | str] = {}  # requests by the job that they wait for
        self.numbers: dict[Any, int] = {}  # of chunks, by key
        self.unsubmitted: list[Transfer] = []

    def abort(self, now: int) -> None:
        """Abort what is to be aborted in this step, if it is still alive."""
        due = [id for step, id in self.aborts if step == now]
        self.aborted = [id for id in self.scheduler.requests if id in due]
        for id in self.aborted:
            self.scheduler.abort(id, now)

    def carry(self, plan: StepPlan, now: int) -> list[int]:
        """Carry a plan's transfers out; returns the jobs to report at its end."""
        flushed = set(plan.flushed)
        stores = [one for one in plan.transfers if one.direction is Direction.STORE]
        self.unsubmitted += sorted(
            (one for one in stores if one.job in flushed), key=lambda one: one.job
        )
        for one in self.unsubmitted:
            self.store.submit(one.job, len(one.blocks), now)
        for lane in (self.store, self.load):
            lane.flush(flushed, now)
        for one in plan.transfers:
            if one.direction is Direction.LOAD:
                waited_for = one.job in flushed
                (self.at_once if waited_for else self.load).submit(one.job, len(one.blocks), now)
                if not waited_for:
                    assert one.request is not None
                    self.loaded[one.job] = one.request.id
        self.unsubmitted = [one for one in stores if one.job not in flushed]
        return [*self.store.ended(now), *self.load.ended(now), *self.at_once.ended(now)]

    def decided(self, plan: StepPlan) -> dict[str, Any]:
        """The fields of a step that its planning decides."""
        connector, step, tier = self.connector, self.connector.step, self.connector.host
        for key in step.inserted:
            self.numbers.setdefault(key, len(self.numbers))
        begun = {one.job for one in plan.transfers if one.direction is Direction.LOAD}
        fields: dict[str, Any] = {
            "holding": [request.id for request in self.scheduler.holding],
            "loading": sorted(request.id for request in connector.loads.loaders),
            "lookups": [
                [one.request, one.hit, one.tokens, *([one.why] if one.why else [])]
                for one in step.lookups
            ],
            "deferred": [one.request for one in step.lookups if one.tokens < 0],
            "hits": [
                [one.request, one.gpu, *self._sources(one.host, one.lower)] for one in step.found
            ],
            "loads": self._jobs(plan, Direction.LOAD),
            "stores": self._jobs(plan, Direction.STORE),
            "flush": [job for job in plan.flushed if job not in begun],
            "evicted": self._named(step.evicted),
            "refused": step.refused,
            "cpu": [len(tier.chunks), tier.writing, tier.reading],
        }
        if self.offload["store_threshold"] >= 2:
            fields["skipped"] = step.held_back
        if isinstance(order := tier.order, ARC):
            lists = (len(order.once), len(order.again))
            ghosts = (len(order.once_ghosts), len(order.again_ghosts))
            fields["arc"] = [*lists, *ghosts, round(order.target, 6)]
        if tiers := connector.lower.tiers:
            fields["promotions"] = [
                [one.request, self._named(one.keys), one.tier, one.job] for one in step.promotions
            ]
            fields["tier_done"] = step.collected
            fields["tier_chunks"] = [len(one) for one in tiers if isinstance(one, ConstantTier)]
        if self.aborting:
            fields["lingering"] = sorted(connector.lingering)
        return fields

    def completed(self, jobs: list[int] | None, now: int) -> dict[str, Any]:
        """Report jobs, after their step has ended, and record them; None: no step has ended."""
        if jobs is None:
            return {"completed": [], "received": []}
        step = self.connector.step
        self.scheduler.transferred(jobs, now)
        received = sorted(self.loaded.pop(job) for job in jobs if job in self.loaded)
        fields: dict[str, Any] = {"completed": jobs, "received": received}
        if self.connector.lower.tiers:
            fields["cascades"] = [
                [one.request, len(one.keys), one.tier, one.job] for one in step.cascades
            ]
            step.cascades = []
        return fields

    def _jobs(self, plan: StepPlan, direction: Direction) -> list[list[Any]]:
        rows = []
        for one in plan.transfers:
            if one.direction is not direction:
                continue
            job = self.connector.jobs[one.job]
            per = self.connector.blocks_per_chunk
            host = [chunk.place * per + block for chunk in job.chunks for block in range(per)]
            assert host[-len(one.places) :] == list(one.places) and len(one.blocks) == len(
                one.places
            )
            keys = sorted(self.numbers[chunk.key] for chunk in job.chunks)
            waited_for = [1] if job.waited_for else []
            rows.append(
                [job.account.request.id, len(one.blocks), len(keys), one.job, keys, *waited_for]
            )
        return rows

    def _sources(self, host: int, lower: Any) -> tuple[int, int]:
        """Tokens from the CPU and from disks; `example` reports its own as the CPU's."""
        kinds = [tier["kind"] for tier in self.offload["tiers"]]
        disk = sum(n for kind, n in zip(kinds, lower, strict=True) if kind != "example")
        return host + sum(lower) - disk, disk

    def _named(self, keys: Any) -> list[int]:
        return [self.numbers[key] for key in keys]

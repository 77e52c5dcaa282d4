"""Plays the executor of a host tier for recorded workloads: copies that end some iterations later.

It also spies on the memory, for what the recordings have of its decisions."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from itertools import takewhile
from typing import Any

from pagedsim.core import Request, Scheduler, StepPlan
from pagedsim.core.transfers import Direction, Transfer
from pagedsim.sglang.hicache import HiCache
from pagedsim.sglang.radix import Node
from pagedsim.sglang.storage import Backup, Prefetch, StoredHiCache
from tests.conformance.driver import Step


class SpiedHiCache(HiCache):
    """Remembers the decisions of a step."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.hits: dict[Any, tuple[int, int]] = {}
        self.seen: Step = {}
        self.renew()

    def renew(self) -> None:
        self.seen = {"declined": [], "host_evicted": [], "evicted": 0, "dropped": 0}
        self.hits.clear()

    def load(self, request: Request) -> Sequence[int]:
        hit = self.loadable(request)
        pages = super().load(request)
        loaded = len(pages) * self.block_size
        self.hits[request.id] = (hit, loaded)
        if not loaded:
            self.seen["declined"].append([request.id, hit])
        return pages

    def evict_host(self, blocks: int) -> int:
        freed = super().evict_host(blocks)
        size = self.block_size
        self.seen["host_evicted"].append([blocks * size, freed * size])
        return freed

    def _evict(self, node: Node) -> bool:
        pages = len(node.pages)
        gone = super()._evict(node)
        self.seen["evicted"] += pages * self.block_size * gone
        return gone

    def dropped(self, node: Node) -> None:
        if self.write_policy != "write_through_selective":
            self.seen["dropped"] += len(node.keys) * self.block_size


class SpiedStorage(SpiedHiCache, StoredHiCache):
    """The same of its prefetches."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.brought: dict[Any, int] = {}

    def renew(self) -> None:
        super().renew()
        self.seen |= {"found": [], "fetched": [], "revoked": []}

    def take_blocks(self, look_up: Prefetch, pages: int) -> list[int]:
        blocks = super().take_blocks(look_up, pages)
        size = self.block_size
        self.seen["found"].append([look_up.request.id, pages * size, len(blocks) * size])
        return blocks

    def finish(self, fetch: Prefetch) -> int:
        new = super().finish(fetch) * self.block_size
        name = fetch.request.id
        self.seen["fetched"].append([name, fetch.arrived * self.block_size, new])
        if new:
            self.brought[name] = new
        return new

    def revoke(self, request: Request) -> None:
        super().revoke(request)
        self.seen["revoked"].append(request.id)


class Stream:
    """Copies in one direction, which end in their order."""

    def __init__(self, iterations: Sequence[int]) -> None:
        self._iterations = iterations
        self._copies = 0
        self._last = 0
        self.under_way: deque[tuple[int, list[Transfer]]] = deque()  # by the iteration of their end

    def begin(self, copy: list[Transfer], now: int) -> None:
        takes = self._iterations[self._copies % len(self._iterations)]
        self._copies += 1
        self._last = max(self._last, now + takes)
        self.under_way.append((max(self._last, now + 1), copy))

    def ended(self, now: int) -> list[Transfer]:
        done: list[Transfer] = []
        while self.under_way and self.under_way[0][0] <= now:
            done += self.under_way.popleft()[1]
        return done


class Workers:
    """Looks up, reads and writes a storage for a memory, each one after another."""

    def __init__(self, config: dict[str, Any], memory: SpiedStorage) -> None:
        self.config, self.memory = config, memory
        self.content: set[Hashable] = set()
        self._look_ups: deque[tuple[int, Prefetch]] = deque()  # by the iteration of their end
        self._fetches: deque[tuple[int, Prefetch]] = deque()  # by the first one to begin in
        self._backups: deque[tuple[int, Backup]] = deque()  # by the iteration of their end
        self._reading: tuple[int, int] | None = None  # end of a batch of the first fetch, its pages
        self._last_look_up = self._last_backup = 0

    def take(self, now: int, arrived: bool) -> Step:
        """Take new jobs, of requests that have `arrived` or of the scheduler."""
        look_ups, fetches, backups = self.memory.take_jobs()
        for look_up in look_ups:
            end = max(self._last_look_up, now) + self.config["query_iters"]
            self._last_look_up = end if arrived else max(end, now + 1)
            self._look_ups.append((self._last_look_up, look_up))
        self._fetches += ((now + 1, fetch) for fetch in fetches)
        for backup in backups:
            end = max(self._last_backup, now) + self.config["backup_iters"]
            self._last_backup = max(end, now + 1)
            self._backups.append((self._last_backup, backup))
        size = self.memory.block_size
        return {
            "sent": [[one.request.id, len(one.keys) * size] for one in look_ups],
            "stores": [len(one.keys) * size for one in backups],
        }

    def catch_up(self, now: int) -> Step:
        """Report what has ended by now."""
        stored = []
        while self._backups and self._backups[0][0] <= now:
            backup = self._backups.popleft()[1]
            self.content.update(backup.keys)
            self.memory.backed_up(backup)
            stored.append(len(backup.keys) * self.memory.block_size)
        while self._look_ups and self._look_ups[0][0] <= now:
            look_up = self._look_ups.popleft()[1]
            self.memory.found(look_up, 0 if look_up.cut else self._known(look_up))
        while self._fetches and self._read(now):
            pass
        return {"stored": stored}

    def _known(self, look_up: Prefetch) -> int:
        if look_up.assumed:
            return len(look_up.keys)
        return len([*takewhile(self.content.__contains__, look_up.keys)])

    def _read(self, now: int) -> bool:
        """Go on with the first fetch; returns whether something has ended."""
        first, fetch = self._fetches[0]
        if self._reading is None:
            if first > now:
                return False
            self._ask(fetch, 0, now)
            return True
        end, pages = self._reading
        if end > now:
            return False
        self.memory.arrived(fetch, pages, False)
        self._ask(fetch, pages, now)
        return True

    def _ask(self, fetch: Prefetch, done: int, now: int) -> None:
        """Ask for the next batch of pages, if any is wanted."""
        batch = fetch.keys[done : done + self.config["batch_pages"]]
        there = len([*takewhile(self.content.__contains__, batch)])
        if fetch.cut or not there:
            self._fetches.popleft()
            self._reading = None
            self.memory.arrived(fetch, done, True)
        else:
            self._reading = now + self.config["batch_iters"], done + there


class Tiers:
    """The copies of a scheduler with a host tier."""

    def __init__(self, config: dict[str, Any], scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        memory = scheduler.memory
        assert isinstance(memory, SpiedHiCache)
        storage = config["storage"]
        self.workers = Workers(storage, memory) if isinstance(memory, SpiedStorage) else None
        self.memory = memory
        self.stores = Stream(config["write_iters"])
        self.loads = Stream(config["load_iters"])
        self.fields: Step = {}

    @property
    def busy(self) -> bool:
        return self.memory.transferring

    @property
    def acknowledged(self) -> bool:
        """Whether the iteration began with the end of a copy."""
        ends = ("written", "loaded", "stored", "fetched", "revoked")
        return any(self.fields.get(field) or self.memory.seen.get(field) for field in ends)

    def poll(self, now: int) -> None:
        """What an iteration begins with."""
        self.fields = {"writes": [], "written": [], "loads": [], "loaded": []}
        if self.workers:
            self.fields |= self.workers.take(now, True)
            self.fields |= self.workers.catch_up(now)
        self._flush(now)
        for stream, field in ((self.stores, "written"), (self.loads, "loaded")):
            if done := stream.ended(now):
                self.fields[field] += map(self._loaded if field == "loaded" else self._size, done)
                self.scheduler.transferred([one.job for one in done], now)
        if self.workers and not self.scheduler.unfinished:
            self.workers.memory.poll(())

    def planned(self, plan: StepPlan, now: int) -> Step:
        """The copies that a plan begins, and what else it decided."""
        self._begin(plan.transfers, plan.flushed, now)
        admitted = [chunk.request.id for chunk in plan.chunks]
        hits = self.memory.hits
        fields = {
            "host_used": self._used(),
            "host_hit": [[name, *hits[name]] for name in admitted if name in hits],
        }
        if self.workers:
            for field, jobs in self.workers.take(now, False).items():
                self.fields[field] += jobs
            if admitted:
                brought = self.workers.memory.brought
                fields["storage_hit"] = [
                    [name, brought.pop(name)] for name in admitted if name in brought
                ]
        return fields

    def processed(self, now: int) -> Step:
        """The copies that a result begins, and all that the iteration has done."""
        self._flush(now)
        seen = self.memory.seen
        self.memory.renew()
        return {**self.fields, **seen, "host_used_after": self._used()}

    def _flush(self, now: int) -> None:
        self.memory.begin_stores()
        self._begin(*self.memory.take_transfers(), now)

    def _begin(self, transfers: Sequence[Transfer], flushed: Sequence[int], now: int) -> None:
        loads = [one for one in transfers if one.direction is Direction.LOAD]
        stores = [one for one in transfers if one.direction is Direction.STORE]
        if loads:
            self.fields["loads"] += map(self._loaded, loads)
            self.loads.begin(loads, now)
        for one in stores:
            self.fields["writes"].append(self._size(one))
            if one.job in flushed:
                self.fields["written"].append(self._size(one))
                self.scheduler.transferred([one.job], now)
            else:
                self.stores.begin([one], now)

    def _size(self, transfer: Transfer) -> int:
        return len(transfer.blocks) * self.memory.block_size

    def _loaded(self, transfer: Transfer) -> list[Any]:
        assert transfer.request is not None
        return [transfer.request.id, self._size(transfer)]

    def _used(self) -> int:
        memory = self.memory
        return (memory.host_total - memory.host_free) * memory.block_size

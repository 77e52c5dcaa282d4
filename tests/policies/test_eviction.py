"""Orders of eviction in each memory, against the same rules said by plain lists."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, assume, given, settings
from omegaconf import OmegaConf

from pagedsim.backends.sim import Simulated
from pagedsim.build import EVICTIONS, make_eviction, make_memory
from pagedsim.core import (
    CacheEntry,
    EvictionPolicy,
    Fit,
    PagedsimError,
    PrefixMemory,
    Request,
    RequestError,
)
from pagedsim.core.memory.prefix import page_keys
from pagedsim.core.request import Rank
from pagedsim.engine.engine_args import Arguments
from pagedsim.policies.eviction import LFU, SLRU
from pagedsim.sglang import RadixMemory
from pagedsim.spec.run import RunSpec
from tests.fuzz import Simulation, outcome, simulations
from tests.run.studies import compose

# -- the rules, said by lists ----------------------------------------------------------------------


@dataclass
class Record:
    """What is known of a key in a cache."""

    key: Hashable
    created: float
    priority: float
    used: float = 0.0
    """When it was last freed or used."""
    uses: int = 1
    owners: int = 1

    def use(self, request: Request) -> None:
        self.owners, self.uses = self.owners + 1, self.uses + 1
        self.priority = min(self.priority, request.priority)


ORDERS: dict[str, Callable[[Record], Any]] = {
    "lru": lambda r: r.used,
    "mru": lambda r: -r.used,
    "fifo": lambda r: r.created,
    "filo": lambda r: -r.created,
    "lfu": lambda r: (r.uses, r.used),
    "priority": lambda r: (-r.priority, r.used),
    "slru": lambda r: (1 if r.uses >= 2 else 0, r.used),
    "tlru": lambda r: r.used,  # with its defaults every token of a conversation is needed
    "kvflow": lambda r: r.used,  # where no request says steps; else see below
}


class Lists:
    """A pool of keys, in the order in which they were last free: `sorted` keeps it in ties."""

    def __init__(self, name: str, capacity: int) -> None:
        self.order = ORDERS.get(name)
        self.capacity = capacity
        self.records: list[Record] = []
        self.once: list[Hashable] = []  # ARC's ghosts, the oldest first
        self.again: list[Hashable] = []
        self.target = 0.0

    def find(self, key: Hashable) -> Record | None:
        """Of equal ones the first that came."""
        same = [record for record in self.records if record.key == key]
        return min(same, key=lambda record: record.created, default=None)

    def insert(self, record: Record) -> Record:
        self.records.append(record)
        b1, b2 = len(self.once), len(self.again)
        if record.key in self.once:
            self.target = min(self.capacity, self.target + max(1, b2 / b1))
            self.once.remove(record.key)
        elif record.key in self.again:
            self.target = max(0, self.target - max(1, b1 / b2))
            self.again.remove(record.key)
        return record

    def free(self, record: Record, now: float) -> None:
        record.owners -= 1
        if not record.owners:
            record.used = now
            self.records.remove(record)
            self.records.append(record)

    def victim(self, free: Sequence[Record]) -> Record:
        if self.order is not None:
            return sorted(free, key=self.order)[0]
        once = [record for record in free if record.uses == 1]
        again = [record for record in free if record.uses > 1]
        size = sum(record.uses == 1 for record in self.records)
        parts = (once, again) if size >= int(self.target) else (again, once)
        return min(parts[0] or parts[1], key=lambda record: record.used)

    def gone(self, record: Record) -> None:
        self.records.remove(record)
        ghosts = self.once if record.uses == 1 else self.again
        if record.key not in ghosts:
            ghosts.append(record.key)
        del ghosts[: -self.capacity]

    def evict(self) -> Record:
        victim = self.victim([record for record in self.records if not record.owners])
        self.gone(victim)
        return victim


# -- in a prefix cache -----------------------------------------------------------------------------

SIZE = 4


def prompt(random: Random, name: int) -> Request:
    """Some blocks of one of a few texts, with a common beginning, and a token more."""
    text, blocks = random.randrange(3), random.randrange(1, 6)
    tokens = [at if at < SIZE else 100 * text + at for at in range(SIZE * blocks)]
    return Request(name, [*tokens, -1], priority=random.randrange(3))


@pytest.mark.parametrize("name", EVICTIONS)
@pytest.mark.parametrize("seed", range(6))
def test_a_prefix_cache_evicts_in_order(name: str, seed: int) -> None:
    random = Random(seed)
    total = random.randrange(6, 16)
    memory: Any = make_memory("prefix", blocks=total, block_size=SIZE, eviction=name)
    lists = Lists(name, total)
    alive: list[tuple[Request, list[Record]]] = []
    for now in range(200):
        request = prompt(random, now)
        keys = page_keys(request, request.num_tokens // SIZE, SIZE, True)
        hit = memory.lookup(request)
        known = [lists.find(key) for key in keys]
        found = [record for record in known[: [*known, None].index(None)] if record]
        assert len(hit) == len(found)
        if memory.fit(request, request.num_tokens, 0, hit) is Fit.NOW:
            for record in found:
                record.use(request)
            free = total - len(lists.records) - len(alive)  # each has a block for its last token
            for _ in range(len(keys) - len(found) + 1 - free):
                lists.evict()
            new = [Record(key, now, request.priority) for key in keys[len(found) :]]
            alive.append((request, [*found, *map(lists.insert, new)]))
            memory.admit(request, request.num_tokens, hit)
        if alive and random.random() < 0.6:
            request, records = alive.pop(random.randrange(len(alive)))
            memory.release(request)
            for record in reversed(records):
                lists.free(record, now)
        memory.check(request for request, _ in alive)
        copies = memory._index.copies
        cached = [*memory._index, *(key for key in copies for _ in copies[key])]
        assert sorted(map(repr, cached)) == sorted(repr(r.key) for r in lists.records)


# -- in a radix tree -------------------------------------------------------------------------------


class Tree:
    """A radix tree beside records of its pages; it says which nodes are leaves, and when used."""

    def __init__(self, name: str, total: int) -> None:
        kind, tree = EVICTIONS[name], self

        class Watched(kind):  # type: ignore[misc, valid-type]
            def removed(self, entry: CacheEntry, evicted: bool) -> None:
                tree.evicted(entry)
                super().removed(entry, evicted)

        self.memory = RadixMemory(total, eviction=Watched())
        self.memory.with_tokens = True
        self.lists = Lists(name, total)
        self.evictions = 0

    def evicted(self, chosen: CacheEntry) -> None:
        """Compare it with the leaf whose last page goes first by the lists; remove its pages."""
        leaves = []
        for node in self.memory._all_nodes()[1:]:
            for key in node.keys:  # a node's pages were used by the same requests
                page = self.page(key)
                assert (page.uses, page.priority) == (node.uses, node.priority)
                page.used = node.last_use
            if not node.owners and not node.children:
                leaves.append(self.page(node.keys[-1]))
        assert chosen.keys[-1] == self.lists.victim(leaves).key
        for key in reversed(chosen.keys):
            self.lists.gone(self.page(key))
        self.evictions += 1

    def page(self, key: Hashable) -> Record:
        page = self.lists.find(key)
        assert page is not None
        return page

    def admit(self, request: Request) -> None:
        hit = self.memory.lookup(request)
        for key in page_keys(request, len(hit), 1, True)[: len(hit)]:
            self.page(key).use(request)
        self.memory.admit(request, request.num_tokens, hit)

    def filled(self, request: Request, tokens: int, now: float) -> None:
        keys, known = page_keys(request, tokens, 1, True)[:tokens], request._registered
        for key in keys[known:]:
            if page := self.lists.find(key):
                page.use(request)
            else:
                self.lists.insert(Record(key, now, request.priority))
        for key in keys[: request.prompt_len] if request.prompt_len < tokens else ():
            page = self.page(key)
            page.priority = min(page.priority, request.priority - 1)
        self.memory.filled(request, tokens)


@pytest.mark.parametrize("name", EVICTIONS)
@pytest.mark.parametrize("seed", range(6))
def test_a_radix_tree_evicts_leaves_in_order(name: str, seed: int) -> None:
    random = Random(seed)
    tree = Tree(name, random.randrange(25, 45))
    memory, alive = tree.memory, list[Request]()
    for now in range(200):
        request = prompt(random, now)
        if memory.fit(request, request.num_tokens, 3, memory.lookup(request)) is Fit.NOW:
            tree.admit(request)
            alive.append(request)
            if request._registered < (half := request.num_tokens // 2):  # a chunk
                tree.filled(request, half, now)
            tree.filled(request, request.num_tokens, now + 0.5)
        if alive and random.random() < 0.6:
            request = alive.pop(random.randrange(len(alive)))
            if random.random() < 0.5 and memory.free >= 3:  # an answer
                request._outputs = [[random.randrange(2) for _ in range(3)]]
                memory.extend(request, request.prompt_len + 3, {})
                tree.filled(request, request.prompt_len + 3, now + 0.7)
            memory.release(request)
        memory.check(alive)
    assert tree.evictions > 0


# -- in whole servers ------------------------------------------------------------------------------


class Recent(EvictionPolicy):
    """LRU, of which nobody can know that it is."""

    def rank(self, entry: CacheEntry) -> Rank:
        return int(1e6 * entry.last_use)


@given(case=simulations(fleets=False))
@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
def test_the_path_of_lru_is_the_path_of_all(case: Simulation) -> None:
    """Pins, swaps, groups of sequences: bundles and ranks evict alike."""
    (server,) = case.servers
    # SGLang's batching renews the paths of waiting requests under LRU alone.
    assume(server.memory == "prefix")
    with_lru, ranked = (
        replace(case, servers=(replace(server, eviction=eviction),))
        for eviction in ("lru", f"{__name__}.Recent")
    )
    assert outcome(with_lru) == outcome(ranked)


@pytest.mark.parametrize("name", EVICTIONS)
def test_pinned_blocks_go_last(name: str) -> None:
    memory = PrefixMemory(8, SIZE, eviction=make_eviction(name))
    pinned = Request("pinned", [*range(3 * SIZE), -1])
    memory.admit(pinned, pinned.num_tokens, ())
    memory.guard(pinned, until=9.0)
    blocks = set(pinned.tables[0][:3])
    memory.release(pinned)
    for number in range(5):
        request = Request(number, [100 * number + at for at in range(4 * SIZE + 1)])
        memory.admit(request, request.num_tokens, ())
        assert not blocks & set(request.tables[0])
        memory.release(request)
    greedy = Request("greedy", [-at for at in range(8 * SIZE)])
    memory.admit(greedy, greedy.num_tokens, ())
    assert blocks < set(greedy.tables[0])
    memory.check([greedy])
    if name == "arc":  # which is told that they were evicted
        policy: Any = cast(Any, memory)._evictable._queue.policy
        assert {*page_keys(pinned, 3, SIZE, True)} <= {*policy._ghosts[0]}


# -- by the distance of the next step --------------------------------------------------------------


def says(session: str, text: int, turn: int = 1, steps: Any = None) -> Request:
    """A call whose prompt is a block of a text and a token more; steps until the session's next."""
    extra = {} if steps is None else {"steps_to_execution": steps}
    prompt = [*(100 * text + at for at in range(SIZE)), -1]
    return Request(f"{session} {turn} {steps}", prompt, session=session, turn=turn, extra=extra)


def evicted(memory: Any, calls: Sequence[Request]) -> str:
    """The texts of calls that came and went one after another, in the order of eviction."""
    for request in calls:
        memory.admit(request, request.num_tokens, memory.lookup(request))
        memory.filled(request, request.num_tokens)
        memory.release(request)
    order = ""
    for number in range(memory.total):
        memory._take(1) if isinstance(memory, PrefixMemory) else memory.reclaim(number + 1)
        gone = [text for text in "012" if not memory.lookup(says("x", int(text)))]
        order += "".join(sorted(set(gone) - set(order)))
    return order


@pytest.mark.parametrize("kind", ["prefix", "radix"])
@pytest.mark.parametrize(
    ("calls", "order"),
    [
        # The farthest goes first, and before it what nobody says is used again.
        ([("a", 0, 1, 1), ("b", 1, 1, 3), ("c", 2, 1, None)], "210"),
        # Of equal ones the least recently used; what a CSV file has is a text.
        ([("a", 0, 1, 2), ("b", 1, 1, "2.0"), ("c", 2, 1, 0)], "012"),
        # Sessions a and b end; c has said that it uses the text of b again.
        (
            [
                *(("a", 0, 1, 1), ("b", 1, 1, 1), ("c", 1, 1, 5)),
                *(("a", 0, 2, None), ("b", 1, 2, None), ("d", 2, 1, 9)),
            ],
            "021",
        ),
        # Of calls in parallel the soonest counts, and a call of an earlier turn no more.
        (
            [("a", 0, 2, 1), ("a", 0, 2, None), ("a", 0, 1, 9), ("b", 1, 1, 2), ("c", 2, 1, 3)],
            "210",
        ),
    ],
)
def test_what_is_used_again_soonest_is_kept(kind: str, calls: Any, order: str) -> None:
    memory = make_memory(kind, blocks=16, block_size=SIZE, eviction="kvflow")
    assert evicted(memory, [says(*call) for call in calls]) == order


@pytest.mark.parametrize("steps", [-1, "soon", [1], float("nan")])
def test_steps_that_cannot_be(steps: Any) -> None:
    memory: Any = make_memory("prefix", blocks=4, block_size=SIZE, eviction="kvflow")
    with pytest.raises(RequestError, match=r"extra\.steps_to_execution=.*: must be a number of at"):
        evicted(memory, [says("a", 0, steps=steps)])


# -- what a class of one's own may say, and where it is said ---------------------------------------


@pytest.mark.parametrize(
    ("hook", "answer", "message"),
    [
        ("rank", "a", r"Odd\.rank gave 'a': must be a number, or a tuple of numbers"),
        ("rank", float("nan"), r"Odd\.rank gave nan: must be a number"),
        ("segment", -1, r"Odd\.segment gave -1: must be a whole number from 0 to 99"),
        ("choose", "a", r"Odd\.choose gave 'a': must be one of its argument's"),
    ],
)
def test_answers_that_cannot_be(hook: str, answer: object, message: str) -> None:
    kind = type("Odd", (EvictionPolicy,), {hook: lambda self, entry: answer})
    memory = make_memory("radix", blocks=4, eviction=kind())
    with pytest.raises(PagedsimError, match=message):
        for number in range(3):
            request = Request(number, [number, number + 10])
            memory.admit(request, 2, ())
            memory.filled(request, 2)
            memory.release(request)


def simulated(*words: str) -> Any:
    """The memory of a server that a command configures."""
    config: Any = OmegaConf.to_container(
        compose("config", [*words, "memory.blocks=9"]), resolve=True
    )
    return Simulated().simulation(RunSpec(config)).server.make_memory()


@pytest.mark.parametrize("memory", ["prefix", "radix"])
@pytest.mark.parametrize(
    ("eviction", "kind"),
    [
        ("lfu", LFU),
        (f"{__name__}.Recent", Recent),
        ("{_target_: pagedsim.policies.eviction.SLRU, protected_uses: 3}", SLRU),
    ],
)
def test_each_memory_takes_its_order_from_the_configuration(
    memory: str, eviction: str, kind: type[EvictionPolicy]
) -> None:
    made = simulated(f"memory={memory}", f"memory.eviction={eviction}")
    queue = made._leaves if memory == "radix" else made._evictable._queue
    assert isinstance(queue.policy, kind) and queue.policy.capacity == 9


@pytest.mark.parametrize("memory", ["prefix", "radix"])
def test_an_engine_takes_it_with_the_settings_of_its_memory(memory: str) -> None:
    """As `LLM` does, whose arguments these are."""
    settings = {"memory": memory, "memory_settings": {"eviction": "slru"}}
    arguments = Arguments.of(model="tiny", **settings, blocks=8)
    made: Any = arguments.server.make_memory()
    queue = made._leaves if memory == "radix" else made._evictable._queue
    assert isinstance(queue.policy, EVICTIONS["slru"])

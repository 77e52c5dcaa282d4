"""Random servers and what comes their way, as Hypothesis strategies.

A `Case` is plain data: its repr in a failure is all that is needed to run it again, with
`Run(case).go()` of `tests/core/run.py`. Combinations that a scheduler refuses are never drawn.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from typing import Any, Literal, TypeVar

from hypothesis import strategies as st

from pagedsim.build import (
    EVICTIONS,
    POLICIES,
    PREEMPTIONS,
    accepts,
    make_batching,
    make_eviction,
    make_memory,
    make_policy,
    make_preemption,
)
from pagedsim.core import (
    Batching,
    Memory,
    Policy,
    Preemption,
    Request,
    SamplingParams,
    Scheduler,
)
from pagedsim.core.offload import OffloadConnector
from pagedsim.policies.victims import VICTIMS
from pagedsim.sglang import HiCache, PrefetchSettings, StoredHiCache
from pagedsim.sim.disk import Disk
from pagedsim.sim.store import Link, Store, Way
from tests.core.odd_policies import (
    Aging,
    Counting,
    DisplacingLottery,
    Lottery,
    Mixed,
    OddBlocks,
    RandomVictims,
    ShortestRemaining,
    SmallBatches,
    Witness,
)

T = TypeVar("T")
Ends = Literal["hidden", "told"]

ODD = (
    *("random_victims", "mixed", "small_batches", "counting", "remaining", "speeds"),
    *("lottery", "odd_blocks"),
)
DISPLACING = {
    *("remaining", "speeds", "lottery"),
    *(name for name, kind in POLICIES.items() if accepts(kind, "displace")),
}
SHORT = {"quantum": 2.0, "starve": 9, "period": 3, "most": 3, "rate": 0.5, "ttl": 0.02}
"""Settings that make something happen within a few steps of a second each."""


@dataclass(frozen=True)
class Prices:
    """Stub prices: a block on the bus costs what `ratio` recomputed tokens cost."""

    ratio: int

    def recompute_seconds(self, tokens: int) -> float:
        return tokens

    def swap_seconds(self, blocks: int) -> float:
        return blocks * self.ratio


@dataclass(frozen=True)
class Host:
    """All that a connector to a host tier is made of."""

    chunks: int
    blocks_per_chunk: int = 1
    eviction: str = "lru"
    store_threshold: int = 0
    prompt_only: bool = True
    sync_tokens: int = 0
    disk: int = 0
    """Chunks of a tier below."""

    def connector(self) -> OffloadConnector:
        settings = asdict(self)
        disk = Store(Link(Way(1e-4, 3e9), Way(2e-4, 1e9)), 7e5, settings.pop("disk"))
        tiers = [Disk(disk)] if self.disk else []
        return OffloadConnector(**settings, tiers=tiers, protect_promoted=True)


@dataclass(frozen=True)
class Server:
    """All that a scheduler is made of."""

    memory: str
    blocks: int
    block_size: int
    batching: str
    policy: str = "fcfs"
    displace: bool | None = None
    preemption: str = "recompute"
    cpu_blocks: int = 0
    swap_bound: bool = False
    ratio: int = 4
    watermark: float = 0.0
    max_seqs: int = 4
    max_batched_tokens: int | None = None
    max_model_len: int | None = None
    reserved_len: int = 0
    """The greatest length that reserved memory reckons with."""
    victim: str | None = None
    of: str = "fcfs"
    """What a policy that stands around another stands around."""
    eviction: str = "lru"
    """Of caches."""
    chunk: int | None = None
    """Tokens of a batch of prefills, under sglang; None: no prompt is cut."""
    mixed: bool = False
    max_wait: int = 0
    """Decode steps between admissions, under prefill_first."""
    host: Host | None = None
    """A host tier, with a connector."""
    hicache: tuple[int, Any, Any] | None = None
    """SGLang's host tier: its blocks, when they are written, and how a storage below is read."""

    def build(self, seed: int, ahead: bool = False) -> Scheduler:
        return Scheduler(
            memory=self._memory(),
            batching=self._batching(),
            policy=self._policy(seed),
            preemption=self._preemption(),
            max_seqs=self.max_seqs,
            max_batched_tokens=self.max_batched_tokens,
            max_model_len=self.max_model_len,
            async_scheduling=ahead,
            connector=self.host.connector() if self.host else None,
        )

    def _memory(self) -> Memory:
        size = {"blocks": self.blocks, "block_size": self.block_size}
        if self.memory.startswith("reserved"):
            return make_memory(self.memory, **size, max_model_len=self.reserved_len)
        if self.memory == "radix" and self.hicache is not None:
            host, write, policy = self.hicache
            made: dict[str, Any] = {**size, "eviction": make_eviction(self.eviction)}
            made |= {"host_blocks": host, "write_policy": write}
            if policy is None:
                return HiCache(**made)
            prefetch = PrefetchSettings(
                policy=policy, threshold=4, timeout_base=0.02, retry_interval=2, retry_max=2
            )
            return StoredHiCache(**made, prefetch=prefetch)
        if self.memory == "radix":
            return make_memory("radix", **size, eviction=self.eviction)
        swap = {"cpu_blocks": self.cpu_blocks, "swap_bound": self.swap_bound}
        if self.memory == "prefix":
            return make_memory("prefix", **size, **swap, eviction=self.eviction)
        return make_memory(self.memory, **size, **swap)

    def _batching(self) -> Batching:
        if self.batching == "unified":
            return make_batching("unified")
        if self.batching == "sglang":
            how = {"chunked_prefill_size": self.chunk, "mixed_chunk": self.mixed}
            return make_batching("sglang", **how, conservativeness=self.watermark or 1.0)
        if self.batching == "trtllm":
            waits = {"batch_wait_timeout_iters": self.max_wait or 0}
            share = {"batch_wait_max_tokens_ratio": 0.5}
            return make_batching("trtllm", chunked_context=self.mixed, **share, **waits)
        waits = {"max_wait_tokens": self.max_wait} if self.max_wait else {}
        return make_batching(self.batching, watermark=self.watermark, **waits)

    def _policy(self, seed: int) -> Policy:
        match self.policy:
            case "remaining":
                return ShortestRemaining(self.displace)
            case "speeds":
                return Aging(self.displace)
            case "lottery":
                return (DisplacingLottery if self.displace else Lottery)(seed)
            case "odd_blocks":
                return OddBlocks()
            case "random_victims":
                return RandomVictims(seed)
            case "small_batches":
                return SmallBatches(1 + seed % 3)
            case "mixed":
                return Mixed()
            case "witness":
                return Witness()
            case "counting":
                return Counting()
        known = {**SHORT, "of": self.of, "displace": self.displace}
        settings = {key: known[key] for key in known if accepts(POLICIES[self.policy], key)}
        return make_policy(self.policy, victim=self.victim, **settings)

    def _preemption(self) -> Preemption:
        if self.preemption == "cheapest":
            return make_preemption("cheapest", prices=Prices(self.ratio))
        return make_preemption(self.preemption)


@dataclass(frozen=True)
class Job:
    """A request to come, and when it will have said enough."""

    prompt: int
    output: int
    width: int = 1
    gap: int = 0
    """Steps after the job before it."""
    stream: int | None = None
    """The author of its text; None: its tokens are unknown."""
    priority: int = 0
    predicted: int = 0
    limited: bool = False
    """Whether the client asks for no more than it will get."""

    def request(self, name: str) -> Request:
        params = SamplingParams(n=self.width, max_tokens=self.output if self.limited else None)
        prompt = self.prompt if self.stream is None else text(self.stream, self.prompt)
        return Request(
            name,
            prompt,
            params,
            priority=self.priority,
            predicted_len=float(self.predicted),
            client="ab"[self.priority % 2],
            session="xyz"[self.priority % 3],
            deadline=float(self.predicted * 3),
        )


@dataclass(frozen=True)
class Case:
    """A server, its jobs, and how an executor behaves."""

    server: Server
    jobs: tuple[Job, ...]
    aborts: tuple[tuple[int, int], ...] = ()
    """(moment, job): even moments are between plan and commit, odd ones after commit."""
    tells_tokens: bool = False
    ends: Ends = "hidden"
    beams: bool = False
    """Whether sequences of a group branch and end."""
    seed: int = 0


def token(stream: int, position: int) -> int:
    """What a stream says at a position; all streams begin alike."""
    return position % 7 + (stream * 10 if position >= 2 + 3 * stream else 0)


def text(stream: int, length: int) -> list[int]:
    return [token(stream, position) for position in range(length)]


# -- strategies --------------------------------------------------------------------------------

# Strategies are made once each: to make one costs Hypothesis as much as several draws from it.

_whole = cache(st.integers)
_truth = st.booleans()
_none = st.none()


@lru_cache(None, typed=True)  # since 1 is True
def _one_of(*choices: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(choices)


@cache
def _maybe(
    *strategies: st.SearchStrategy[int] | st.SearchStrategy[None],
) -> st.SearchStrategy[int | None]:
    """None, or what one of these gives."""
    return st.one_of(_none, *strategies)


@cache
def _up_to(most: int, strategy: st.SearchStrategy[T], least: int = 0) -> st.SearchStrategy[list[T]]:
    return st.lists(strategy, min_size=least, max_size=most)


_WIDTHS = ((1,), (1, 1, 1, 2, 3, 4), (2, 3, 4))
_ABORTS = _up_to(3, st.tuples(_whole(0, 40), _whole(0, 6)))


@cache
@st.composite
def cases(draw: st.DrawFn, batching: str, memory: str) -> Case:
    server = draw(servers(batching, memory))
    # A prefix cache depends on reported tokens.
    tells = draw(_one_of(True, True, False) if memory in ("prefix", "radix") else _truth)
    longest = server.max_model_len or server.reserved_len or server.blocks * server.block_size
    # Cases of one kind reach what a mixture of all kinds seldom does.
    prompts = draw(_one_of(5, 1 + longest // 2, 1 + longest // 2))
    widths = draw(_one_of(*_WIDTHS))
    outputs = min(14, 2 + longest // 2)
    return Case(
        server=server,
        jobs=tuple(draw(_up_to(8, jobs(min(prompts, 26), outputs, widths), 1))),
        aborts=tuple(draw(_ABORTS)),
        tells_tokens=tells,
        ends=draw(_one_of("hidden", "told")),
        beams=draw(_truth),
        seed=draw(_whole(0, 99)),
    )


@cache
@st.composite
def jobs(draw: st.DrawFn, prompts: int, outputs: int, widths: tuple[int, ...]) -> Job:
    return Job(
        prompt=draw(_whole(1, prompts)),
        output=draw(_whole(1, outputs)),
        width=draw(_one_of(*widths)),
        gap=draw(_whole(0, 3)),
        stream=draw(_one_of(0, 0, 1, 2, None)),
        priority=draw(_whole(0, 3)),
        predicted=draw(_whole(0, 14)),
        limited=draw(_truth),
    )


@cache
@st.composite
def servers(draw: st.DrawFn, batching: str, memory: str) -> Server:
    size = draw(_one_of(1, 2, 2, 3, 4, 4, 8, 16, 32))
    blocks = -(-draw(_whole(6, 40)) // size) + draw(_one_of(0, 0, 1, 3))
    capacity = blocks * size
    reserved_len = 0
    cpu_blocks, preemption = 0, "recompute"
    if memory.startswith("reserved"):
        capacity = (1 << blocks.bit_length() - 1) * size
        reserved_len = draw(_whole(1, capacity))
        capacity = reserved_len
    elif memory != "radix" and batching != "sglang":
        preemption = draw(_one_of(*PREEMPTIONS))
        cpu_blocks = draw(_whole(0 if preemption == "recompute" else 1, 2 * blocks))
    max_seqs = draw(_one_of(1, 2, 3, 4, 4, 6, 8, 8))
    max_model_len = draw(_maybe(_none, _whole(-(-capacity // 2), capacity)))
    chunk = draw(_maybe(_whole(1, 20))) if batching == "sglang" else None
    unfit = {
        *(() if memory == "prefix" else ("continuum",)),
        *(() if memory == "radix" else ("dfs_weight",)),
    }
    fitting = [name for name in POLICIES if name not in unfit]
    policy = draw(_one_of(*fitting, *ODD))
    inner = ("fcfs", "priority", "sjf", "vtc", *(() if batching == "static" else ("srpt",)))
    of = draw(_one_of(*inner))
    return Server(
        memory=memory,
        blocks=blocks,
        block_size=size,
        batching=batching,
        policy=policy,
        displace=_displace(draw, batching, policy),
        victim=draw(_one_of(None, None, *VICTIMS)),
        of=of,
        preemption=preemption,
        cpu_blocks=cpu_blocks,
        ratio=draw(_whole(1, 6)),
        watermark=draw(_one_of(0.0, 0.01, 0.1, 0.3)),
        max_seqs=max_seqs,
        max_batched_tokens=_budget(draw, batching, max_model_len or capacity, max_seqs),
        max_model_len=max_model_len,
        reserved_len=reserved_len,
        eviction=draw(_one_of("lru", "lru", *EVICTIONS))
        if memory in ("prefix", "radix")
        else "lru",
        chunk=chunk and -(-chunk // size) * size,
        mixed=draw(_truth) if chunk or batching == "trtllm" else False,
        max_wait=draw(_one_of(0, 0, 0, 3)) if batching in ("prefill_first", "trtllm") else 0,
    )


@cache
@st.composite
def hosts(draw: st.DrawFn) -> Host:
    threshold = draw(_one_of(0, 0, 2))
    return Host(
        chunks=draw(_whole(1, 40)),
        blocks_per_chunk=draw(_one_of(1, 1, 2, 3)),
        eviction=draw(_one_of("lru", "arc")),
        store_threshold=threshold,
        disk=0 if threshold else draw(_one_of(0, 1, 8, 40)),
        prompt_only=draw(_truth),
        sync_tokens=draw(_one_of(0, 0, 16)),
    )


def _displace(draw: st.DrawFn, batching: str, policy: str) -> bool | None:
    if policy not in DISPLACING:
        return None
    choices = (False,) if batching == "static" else (False, True, True)
    unsaid = (None,) if policy in ("priority", "remaining", "speeds") else ()
    return draw(_one_of(*choices, *unsaid))


def _budget(draw: st.DrawFn, batching: str, longest: int, max_seqs: int) -> int | None:
    """Prompts that are never split must fit into a step."""
    if batching == "unified":
        return draw(_maybe(_whole(1, 8), _whole(4, 16)))
    more = draw(_maybe(_whole(0, 20)))
    return None if more is None else max(longest, max_seqs) + more

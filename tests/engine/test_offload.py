"""Copies from and to a host tier change no token, whenever they end, and whether they fail."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedsim.build import make_batching
from pagedsim.core import ConfigError
from pagedsim.core.offload import VLLMOffload
from pagedsim.core.offload.eviction import HostChunk
from pagedsim.core.transfers import Direction, EndedCopy
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.engine_args import from_vllm
from pagedsim.engine.file_tier import FileTier, empty_folders
from pagedsim.engine.host_copies import HostCopies
from pagedsim.engine.llm import LLM
from pagedsim.engine.step_inputs import HostCopy
from pagedsim.server import ServerSpec
from pagedsim.sglang import HiCache, HiCacheOffload
from pagedsim.sglang.radix import to_root
from tests.engine.test_cache_memory import SlowBus
from tests.engine.test_equality import (
    BLOCK,
    GREEDY,
    LONGEST,
    PROMPTS,
    TOKENS,
    prompts,
    small,
    wanted,
)

Contents = dict[tuple[Hashable, int], torch.Tensor]
"""By the key of a chunk, and the number of a block in it."""


class Failing(SlowBus):
    """Some copies raise an error instead."""

    def __init__(self, rng: random.Random, haste: float, failing: float) -> None:
        super().__init__(rng, haste)
        self.failing, self.failed = failing, 0

    def queue(self, work: Callable[[], None]) -> Any:
        if self.rng.random() < self.failing:
            self.failed += 1
            raise RuntimeError("the bus is off")
        return super().queue(work)


class LatePool(Executor):
    """Does its work when somebody asks whether it is done, at random times; some of it fails."""

    def __init__(self, rng: random.Random, haste: float, failing: float) -> None:
        self.rng, self.haste, self.failing = rng, haste, failing

    def submit(self, work: Any, /, *args: object, **kwargs: object) -> Any:
        return LateWork(self, work)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing is left."""


class LateWork(Future[int]):
    def __init__(self, pool: LatePool, work: Callable[[], int]) -> None:
        super().__init__()
        self.pool, self.work = pool, work

    def done(self) -> bool:
        if not super().done() and self.pool.rng.random() < self.pool.haste:
            try:
                if self.pool.rng.random() < self.pool.failing:
                    raise OSError(28, "No space left on device")
                self.set_result(self.work())
            except OSError as error:
                self.set_exception(error)
        return super().done()


class Shadow(HostCopies):
    """Knows what is in each chunk, and looks at all that was copied."""

    def __init__(self, engine: LLMEngine, *buses: SlowBus) -> None:
        stores, loads = buses
        super().__init__(engine.runner.cache, buses=(stores, loads))
        self.scheduler = engine.scheduler
        self.contents: Contents = {}
        self.named: dict[int, list[tuple[Hashable, int]]] = {}  # by job, block by block
        self.checked = {Direction.LOAD: 0, Direction.STORE: 0}

    def _names(self, copy: HostCopy) -> list[tuple[Hashable, int]]:
        """Those of its blocks; of what SGLang evicts, their places in the host tier."""
        if isinstance(memory := self.scheduler.memory, HiCache):
            names: list[tuple[Hashable, int]] = []
            for part in memory._under_way[copy.job]:
                path = [key for node in reversed(to_root(part.node)) for key in node.keys]
                names += [(key, 0) for key in path[len(path) - len(part.pages) :]]
            if memory.writes_back:  # what a flushed store was of is forgotten
                at = copy.direction is Direction.STORE
                names = [("place", pair[at]) for pair in copy.pairs]
            return names
        connector = self.scheduler.queues.connector
        assert connector is not None
        per = connector.blocks_per_chunk
        chunks = connector.jobs[copy.job].chunks
        names = [(chunk.key, block) for chunk in chunks for block in range(per)]
        return names[len(names) - len(copy.pairs) :]

    def _begin(self, copy: HostCopy, lane: int) -> None:
        names = self.named[copy.job] = self._names(copy)
        ends = self._cache.gpu, self._cache.cpu
        source = ends[copy.direction is Direction.LOAD]
        contents = [source[place].clone() for place, _ in copy.pairs]
        super()._begin(copy, lane)
        if copy.direction is Direction.LOAD or not names or self._jobs[copy.job].error:
            return
        for name, content in zip(names, contents, strict=True):
            if name in self.contents and name[0] != "place":
                torch.testing.assert_close(content, self.contents[name])
            self.contents[name] = content

    def _report(self, number: int) -> EndedCopy:
        copy, memory = self._jobs[number].copy, self.scheduler.memory
        ended = super()._report(number)
        if isinstance(memory, HiCache) and not (memory.writes_back or memory._under_way[number]):
            return ended  # another copy has failed, and nobody waits for this one
        if ended.error is None:
            self.checked[copy.direction] += len(copy.pairs)
            ends = self._cache.gpu, self._cache.cpu
            target = ends[copy.direction is Direction.STORE]
            for name, (_, place) in zip(self.named[number], copy.pairs, strict=True):
                torch.testing.assert_close(target[place], self.contents[name])
        return ended


@dataclass
class Case:
    """An engine with little memory, and a host tier."""

    rng: random.Random
    hicache: bool = False
    failing: float = 0.0
    aborting: float = 0.0
    breaking: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    offload: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    promoted: int = 0
    told: dict[int, int] = field(default_factory=dict)
    """How much of the answer is in each prompt; SGLang loads no less than ten tokens."""

    def __post_init__(self) -> None:
        choice = self.rng.choice
        settings = self.of_sglang() if self.hicache else self.of_vllm()
        self.engine = small(
            "llama",
            cpu_blocks=0,
            max_batched_tokens=choice((8, 32)),
            async_scheduling=choice((False, True)),
            **{**settings, **self.settings},
        )
        self.buses = [Failing(self.rng, choice((0.05, 0.3, 1.0)), self.failing) for _ in range(2)]
        self.shadow = Shadow(self.engine, *self.buses)
        self.pools = [LatePool(self.rng, 0.2, self.failing) for _ in self.engine.files]
        for tier, pool in zip(self.engine.files, self.pools, strict=True):
            tier._pool = pool
        self.engine.runner.copies = self.shadow
        if self.breaking:
            runner: Any = self.engine.runner
            runner._computed = partial(self._computed, runner._computed)

    def of_vllm(self) -> dict[str, Any]:
        choice = self.rng.choice
        offload: dict[str, Any] = {
            "chunks": choice((3, 8, 40)),
            "chunk_tokens": choice((None, None, 8)),
            "eviction": choice(("lru", "arc")),
            "store_threshold": choice((0, 0, 2)),
            "prompt_only": choice((True, False)),
            "sync_tokens": choice((0, 0, 8, 100)),
        }
        if self.folder is not None:
            offload |= {"store_threshold": 0, "protect_promoted": True}
            offload["tiers"] = {"disk": {"folder": str(self.folder)}}
        return {
            "batching": "unified",
            "blocks": choice((10, 10, 24)),
            "memory": choice(("paged", "prefix", "prefix")),
            "policy": choice(("fcfs", "priority")),
            "offload": offload | dict(self.offload),
        }

    def of_sglang(self) -> dict[str, Any]:
        choice = self.rng.choice
        size, chunk = choice((1, 1, 4)), choice((None, 8, 8))
        offload = {
            "blocks": choice((16, 60, 200)) // size,
            "write_policy": choice(("write_through", "write_through_selective", "write_back")),
        }
        return {
            "batching": make_batching(
                "sglang",
                chunked_prefill_size=chunk,
                mixed_chunk=bool(chunk) and choice((True, False)),
                # With 0 some are retracted; a prompt that is cut may find no room then.
                conservativeness=choice((0.0, 1.0)) if chunk is None else 1.0,
            ),
            "block_size": size,
            "blocks": choice((40, 48, 60)) // size,
            "memory": "radix",
            "memory_settings": {"eviction": choice(("lru", "lru", "lfu", "fifo"))},
            "max_model_len": LONGEST + TOKENS + 2,  # SGLang leaves two tokens free
            "policy": choice(("fcfs", "lpm", "priority")),
            "offload": HiCacheOffload(**{**offload, **self.offload}),
        }

    def _computed(self, compute: Any, launch: Any) -> Any:
        """Some steps write something else, and then fail."""
        logits = compute(launch)
        if launch is not None and self.rng.random() < self.breaking:
            cache = self.engine.runner.cache
            for slot in launch.batch.attention.slots.tolist():
                block, at = divmod(slot, cache.shape.block_size)
                cache.gpu[block, :, :, at] = 1e3
            raise RuntimeError("a kernel failed")
        return logits

    def serve(self, count: int = 24) -> dict[int, Sequence[int]]:
        """Requests for prompts that come again and again; returns the tokens of those that end."""
        engine, rng = self.engine, self.rng
        ended: dict[int, Sequence[int]] = {}
        sent = 0
        while sent < count or engine.has_unfinished_requests():
            if sent < count and rng.random() < 0.3:
                told = self.told[sent] = rng.choice((0, 8, 12)) if self.hicache else 0
                which = self.prompt(sent)
                prompt = prompts()[which] + wanted("llama")[which][:told]
                params = replace(GREEDY, max_tokens=TOKENS - told)
                engine.add_request(sent, prompt, params, priority=sent % 3)
                sent += 1
            alive = [*engine.scheduler.requests]
            if alive and rng.random() < self.aborting:
                engine.abort_request(rng.choice(alive))
            for output in engine.step():
                reason = output.outputs[0].finish_reason
                assert reason == "length" or (reason == "error" and self.breaking)
                if reason == "length":
                    ended[int(output.request_id)] = output.outputs[0].token_ids
            engine.scheduler.check()
            if (connector := engine.scheduler.queues.connector) is not None:
                self.promoted += len(connector.step.promotions)
        return ended

    @staticmethod
    def prompt(number: int) -> int:
        return number * 5 % PROMPTS

    def check(self, ended: Mapping[int, Sequence[int]]) -> None:
        """Tokens are right, and nothing is left in flight or in use."""
        for number, tokens in ended.items():
            assert list(tokens) == wanted("llama")[self.prompt(number)][self.told[number] :]
        scheduler = self.engine.scheduler
        connector = scheduler.queues.connector
        while self.engine.copying:
            self.engine.collect(1.0)
        if connector is not None:  # which the next plan would do
            connector.lower.collect(0.0, connector.step)
        assert scheduler.memory.free == scheduler.memory.total
        assert not scheduler.transferring and not self.engine.copying
        assert not any(bus.waiting for bus in self.buses)
        scheduler.check()
        if connector is not None:
            assert not connector.host.writing and not connector.host.reading
        if isinstance(memory := scheduler.memory, HiCache):
            scheduler.memory.forget()
            assert memory.host_free == memory.host_total


def seeds(most: int, quick: int) -> pytest.MarkDecorator:
    """So many of both connectors, of which so many are quick tests."""
    return pytest.mark.parametrize(
        ("seed", "hicache"),
        [
            pytest.param(seed, kind, marks=[pytest.mark.slow] * (seed >= quick))
            for seed in range(most)
            for kind in (False, True)
        ],
    )


@seeds(100, 8)
def test_tokens_and_contents_are_the_same(seed: int, hicache: bool) -> None:
    case = Case(random.Random(seed), hicache, aborting=(0.0, 0.05)[seed % 2])
    ended = case.serve()
    assert len(ended) == 24 or seed % 2
    case.check(ended)
    assert case.shadow.checked[Direction.STORE] > 0


@seeds(40, 4)
def test_copies_that_fail_lose_no_request(
    seed: int, hicache: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failing = 0.6 if hicache else 0.3  # SGLang's copies are fewer
    case = Case(random.Random(seed), hicache, failing=failing, aborting=(0.0, 0.05)[seed % 2])
    with caplog.at_level(logging.WARNING):
        ended = case.serve()
    assert len(ended) == 24 or seed % 2
    case.check(ended)
    failed = any(bus.failed for bus in case.buses)
    assert failed or hicache
    lines = [record.getMessage() for record in caplog.records]
    assert ["host tier failed (RuntimeError: the bus is off)" in line for line in lines] == (
        [True] * failed
    )


def test_files_of_a_study_are_empty_at_first_and_go_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "earlier").touch()
    tiers = {"disk": {"folder": str(tmp_path)}, "remote": None}
    server = ServerSpec(offload=VLLMOffload(chunks=4, tiers=tiers))
    with empty_folders(server) as own:
        assert isinstance(own.offload, VLLMOffload)
        folder = Path(own.offload.tiers["disk"]["folder"])
        assert folder.parent == tmp_path and not list(folder.iterdir())
        (folder / "file").touch()
        assert own.offload.tiers["remote"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["earlier"]
    with empty_folders(ServerSpec()) as own:
        assert own == ServerSpec()


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n >= 6)) for n in range(50)]
)
def test_files_below_the_host_tier(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two engines after one another with the same files, which may be too many for the disk."""
    failing, aborting = (0.0, 0.3)[seed % 3 == 2], (0.0, 0.05)[seed % 2]
    promoted, contents = 0, dict[tuple[Hashable, int], torch.Tensor]()
    for again in range(2):
        rng = random.Random(seed)
        case = Case(rng, failing=failing, aborting=aborting, folder=tmp_path)
        case.shadow.contents = contents
        (tier,) = case.engine.files
        assert bool(tier._has) == bool(again) or failing
        case.check(case.serve())
        promoted += case.promoted
        case.engine.close()
        if not failing:
            assert len([*tmp_path.glob("*/??/*.bin")]) == len(tier._has)
    assert promoted or failing
    lines = [record.getMessage() for record in caplog.records if "disk" in record.getMessage()]
    assert len(lines) <= 4 and bool(lines) <= bool(failing)
    assert all(line.startswith(f"offload.tiers.disk.folder={tmp_path}: a ") for line in lines)


def test_a_failed_write_loses_no_file_that_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FileTier("disk", str(tmp_path), 1)
    tier._pool = LatePool(random.Random(0), 1.0, 0.0)
    tier._host, tier._folder = np.zeros((2, 64), np.uint8), tmp_path
    chunks = [HostChunk(bytes([n] * 16), n) for n in range(2)]
    tier.store(0, chunks[:1], 0.0)
    assert not any(copy.error for copy in tier.poll())
    monkeypatch.setattr(tier, "_pool", LatePool(random.Random(0), 1.0, 1.0))
    tier.store(1, chunks, 0.0)
    assert [copy.error is not None for copy in tier.poll()] == [True]
    assert [tier.find(chunk.key, "a", 0.0) for chunk in chunks] == [True, False]


@seeds(40, 4)
def test_steps_that_fail_leave_nothing_wrong_behind(seed: int, hicache: bool) -> None:
    """What they were to compute is not stored, and their requests alone end."""
    offload = {} if hicache else {"prompt_only": False}
    case = Case(random.Random(seed), hicache, breaking=0.04, offload=offload)
    ended = case.serve()
    assert ended and (len(ended) < 24) == bool(case.engine.failure)
    case.check(ended)


@pytest.mark.parametrize("hicache", [False, True])
@pytest.mark.parametrize(
    "seed", [1011, 1018, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2000, 2040))]
)
def test_all_of_it_at_once(seed: int, hicache: bool, tmp_path: Path) -> None:
    """As by 1011 and 1018: a step ends before it has computed, and loads that it was to wait for
    still write blocks that others get."""
    rng = random.Random(seed)
    failing, aborting, breaking = (
        rng.choice(rates) for rates in ((0, 0.1, 0.5), (0, 0.05), (0, 0.03))
    )
    folder = tmp_path if seed >= 2000 and seed % 2 and not hicache else None
    case = Case(rng, hicache, failing, aborting, breaking, folder=folder)
    case.check(case.serve(40))


def test_an_engine_waits_for_a_copy_where_nothing_else_can_be_done() -> None:
    offload = {"chunks": 40, "chunk_tokens": None, "sync_tokens": 0, "store_threshold": 0}
    case = Case(random.Random(3), settings={"memory": "paged"}, offload=offload)
    engine, (stores, loads) = case.engine, case.buses
    stores.haste = 1.0
    longest = max(range(PROMPTS), key=lambda number: len(prompts()[number]))
    for number in range(2):
        loads.haste = 0.0
        engine.add_request(number, prompts()[longest], GREEDY)
        while engine.has_unfinished_requests():
            engine.check_progress()
            outputs = engine.step()
            if engine.stuck and engine.copying:
                before = engine.scheduler.queues.step
                assert engine.pause == 0 and not outputs and not engine.step()
                assert engine.scheduler.queues.step == before
                loads.haste = 1.0
    assert loads.haste == 1.0
    case.check({})


def test_requests_whose_promotions_evict_one_another_are_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = small(
        "llama",
        cpu_blocks=0,
        batching="unified",
        memory="prefix",
        blocks=3,
        max_model_len=3 * BLOCK,
        max_batched_tokens=BLOCK,
        offload={"chunks": 1, "tiers": {"disk": {"folder": str(tmp_path)}}},
    )
    (tier,) = engine.files
    tier._pool = LatePool(random.Random(0), 1.0, 0.0)
    answers = []
    for number, start in enumerate((1, 50, 1)):
        prompt = [start + token for token in range(2 * BLOCK + 1)]
        engine.add_request(number, prompt, replace(GREEDY, max_tokens=1))
        while engine.has_unfinished_requests() or engine.copying:
            answers += [output.outputs[0].token_ids for output in engine.step()]
    assert answers[0] == answers[2]
    assert caplog.messages == [
        "requests wait for blocks that evict one another from host memory, as in vLLM; "
        "from now on offload.protect_promoted=true"
    ]


def test_metrics_tell_what_was_copied() -> None:
    pytest.importorskip("prometheus_client")
    from pagedsim.serve.metrics import Exporter, Metrics

    case = Case(random.Random(1), offload={"chunks": 40, "store_threshold": 0})
    case.engine.observer = metrics = Metrics()
    case.check(case.serve())
    families = Exporter(metrics, case.engine.scheduler, "model", lambda: 0.0).collect()
    told = {
        (sample.name, sample.labels.get("transfer_type"), sample.labels.get("le")): sample.value
        for family in families
        for sample in family.samples
    }
    size = case.engine.runner.cache.shape.block_bytes
    for direction, name, label in (
        (Direction.LOAD, "load", "CPU_to_GPU"),
        (Direction.STORE, "store", "GPU_to_CPU"),
    ):
        copied = case.shadow.checked[direction] * size
        assert told[f"vllm:kv_offload_{name}_bytes_total", None, None] == copied > 0
        assert told["vllm:kv_offload_total_bytes_total", label, None] == copied
        jobs = told[f"vllm:kv_offload_{name}_size_count", None, None]
        assert told[f"vllm:kv_offload_{name}_size_bucket", None, "1000000.0"] == jobs > 0
        assert told[f"vllm:kv_offload_{name}_time_total", None, None] == jobs  # a second each
        assert told["vllm:kv_offload_total_time_total", label, None] == jobs
    assert 0 < told["vllm:kv_offload_cpu_cache_usage_perc", None, None] <= 1


HICACHE = {"enable_hierarchical_cache": True}
CONNECTOR = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def connector(**extra: Any) -> dict[str, Any]:
    return {"kv_transfer_config": {**CONNECTOR, "kv_connector_extra_config": extra}}


TIERS = "kv_transfer_config.kv_connector_extra_config.secondary_tiers"


def tiered(tiers: Any) -> dict[str, Any]:
    return connector(cpu_bytes_to_use=2**20, secondary_tiers=tiers)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"kv_offloading_backend": "native"}, None),
        ({"kv_offloading_size": 0.5}, {"gib": 0.5}),
        (connector(cpu_bytes_to_use=2**28), {"gib": 0.25}),
        (
            {
                **connector(cpu_bytes_to_use=2**28, blocks_per_chunk=3),
                **{"kv_offloading_size": 3, "block_size": 8, "tensor_parallel_size": 2},
            },
            {"gib": 1.5, "chunk_tokens": 24},
        ),
        (
            connector(
                **{"cpu_bytes_to_use": 2**30, "spec_name": "CPUOffloadingSpec", "block_size": 32},
                **{"eviction_policy": "arc", "store_threshold": 2, "max_tracker_size": 5},
                offload_prompt_only=False,
            ),
            {
                **{"gib": 1, "chunk_tokens": 32, "eviction": "arc", "store_threshold": 2},
                **{"tracked_chunks": 5, "prompt_only": False},
            },
        ),
        (
            connector(
                cpu_bytes_to_use=2**30,
                spec_name="TieringOffloadingSpec",
                secondary_tiers=[
                    {"type": "fs", "root_dir": "/files"},
                    {"type": "fs", "root_dir": "/more", "n_read_threads": 2, "n_write_threads": 1},
                ],
            ),
            {
                "gib": 1,
                "tiers": {
                    "fs0": {"folder": "/files", "threads": 32},
                    "fs1": {"folder": "/more", "threads": 3},
                },
            },
        ),
    ],
)
def test_settings_of_vllm(given: dict[str, Any], meant: dict[str, Any] | None) -> None:
    found = from_vllm(given)
    assert found.get("offload") == meant
    assert found.get("batching") == (None if meant is None else "unified")
    if meant is not None:
        assert from_vllm({"offload": meant})["batching"] == "unified"
    if config := given.get("kv_transfer_config"):
        assert from_vllm({**given, "kv_transfer_config": json.dumps(config)}) == found


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"enable_hierarchical_cache": False}, None),
        ({"enable_hierarchical_cache": True}, HiCacheOffload()),
        (
            {
                **{"enable_hierarchical_cache": True, "hicache_ratio": 3, "hicache_size": 4},
                "hicache_write_policy": "write_back",
            },
            HiCacheOffload(ratio=3, gib=4e9 / 2**30, write_policy="write_back"),
        ),
    ],
)
def test_settings_of_sglang(given: dict[str, Any], meant: HiCacheOffload | None) -> None:
    found = from_vllm(given)
    assert found.get("offload") == meant
    server = (found.get("batching"), found.get("memory"))
    assert server == ((None, None) if meant is None else ("sglang", "radix"))
    assert "memory" not in from_vllm({**given, "server": ServerSpec(memory="radix")})


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"hicache_ratio": 3}, "hicache_ratio=3: needs enable_hierarchical_cache=True"),
        (HICACHE | {"hicache_ratio": 0}, "hicache_ratio=0: must be a number above 0"),
        (HICACHE | {"hicache_write_policy": "back"}, "unknown hicache_write_policy 'back'"),
        (
            HICACHE | {"kv_offloading_size": 1},
            "kv_offloading_size: there is a host tier by enable_hierarchical_cache; give one",
        ),
        (
            HICACHE | {"memory": "prefix"},
            "offload: hicache needs memory=radix, not PrefixMemory",
        ),
        ({"kv_offloading_size": 0}, "kv_offloading_size=0: must be a number above 0"),
        ({"kv_offloading_size": 1e-9}, "offload.gib=1e-09: must hold a chunk, which takes 6.1"),
        (
            {"kv_offloading_backend": "lmcache"},
            "unknown kv_offloading_backend 'lmcache': choose from native",
        ),
        ({"kv_transfer_config": "{"}, "kv_transfer_config='{': is no JSON"),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}},
            "kv_transfer_config: must have kv_role: choose from kv_both",
        ),
        ({"kv_transfer_config": 3}, "kv_transfer_config=3: must be a JSON object"),
        (
            {"kv_transfer_config": {"kv_connector": "NixlConnector"}},
            "unknown kv_transfer_config.kv_connector 'NixlConnector': did you mean",
        ),
        (
            connector(block_size=24, cpu_bytes_to_use=5),
            "offload.chunk_tokens=24: must be a multiple of block_size=16",
        ),
        ({"offload": "vllm"}, "offload='vllm': must be settings of vLLM's connector, such as"),
        ({"kv_offloading_sise": 1}, "unknown engine setting 'kv_offloading_sise': did you mean"),
        (connector(), "kv_transfer_config.kv_connector_extra_config: must have cpu_bytes_to_use"),
        (
            connector(cpu_bytes=5),
            "unknown kv_transfer_config.kv_connector_extra_config 'cpu_bytes': did you mean",
        ),
        (
            tiered(3),
            "kv_transfer_config.kv_connector_extra_config.secondary_tiers=3: must be a list",
        ),
        (tiered([{"type": "obj"}]), f"unknown {TIERS}[0].type 'obj': choose from fs"),
        (tiered([{"type": "fs"}]), f"{TIERS}[0]: must have root_dir"),
        (tiered([{"type": "fs", "root": "/x"}]), f"unknown {TIERS}[0] 'root': did you mean"),
        (
            tiered([{"type": "fs", "root_dir": "/dev/null/x"}]),
            "offload.tiers.fs0.folder=/dev/null/x: no files can be kept there: Not a directory",
        ),
        (
            tiered([{"type": "fs", "root_dir": "/x"}]) | {"tensor_parallel_size": 2},
            "tensor_parallel_size=2: must be 1 with a folder in offload.tiers",
        ),
        (
            tiered([{"type": "fs", "root_dir": "/x", "n_read_threads": 0}]),
            f"{TIERS}[0].n_read_threads=0: must be a whole number of at least 1",
        ),
        *(
            (
                {"offload": {"gib": 1e-3, "tiers": {"disk": disk}}, "batching": "unified"},
                f"offload.tiers.disk{said}",
            )
            for disk, said in (
                ({"gib": 3}, ": needs a folder in the engine, or must be null"),
                ({"folder": ""}, ".folder='': must be a path, or null"),
                ({"folder": ["/x"]}, ".folder=['/x']: must be a path, or null"),
                ({"folder": "~none/x"}, ".folder=~none/x: no files can be kept there: Could not"),
                ({"folder": "/x", "threads": 1.5}, ".threads=1.5: must be a whole number"),
                ({"folder": "/x", "threds": 2}, ".threds: no such setting of a tier; did you mean"),
            )
        ),
        (
            {"kv_offloading_size": 1, "preemption": "swap"},
            "offload: preempted requests are found in the host tier, and do not swap",
        ),
        (
            {"kv_offloading_size": 1, "enable_chunked_prefill": False},
            "offload: PrefillFirst loads nothing from a host tier; choose batching=unified",
        ),
        ({"kv_offloading_size": 1e5}, "out of memory: 12 blocks, and 1638400000 in the host tier"),
    ],
)
def test_settings_that_cannot_work(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLM("tiny", device="cpu", num_gpu_blocks=12, max_model_len=160, **given)
    assert str(error.value).startswith(line)

"""The backend `http`: load on an OpenAI-compatible server, measured at the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from pagedsim.backends.base import Backend, BackendRun, StoppableRecorder, Stopped, refuse_sessions
from pagedsim.backends.http.client import Address, connected
from pagedsim.backends.http.load import PATHS, Bodies, Contents, Load, Seen
from pagedsim.backends.http.results import benchmark, failures, lateness, notes
from pagedsim.core import ConfigError, RequestId
from pagedsim.core.errors import not_installed, require_number, require_whole, unknown
from pagedsim.metrics.files import write_json
from pagedsim.metrics.recorder import SOURCES
from pagedsim.metrics.tables import TOKEN_TIMES
from pagedsim.requirements import refuse_older
from pagedsim.spec.run import RunSpec, Settings
from pagedsim.workload import Workload

PROMPTS = ("ids", "text")


@dataclass(frozen=True)
class Http(Backend):
    """A server elsewhere. Its settings are explained in conf/backend/http.yaml."""

    url: str | None = None
    model: str | None = None
    endpoint: str = "completions"
    prompt: str | None = None
    concurrency: int | None = None
    warmup: int = 1
    timeout: float = 600.0
    extra: Mapping[str, Any] | None = None

    alone = True
    elsewhere = True
    unread = (
        *("policy", "preemption", "batching", "memory", "model", "hardware", "cost", "predictor"),
        *("server", "tensor_parallel", "pipeline_parallel", "expert_parallel"),
        *("kv_cache_dtype", "quantization"),
    )
    unread_since = "the server has its own settings, which a client cannot change"

    def __post_init__(self) -> None:
        if self.endpoint not in PATHS:
            raise unknown("endpoint", str(self.endpoint), PATHS)
        if self.prompt is not None and self.prompt not in PROMPTS:
            raise unknown("prompt", str(self.prompt), PROMPTS)
        if self.endpoint == "chat" and self.prompt == "ids":
            raise ConfigError("prompt=ids: must be text with backend.endpoint=chat")
        if self.concurrency is not None:
            require_whole("concurrency", self.concurrency, 1)
        require_whole("warmup", self.warmup, 0)
        require_number("timeout", self.timeout, above=0)
        if self.extra is not None and not isinstance(self.extra, Mapping):
            raise ConfigError(f"extra={self.extra}: must be a mapping of fields to values")

    def prepare(self, config: RunSpec) -> Sending:
        if find_spec("aiohttp") is None:
            raise not_installed("backend=http", "serve", "aiohttp")
        refuse_older("serve")
        address = Address.found(self.url, self.model)
        return Sending(self, address, config.settings, config.seed)

    @property
    def as_ids(self) -> bool:
        """Whether prompts are sent as token ids."""
        return self.endpoint == "completions" and self.prompt != "text"

    def traffic(self, settings: Settings, seed: int) -> Workload:
        workload = super().traffic(settings, seed)
        refuse_sessions(workload, "http")
        if any(params.beam_search for params in workload.asked):
            raise ConfigError("workload.beam: must be null with backend=http, which asks for none")
        return workload


VLLM_BENCH = "vllm_bench.json"
SENT = "sent"
"""The column that has when each request was sent."""
WARM = 8
"""Tokens of an answer before the clock starts, at most."""
OTHERS = 1 << 40
"""Added to the seed for prompts that no request of a run has."""
NO_IDS = (400, 415, 422)
"""What a server says that does not take token ids, if it says no more."""


class Sending(BackendRun):
    """A run against a server elsewhere. Nothing is known of its steps."""

    ours = False

    def __init__(self, way: Http, address: Address, config: Settings, seed: int) -> None:
        """`way` is how requests get to the server."""
        self.way, self.address, self.config, self.seed = way, address, config, seed
        self._seen: dict[RequestId, Seen] = {}
        self._late: Sequence[float] = ()
        self._begun = 0.0
        self._date = ""

    def run(self, workload: Workload, recorder: StoppableRecorder) -> None:
        with many_open_files():
            asyncio.run(self._run(workload, recorder))
        if recorder.stopping:
            raise Stopped

    async def _run(self, workload: Workload, recorder: StoppableRecorder) -> None:
        url = self.address.base + PATHS[self.way.endpoint]
        async with connected(url, self.way.timeout, self._now) as send:

            async def ask(seen: Seen, body: bytes) -> None:
                await send(body, seen.answer)

            def left(seen: Seen) -> None:
                self._seen[seen.id] = seen
                recorder.left(seen)

            def stopping() -> bool:
                recorder.now = self._now()
                return recorder.stopping

            await self._warm_up(workload, send)
            write = self._bodies(self.seed).of
            load = Load(workload, write, ask, self._now, self.way.concurrency)
            load.prepare()
            self._date = time.strftime("%Y%m%d-%H%M%S")
            self._begun = time.perf_counter()
            await load.run(left, stopping)
            recorder.now, self._late = self._now(), load.late
            for seen in load.running:
                left(seen)

    def _now(self) -> float:
        return time.perf_counter() - self._begun

    def _bodies(self, seed: int) -> Bodies:
        way, model = self.way, self.address.model
        return Bodies(model, Contents(seed), way.endpoint, way.as_ids, way.extra or {})

    async def _warm_up(self, workload: Workload, send: Callable[..., Awaitable[None]]) -> None:
        """A few requests before the clock starts; ConfigError for what the server refuses."""
        bodies = self._bodies(self.seed + OTHERS)
        requests = [Seen(*job) for job in islice(workload.requests(), self.way.warmup)]
        written = [bodies.of(request, min(request.output_len, WARM)) for request in requests]
        answers = [request.answer for request in requests]
        await asyncio.gather(*map(send, written, answers))
        for request in requests:
            if request.answer.error:
                raise ConfigError(self._refused(request))

    def _refused(self, seen: Seen) -> str:
        """Why there is no run at all."""
        answer, where = seen.answer, f"backend.url={self.address.base}"
        reason = f"{answer.error}: {answer.detail}" if answer.detail else answer.error
        refused = any(answer.error == f"HTTP {code}" for code in NO_IDS)
        ids = refused and self.way.as_ids and not self.way.extra  # else these may be the reason
        hint = "; backend.prompt=text sends words" if ids else ""
        return f"{where}: a first request failed: {reason}{hint}"

    # -- what is known besides ---------------------------------------------------------------------

    def unknown(self) -> Sequence[str]:
        columns = ("preemptions", "recomputed_tokens", "swapped_blocks", *SOURCES)
        return columns if self._tells_of_its_cache else (*columns, "cached_tokens")

    @property
    def _tells_of_its_cache(self) -> bool:
        """Whether answers say what a prefix cache had of their prompts."""
        finished = [seen for seen in self._seen.values() if seen.usage]
        return bool(finished) and all(seen.cache_known for seen in finished)

    def request_columns(self, ids: Sequence[RequestId]) -> Mapping[str, pa.Array]:
        requests = [self._seen[request_id] for request_id in ids]
        times = [request.answer.times for request in requests]
        return {
            SENT: pa.array([request.sent for request in requests], pa.float64()),
            TOKEN_TIMES: pa.array(times, pa.list_(pa.float64())),
        }

    def leave(self, folder: Path, workload: Workload, requests: pa.Table) -> None:
        """Write `vllm_bench.json`, what `vllm bench serve` would have written."""
        seen = [self._seen[request_id] for request_id in requests["request"].to_pylist()]
        record = benchmark(seen, workload, self.way.endpoint, self.address.model, self.config)
        record |= {"date": self._date, "max_concurrency": self.way.concurrency or workload.users}
        write_json(folder / VLLM_BENCH, record, ordered=True)

    def facts(self) -> Settings:
        return {
            "server": self.address.base,
            "model": self.address.model,
            "endpoint": self.way.endpoint,
            "prompts": "ids" if self.way.as_ids else "text",
            **lateness(self._late),
        }

    def notices(self) -> list[str]:
        address = self.address
        notice = f"requests were sent to {address.base}, which served {address.model}"
        seen = [*self._seen.values()]
        return [*failures(seen), notice, *notes(seen, self._late)]


@contextmanager
def many_open_files() -> Iterator[None]:
    """As many connections at once as this system allows, in the body."""
    try:
        import resource
    except ImportError:  # not on Windows
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

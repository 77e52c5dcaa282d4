"""The backend `http`: a server elsewhere, which is sent the workload and watched from outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import not_installed, require_number, require_whole, unknown
from pagedsim.run.backend import Backend, Settings, refuse_sessions
from pagedsim.run.http.address import Address
from pagedsim.run.http.body import PATHS
from pagedsim.run.http.sending import Sending, Way
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

    def stage(self, config: Settings, seed: int) -> Sending:
        if find_spec("aiohttp") is None:
            raise not_installed("backend=http", "serve", "aiohttp")
        way = Way(
            Address.found(self.url, self.model),
            self.endpoint,
            as_ids=self.endpoint == "completions" and self.prompt != "text",
            concurrency=self.concurrency,
            warmup=self.warmup,
            timeout=self.timeout,
            extra=self.extra or {},
        )
        return Sending(way, config, seed)

    def traffic(self, settings: Settings, seed: int) -> Workload:
        workload = super().traffic(settings, seed)
        refuse_sessions(workload, "http")
        if any(params.beam_search for params in workload.asked):
            raise ConfigError("workload.beam: must be null with backend=http, which asks for none")
        return workload

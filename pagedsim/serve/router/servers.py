"""A server over HTTP as a router sees it: what it publishes, and what the router knows itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, overload

from pagedsim.backends.sim import Simulation
from pagedsim.cluster.view import StepTimes
from pagedsim.core import ConfigError, Request, RequestId
from pagedsim.policies.routing.prefixes import Sent
from pagedsim.policies.routing.router import Replica, Replicas
from pagedsim.serve.router.upstream import Upstream


class Unpublished(ConfigError):
    """A router reads what a server does not publish."""


# -- /metrics --------------------------------------------------------------------------------------

_GAUGES = {
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_swapped": "swapped",
    "vllm:kv_cache_usage_perc": "usage",
    "vllm:gpu_cache_usage_perc": "usage",
    "sglang:num_queue_reqs": "waiting",
    "sglang:num_running_reqs": "running",
    "sglang:token_usage": "usage",
    "sglang:max_total_num_tokens": "tokens",
    "pagedsim:max_seqs": "max_seqs",
    "pagedsim:max_batched_tokens": "max_batched_tokens",
}
_LABELS = {
    "block_size": "block_size",
    "page_size": "block_size",
    "num_gpu_blocks": "total_blocks",
    "num_pages": "total_blocks",
}
"""Of `vllm:cache_config_info` and `sglang:cache_config_info`."""
_LIMITS = ("max_seqs", "max_batched_tokens")
_GAUGE = re.compile(rf"^({'|'.join(_GAUGES)})(?:\{{.*\}})? (\S+)", re.MULTILINE)
_INFO = re.compile(r"^(?:vllm|sglang):cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(rf'\b({"|".join(_LABELS)})="(\d+)"')


def published(text: str) -> dict[str, float]:
    """What a page of /metrics says, under the names of routers; of several engines in one server
    the sums, and the mean of their usage.

    >>> published('vllm:num_requests_running{engine="0"} 3\\nsglang:token_usage 0.25')
    {'running': 3.0, 'usage': 0.25}
    >>> published("vllm:num_requests_running NaN")
    {}
    """
    known: dict[str, list[float]] = {}
    for name, value in _GAUGE.findall(text):
        if isfinite(number := float(value)):
            known.setdefault(_GAUGES[name], []).append(number)
    for labels in _INFO.findall(text):
        for name, value in _LABEL.findall(labels):
            known.setdefault(_LABELS[name], []).append(float(value))
    numbers = {name: sum(values) for name, values in known.items()}
    for name in {"usage", "block_size"} & known.keys():
        numbers[name] /= len(known[name])
    if tokens := numbers.pop("tokens", 0.0):
        numbers.setdefault("block_size", 1.0)
        numbers.setdefault("total_blocks", tokens // numbers["block_size"])
    return numbers


# -- one server ------------------------------------------------------------------------------------


class ServerView(StepTimes):
    """A server behind the router: the router's `Replica`.

    What was sent there and is not answered is the router's own record: `requests`, and by their
    prompts and tokens also what is owed, stored and wanted. How many of them run, and how full
    memory is, is what /metrics said last. With stale counts (`fleet.staleness`) the numbers of
    requests are those of /metrics.
    """

    role = "both"

    def __init__(self, index: int, name: str, url: str, like: Simulation | None, old: bool) -> None:
        """`like` is the simulated server that it is taken to be where it publishes nothing; `old`
        says whether counts are stale."""
        self.index, self.name, self.url, self.upstream = index, name, url, Upstream(url)
        self.up = False
        self.told: Mapping[str, float] = {}
        """What /metrics said at the last look."""
        self.sent: dict[RequestId, Request] = {}
        """Requests without a whole answer, in the order in which they were sent."""
        self.whole: set[RequestId] = set()
        """Those of them whose answer comes in one piece: when it has begun cannot be seen."""
        self.lookup: Callable[[Request, ServerView], int] = lambda request, server: 0
        """The tokens of a prompt that its prefix cache is taken to have."""
        self._like, self._old = like, old
        self._sizes: Mapping[str, int] = {}
        if like is not None:
            scheduler, memory = like.scheduler, like.scheduler.memory
            self._sizes = {"block_size": memory.block_size, "total_blocks": memory.total}
            self._sizes |= {name: getattr(scheduler, name) for name in _LIMITS}

    def __repr__(self) -> str:
        return f"Replica({self.name} at {self.url}: {len(self.sent)} requests)"

    def _number(self, name: str) -> int:
        if name not in self.told and name not in self._sizes:
            raise self._unpublished(name)
        return int(self.told.get(name, self._sizes.get(name, 0)))

    def _unpublished(self, what: str) -> Unpublished:
        return Unpublished(
            f"{what}, which {self.url} does not publish; sizes and step times can be described by "
            "model= and hardware=, and server.* and memory.*"
        )

    # -- as a router's replica -------------------------------------------------------------------

    @property
    def max_seqs(self) -> int:
        return self._number("max_seqs")

    @property
    def max_batched_tokens(self) -> int:
        return self._number("max_batched_tokens")

    @property
    def block_size(self) -> int:
        return self._number("block_size")

    @property
    def total_blocks(self) -> int:
        return self._number("total_blocks")

    @property
    def _cost(self) -> Any:
        if self._like is None:
            raise self._unpublished("step times")
        return self._like.cost

    @property
    def requests(self) -> int:
        return self.waiting + self.running + self.swapped if self._old else len(self.sent)

    @property
    def running(self) -> int:
        running = self._number("running")
        return running if self._old else min(running, len(self.sent))

    @property
    def waiting(self) -> int:
        return self._number("waiting") if self._old else len(self.sent) - self.running

    @property
    def swapped(self) -> int:
        return int(self.told.get("swapped", 0))

    @property
    def free_blocks(self) -> int:
        if "usage" not in self.told:
            raise self._unpublished("free_blocks")
        return round(self.total_blocks * (1 - self.told["usage"]))

    @property
    def wanted_blocks(self) -> int:
        size = self.block_size
        return sum(-(-request.num_tokens // size) for request in self._queue())

    @property
    def owed_tokens(self) -> int:
        return sum(request.num_tokens for request in self._uncomputed())

    @property
    def stored_tokens(self) -> int:
        return sum(request.num_tokens for request in self.sent.values()) - self.owed_tokens

    @property
    def predicted_tokens(self) -> float:
        rest = ((sent.max_tokens or 0) - sent.generated for sent in self.sent.values())
        return float(sum(max(tokens, 0) for tokens in rest))

    @property
    def batch(self) -> Collection[Request]:
        waiting = {request.id for request in self._queue()}
        return [request for name, request in self.sent.items() if name not in waiting]

    def _silent(self) -> list[Request]:
        """Requests of whose answer nothing has come."""
        return [request for request in self.sent.values() if request.first_token_at is None]

    def _queue(self) -> list[Request]:
        """As many as wait of those that were sent last."""
        silent = self._silent()
        return silent[max(len(silent) - self.waiting, 0) :]

    def _uncomputed(self) -> list[Request]:
        """Requests whose prompts wait, or are being computed as far as that can be seen."""
        silent = self._silent()
        begun = len(silent) - self.waiting
        return [sent for at, sent in enumerate(silent) if at >= begun or sent.id not in self.whole]

    def cached_tokens(self, request: Request) -> int:
        return self.lookup(request, self)

    def host_tokens(self, request: Request, cached: int) -> int:
        return 0


class Servers(Replicas):
    """The servers that may take a request. What their prefix caches have is taken to be what was
    sent to them: a record of the router's, kept once somebody asks for it."""

    def __init__(
        self, servers: Sequence[Replica], record: Callable[[], Sent], seen_at: float | None
    ) -> None:
        """`seen_at` is the time of stale counts."""
        self._servers, self._record, self._seen_at = tuple(servers), record, seen_at

    @property
    def all_replicas(self) -> Sequence[Replica]:
        return self._servers

    @property
    def seen_at(self) -> float | None:
        return self._seen_at

    def cached_tokens(self, request: Request) -> Sequence[int]:
        return self._record().tokens(request, self)

    def __len__(self) -> int:
        return len(self._servers)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._servers)

    @overload
    def __getitem__(self, index: int) -> Replica: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Replica]: ...
    def __getitem__(self, index: int | slice) -> Replica | Sequence[Replica]:
        return self._servers[index]

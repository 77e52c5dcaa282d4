"""A server over HTTP as a router sees it: what it publishes, and what the router knows itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, overload

from pagedsim.backends.sim import Simulation
from pagedsim.cluster.view import StepTimes
from pagedsim.core import ConfigError, Request, RequestId
from pagedsim.policies.routing.prefixes import Sent
from pagedsim.policies.routing.router import Replica, Replicas


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
_GAUGE = re.compile(rf"^({'|'.join(_GAUGES)})(?:\{{.*\}})? (\S+)", re.MULTILINE)
_INFO = re.compile(r"^(?:vllm|sglang):cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(rf'\b({"|".join(_LABELS)})="(\d+)"')


def published(text: str) -> dict[str, float]:
    """What a page of /metrics says, under the names of routers; of several engines in one server
    the sums, and the mean of their usage.

    >>> published('vllm:num_requests_running{engine="0"} 3\\nsglang:token_usage 0.25')
    {'running': 3.0, 'usage': 0.25}
    """
    known: dict[str, list[float]] = {}
    for name, value in _GAUGE.findall(text):
        known.setdefault(_GAUGES[name], []).append(float(value))
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

_COUNTS: dict[str, Callable[[ServerView], Any]] = {}


def _count(read: Callable[[ServerView], Any]) -> Any:
    """A property that is as old as the last look at the server, if counts may be stale."""
    name = read.__name__
    _COUNTS[name] = read
    return property(lambda self: self.sample[name] if name in self.sample else read(self))


class ServerView(StepTimes):
    """A server behind the router: the router's `Replica`.

    The requests that the router has sent there and that are not answered are its own record:
    `requests`, and by their prompts and tokens also what is owed, stored and wanted. How many of
    them run, and how full memory is, is what /metrics said last. With stale counts (`fleet.
    staleness`) all are those of that time, and the numbers of requests are the server's own.
    """

    role = "both"

    def __init__(self, index: int, name: str, url: str, like: Simulation | None, old: bool) -> None:
        """`like` is the simulated server that it is taken to be where it publishes nothing; `old`
        says whether counts are those of the last look."""
        self.index, self.name, self.url = index, name, url
        self.up = False
        self.sent: dict[RequestId, Request] = {}
        """Requests without a whole answer, in the order in which they were sent."""
        self.whole: set[RequestId] = set()
        """Those of them whose answer comes in one piece: when it has begun cannot be seen."""
        self.sample: Mapping[str, Any] = {}
        self.lookup: Callable[[Request, ServerView], int] = lambda request, server: 0
        """The tokens of a prompt that its prefix cache is taken to have."""
        self._published: Mapping[str, float] = {}
        self._like, self._old = like, old

    def __repr__(self) -> str:
        return f"Replica({self.name} at {self.url}: {len(self.sent)} requests)"

    def look(self, numbers: Mapping[str, float]) -> None:
        """Note what /metrics says."""
        self._published = numbers
        if not self._old:
            return
        self.sample = {}
        sample: dict[str, Any] = {}
        for name, read in _COUNTS.items():
            if name not in ("waiting", "running", "swapped", "requests"):
                try:
                    sample[name] = read(self)
                except Unpublished:
                    continue
        queues = [int(numbers.get(name, 0)) for name in ("waiting", "running", "swapped")]
        if "running" in numbers:
            sample |= dict(zip(("waiting", "running", "swapped"), queues, strict=True))
            sample["requests"] = sum(queues)
        self.sample = sample

    def _number(self, name: str) -> int:
        if name in self._published:
            return int(self._published[name])
        if self._like is None or name not in _SIZES:
            raise self._unpublished(name)
        return _SIZES[name](self._like)

    def _unpublished(self, what: str) -> Unpublished:
        return Unpublished(
            f"{what}, which {self.url} does not publish; sizes and step times can be described by "
            "model= and hardware=, and server.* and memory.*"
        )

    # -- as a router's replica -------------------------------------------------------------------

    max_seqs: Any = property(lambda self: self._number("max_seqs"))
    max_batched_tokens: Any = property(lambda self: self._number("max_batched_tokens"))
    block_size: Any = property(lambda self: self._number("block_size"))
    total_blocks: Any = property(lambda self: self._number("total_blocks"))

    @property
    def cost(self) -> Any:
        if self._like is None:
            raise self._unpublished("step times")
        return self._like.cost

    @_count
    def requests(self) -> int:
        return len(self.sent)

    @_count
    def running(self) -> int:
        return min(self._number("running"), len(self.sent))

    @_count
    def waiting(self) -> int:
        return len(self.sent) - int(self.running)

    @_count
    def swapped(self) -> int:
        return int(self._published.get("swapped", 0))

    @_count
    def free_blocks(self) -> int:
        if "usage" not in self._published:
            raise self._unpublished("free_blocks")
        return round(int(self.total_blocks) * (1 - self._published["usage"]))

    @_count
    def wanted_blocks(self) -> int:
        size: int = self.block_size
        return sum(-(-request.num_tokens // size) for request in self._queue())

    @_count
    def owed_tokens(self) -> int:
        return sum(request.num_tokens for request in self._uncomputed())

    @_count
    def stored_tokens(self) -> int:
        return sum(request.num_tokens for request in self.sent.values()) - int(self.owed_tokens)

    @_count
    def predicted_tokens(self) -> float:
        rest = ((sent.max_tokens or 0) - sent.generated for sent in self.sent.values())
        return float(sum(max(tokens, 0) for tokens in rest))

    @_count
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


_SIZES: Mapping[str, Callable[[Simulation], int]] = {
    "max_seqs": lambda like: like.scheduler.max_seqs,
    "max_batched_tokens": lambda like: like.scheduler.max_batched_tokens,
    "block_size": lambda like: like.scheduler.memory.block_size,
    "total_blocks": lambda like: like.scheduler.memory.total,
}


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

"""Replicas of which every number is what a test says."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from pagedsim.core import Request
from pagedsim.policies.routing.router import Replica, Replicas, Router


@dataclass
class Fake:
    """One replica, which takes a millisecond a token and no time for its weights."""

    index: int = 0
    role: str = "both"
    waiting: int = 0
    running: int = 0
    swapped: int = 0
    max_seqs: int = 256
    max_batched_tokens: int = 1000
    block_size: int = 16
    total_blocks: int = 1000
    free_blocks: int = 1000
    wanted_blocks: int = 0
    owed_tokens: int = 0
    stored_tokens: int = 0
    predicted_tokens: float = 0.0
    batch: Collection[Request] = ()
    cached: int = 0
    """Of every prompt."""
    on_host: int = 0
    """Of every prompt, behind what is cached."""
    speed: float = 1.0

    @property
    def name(self) -> str:
        return f"replica-{self.index}"

    @property
    def requests(self) -> int:
        return self.waiting + self.running + self.swapped

    def cached_tokens(self, request: Request) -> int:
        return min(self.cached, request.num_tokens - 1)

    def host_tokens(self, request: Request, cached: int) -> int:
        return self.on_host

    def prefill_seconds(self, tokens: int, cached: int = 0) -> float:
        assert tokens > 0
        return tokens * 1e-3 / self.speed

    def decode_seconds(self, sequences: int, context: int) -> float:
        return (10 + sequences + context * 1e-3) * 1e-3 / self.speed


@dataclass
class Fleet(Replicas):
    """Those that may be named."""

    fakes: list[Fake]
    role: str = "both"
    seen_at: float | None = None
    others: list[Fake] = field(default_factory=list)
    """Other replicas that are alive."""

    @property
    def all_replicas(self) -> Sequence[Replica]:
        return [*self.fakes, *self.others]

    @overload
    def __getitem__(self, at: int) -> Replica: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Replica]: ...
    def __getitem__(self, at: int | slice) -> Replica | Sequence[Replica]:
        return self.fakes[at]

    def __len__(self) -> int:
        return len(self.fakes)


def fleet(*replicas: dict[str, Any], **settings: Any) -> Fleet:
    """A fleet of replicas with these numbers."""
    return Fleet([Fake(index, **numbers) for index, numbers in enumerate(replicas)], **settings)


def named(
    router: Router, there: Fleet, request: Request | int = 100, now: float = 0.0
) -> int | str | None:
    """The number of the replica that gets a request, or what else is answered."""
    one = request if isinstance(request, Request) else Request("a", request)
    answer = router.route(one, there, now)
    number = getattr(answer, "index", None)
    return number if answer is None or isinstance(number, int) else type(answer).__name__


def prompts(*starts: tuple[int, int]) -> list[int]:
    """A prompt of tokens by runs: each a first token and how many count on from it."""
    return [first + step for first, count in starts for step in range(count)]

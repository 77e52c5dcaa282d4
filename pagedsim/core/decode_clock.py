"""The decode clock: a decode step over hundreds of requests touches only those that change.

A decode step gives every request in the batch one token. So rather than add 1 to each of them, the
clock ticks once, and a request on the clock is as long as it was at tick 0 plus the ticks. What
must happen to it later (its last block is full, its last token is sampled) stands in a calendar
under the tick at which it is due. The sums that cost models need are one product and one addition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import IntegrityError


@mypyc_attr(allow_interpreted_subclasses=True)
class DecodeEntry:
    """The lengths of a request, on the clock while it decodes or off it."""

    __slots__ = ("_clock", "_generated", "_num_seqs", "_prefilled", "_prompt_len")

    def __init__(self, prompt_len: int, num_seqs: int) -> None:
        self._prompt_len = prompt_len
        self._num_seqs = num_seqs
        self._clock: DecodeClock[Any] = STILL
        self._generated = 0
        self._prefilled = 0  # tokens in memory while it does not decode

    @property
    def prompt_len(self) -> int:
        """Tokens of its prompt."""
        return self._prompt_len

    @property
    def num_seqs(self) -> int:
        """Its live sequences; each takes a seat in the batch."""
        return self._num_seqs

    @property
    def generated(self) -> int:
        """Tokens that each of its sequences has produced."""
        return self._generated + self._clock.tick

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens of one sequence."""
        return self._prompt_len + self._generated + self._clock.tick

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are in memory, in one sequence."""
        return self._prefilled if self._clock is STILL else self.num_tokens - 1

    @property
    def decoding(self) -> bool:
        """Whether it has its whole context in memory and gains a token with each step."""
        return self._clock is not STILL

    @property
    def ready(self) -> bool:
        """Whether all but its last sampled token is in memory, so that it can decode."""
        return self.generated > 0 and self.computed == self.num_tokens - 1


R = TypeVar("R", bound=DecodeEntry)
Calendar = dict[int, list[R]]


class DecodeClock(Generic[R]):
    """Counts decode steps, and lists the requests that are due for attention at each tick.

    `memory_need(request)` is the length at which a request next needs memory (None: never),
    `end(request)` the length at which it ends (None: it is there), and `group(request)` the key by
    which generated tokens are summed.
    """

    def __init__(
        self,
        memory_need: Callable[[R], int | None],
        end: Callable[[R], int | None],
        group: Callable[[R], Hashable] = lambda request: None,
    ) -> None:
        self.tick = 0
        self.num_seqs = 0  # sequences on the clock
        self.wide: dict[int, int] = {}  # requests of several sequences, by num_seqs
        self.version = 0  # changes whenever a request joins or leaves
        self.memory: Calendar[R] = {}  # requests that need memory before each tick
        self.ends: Calendar[R] = {}
        self._base = 0  # sum over sequences of their length at tick 0
        self._generated = 0  # sum over requests of what they had generated at tick 0
        self.requests = 0  # on the clock
        self._memory_need = memory_need
        self._end = end
        self._group = group
        # Requests, and generated at tick 0; None until groups are counted.
        self._groups: dict[Hashable, tuple[int, int]] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy of a request that does not decode does not decode either.
        return "STILL" if self is STILL else super().__reduce_ex__(protocol)

    @property
    def generated_in_all(self) -> int:
        """Tokens that all requests on the clock have generated."""
        return self._generated + self.requests * self.tick

    @property
    def grouped(self) -> bool:
        """Whether it counts by group."""
        return self._groups is not None

    def count_groups(self, requests: Iterable[R]) -> None:
        """Count by group from now on; `requests` are all on the clock."""
        self._groups = {}
        for request in requests:
            self._count(self._groups, request, 1)

    def generated(self, group: Hashable) -> int:
        """Tokens that the requests of a group have generated, one sequence of each."""
        assert self._groups is not None
        requests, generated = self._groups.get(group, (0, 0))
        return generated + requests * self.tick

    @property
    def context(self) -> int:
        """Sum of the lengths of all sequences on the clock."""
        return self._base + self.num_seqs * self.tick

    def join(self, request: R) -> None:
        """Let `request` gain a token with each tick from now on."""
        request._generated = generated = request._generated - self.tick
        request._clock = self
        self.requests += 1
        self.version += 1
        num_seqs, length = request._num_seqs, request._prompt_len + generated
        self.num_seqs += num_seqs
        self._base += num_seqs * length
        self._generated += generated
        if self._groups is not None:
            self._count(self._groups, request, 1)
        if num_seqs > 1:
            self.wide[num_seqs] = self.wide.get(num_seqs, 0) + 1
        if (need := self._memory_need(request)) is not None:
            _note(self.memory, request, need - length)
        if (end := self._end(request)) is not None:
            _note(self.ends, request, end - length)

    def leave(self, request: R) -> None:
        """Take `request` off the clock, with the length that it has."""
        num_seqs, generated = request._num_seqs, request._generated
        length = request._prompt_len + generated
        if (need := self._memory_need(request)) is not None:
            _strike(self.memory, request, need - length)
        if (end := self._end(request)) is not None:
            _strike(self.ends, request, end - length)
        self._base -= num_seqs * length
        self._generated -= generated
        if self._groups is not None:
            self._count(self._groups, request, -1)
        if num_seqs > 1:
            self.wide[num_seqs] -= 1
            if not self.wide[num_seqs]:
                del self.wide[num_seqs]
        self.num_seqs -= num_seqs
        self.requests -= 1
        self.version += 1
        request._prefilled = length + self.tick - 1
        request._generated = generated + self.tick
        request._clock = STILL

    def _count(self, groups: dict[Hashable, tuple[int, int]], request: R, by: int) -> None:
        """Add a request to its group, or remove it."""
        group = self._group(request)
        requests, generated = groups.get(group, (0, 0))
        if requests + by:
            groups[group] = (requests + by, generated + by * request._generated)
        else:
            del groups[group]

    def reschedule(self, requests: list[R], delay: int | None) -> None:
        """Move all that `memory` has for this tick `delay` ticks on.

        Without `delay` the next need of each is looked up.
        """
        calendar = self.memory
        del calendar[self.tick]
        if delay is None:
            for request in requests:
                self._note_need(request)
        elif later := calendar.get(self.tick + delay):
            later += requests
        else:
            calendar[self.tick + delay] = requests

    def memory_need_changed(self, request: R, before: int | None) -> None:
        """The memory need of one request was `before` and has changed."""
        if before is not None:
            _strike(self.memory, request, before - request._prompt_len - request._generated)
        self._note_need(request)

    def hold(self, request: R) -> None:
        """Undo the last tick for a request that got no token in that step."""
        self.leave(request)
        request._generated -= 1
        self.join(request)

    def _note_need(self, request: R) -> None:
        if (need := self._memory_need(request)) is not None:
            _note(self.memory, request, need - request._prompt_len - request._generated)

    def check(self, requests: list[R]) -> None:
        """Raise IntegrityError unless exactly `requests` are on the clock, with true sums."""
        if len(requests) != self.requests:
            raise IntegrityError(f"the clock counts {self.requests} requests, not {len(requests)}")
        context = sum(r.num_seqs * r.num_tokens for r in requests)
        if context != self.context:
            raise IntegrityError(f"the clock sums {self.context} tokens, its requests {context}")
        if (num_seqs := sum(r.num_seqs for r in requests)) != self.num_seqs:
            raise IntegrityError(
                f"the clock counts {self.num_seqs} sequences, {num_seqs} are on it"
            )
        if (generated := sum(r.generated for r in requests)) != self.generated_in_all:
            raise IntegrityError(
                f"the clock sums {self.generated_in_all} generated, not {generated}"
            )
        if self._groups is not None:
            groups = Counter(map(self._group, requests))
            if groups != {group: count for group, (count, _) in self._groups.items()} or (
                generated != sum(map(self.generated, groups))
            ):
                raise IntegrityError(f"the clock counts {self._groups} by group, of {dict(groups)}")
        wide = Counter(r.num_seqs for r in requests if r.num_seqs > 1)
        if wide != self.wide:
            raise IntegrityError(f"the clock counts widths {self.wide}, not {dict(wide)}")
        self._check_calendar("memory", self.memory, requests, self._memory_need)
        self._check_calendar("end", self.ends, requests, self._end)

    def _check_calendar(
        self,
        name: str,
        calendar: Calendar[R],
        requests: list[R],
        length: Callable[[R], int | None],
    ) -> None:
        want: dict[int, set[R]] = {}
        for request in requests:
            if (at := length(request)) is not None:
                tick = at - request._prompt_len - request._generated
                want.setdefault(tick, set()).add(request)
        have = {tick: set(entry) for tick, entry in calendar.items()}
        if have != want:
            raise IntegrityError(f"the {name} calendar says {have}, its requests need {want}")
        if past := [tick for tick in have if tick < self.tick]:
            raise IntegrityError(f"the {name} calendar still has ticks {past}: it is {self.tick}")
        if sum(map(len, calendar.values())) > sum(map(len, want.values())):
            raise IntegrityError(f"the {name} calendar has a request twice: {calendar}")


def _note(calendar: Calendar[R], request: R, tick: int) -> None:
    requests = calendar.get(tick)
    if requests is None:
        calendar[tick] = [request]
    else:
        requests.append(request)


def _strike(calendar: Calendar[R], request: R, tick: int) -> None:
    requests = calendar[tick]
    if len(requests) == 1 and requests[0] is request:
        del calendar[tick]
    else:
        requests.remove(request)


STILL: DecodeClock[Any] = DecodeClock(lambda request: None, lambda request: 0)
"""The clock that never ticks: that of a request that does not decode."""

"""The decode clock: how a step over hundreds of requests touches only those that change.

A decode step gives every request in the batch one token. So rather than add 1 to each of them,
the clock ticks once, and a request that decodes ("rides the clock") is as long as it was at
tick 0 of its ride plus the ticks. What must happen to it later (its last block is full, its last
token is out) stands in a calendar under the tick at which it falls due, and the sums that cost
models want are one product and one addition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import IntegrityError


@mypyc_attr(allow_interpreted_subclasses=True)
class DecodeEntry:
    """What the clock knows of a request: how long it is, riding or standing still."""

    __slots__ = ("_clock", "_generated", "_prefilled", "prompt_len", "width")

    def __init__(self, prompt_len: int, width: int) -> None:
        self.prompt_len = prompt_len
        self.width = width  # sequences alive; each takes a seat in the batch
        self._clock: Clock[Any] = STILL
        self._generated = 0
        self._prefilled = 0  # tokens in memory while it does not decode

    @property
    def generated(self) -> int:
        """Tokens that each of its sequences has produced."""
        return self._generated + self._clock.tick

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens of one sequence."""
        return self.prompt_len + self._generated + self._clock.tick

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


class Clock(Generic[R]):
    """Counts decode steps and remembers which riders need attention at which tick.

    `memory_need(request)` tells the length at which a rider next needs its memory looked after
    (None: never); `end(request)` the length at which it ends (None: it has come there); `group`
    by what to sum up what riders have generated.
    """

    __slots__ = (
        "_base",
        "_end",
        "_group",
        "_groups",
        "_memory_need",
        "_said",
        "ends",
        "memory",
        "riders",
        "tick",
        "version",
        "wide",
        "width",
    )

    def __init__(
        self,
        memory_need: Callable[[R], int | None],
        end: Callable[[R], int | None],
        group: Callable[[R], Hashable] = lambda rider: None,
    ) -> None:
        self.tick = 0
        self.width = 0  # sequences riding
        self.wide: dict[int, int] = {}  # riders of several sequences, by how many
        self.version = 0  # changes with every boarding and alighting
        self.memory: Calendar[R] = {}  # whose memory needs attention before which tick
        self.ends: Calendar[R] = {}
        self._base = 0  # sum over sequences of their length at tick 0
        self._said = 0  # sum over riders of what they had generated at tick 0
        self.riders = 0  # requests riding
        self._memory_need = memory_need
        self._end = end
        self._group = group
        # Riders, and generated at tick 0; None until somebody asks for a group.
        self._groups: dict[Hashable, tuple[int, int]] | None = None

    @property
    def generated_in_all(self) -> int:
        """Tokens that all riders have generated."""
        return self._said + self.riders * self.tick

    @property
    def grouped(self) -> bool:
        """Whether it counts by group."""
        return self._groups is not None

    def count_groups(self, riders: Iterable[R]) -> None:
        """Count by group from now on; `riders` are all that ride."""
        self._groups = {}
        for request in riders:
            self._count(self._groups, request, 1)

    def generated(self, group: Hashable) -> int:
        """Tokens that the riders of a group have generated, one sequence of each."""
        assert self._groups is not None
        riders, generated = self._groups.get(group, (0, 0))
        return generated + riders * self.tick

    @property
    def context(self) -> int:
        """Sum of the lengths of all riding sequences."""
        return self._base + self.width * self.tick

    def board(self, request: R) -> None:
        """From now on `request` gains a token with each tick."""
        request._generated = generated = request._generated - self.tick
        request._clock = self
        self.riders += 1
        self.version += 1
        width, length = request.width, request.prompt_len + generated
        self.width += width
        self._base += width * length
        self._said += generated
        if self._groups is not None:
            self._count(self._groups, request, 1)
        if width > 1:
            self.wide[width] = self.wide.get(width, 0) + 1
        if (need := self._memory_need(request)) is not None:
            _note(self.memory, request, need - length)
        if (end := self._end(request)) is not None:
            _note(self.ends, request, end - length)

    def alight(self, request: R) -> None:
        """`request` stops here, with the length that it has."""
        width, generated = request.width, request._generated
        length = request.prompt_len + generated
        if (need := self._memory_need(request)) is not None:
            _strike(self.memory, request, need - length)
        if (end := self._end(request)) is not None:
            _strike(self.ends, request, end - length)
        self._base -= width * length
        self._said -= generated
        if self._groups is not None:
            self._count(self._groups, request, -1)
        if width > 1:
            self.wide[width] -= 1
            if not self.wide[width]:
                del self.wide[width]
        self.width -= width
        self.riders -= 1
        self.version += 1
        request._prefilled = length + self.tick - 1
        request._generated = generated + self.tick
        request._clock = STILL

    def _count(self, groups: dict[Hashable, tuple[int, int]], request: R, by: int) -> None:
        """A rider more, or less, in its group."""
        group = self._group(request)
        riders, generated = groups.get(group, (0, 0))
        if riders + by:
            groups[group] = (riders + by, generated + by * request._generated)
        else:
            del groups[group]

    def attended(self, riders: list[R], delay: int | None) -> None:
        """All that `memory` had for this tick are served, and due again `delay` ticks later.

        Without `delay` each is asked anew.
        """
        calendar = self.memory
        del calendar[self.tick]
        if delay is None:
            for request in riders:
                self._note_need(request)
        elif later := calendar.get(self.tick + delay):
            later += riders
        else:
            calendar[self.tick + delay] = riders

    def moved(self, request: R, before: int | None) -> None:
        """The memory need of one rider was `before` and has changed."""
        if before is not None:
            _strike(self.memory, request, before - request.prompt_len - request._generated)
        self._note_need(request)

    def hold(self, request: R) -> None:
        """The last tick was not for this rider: it got no token in that step."""
        self.alight(request)
        request._generated -= 1
        self.board(request)

    def _note_need(self, request: R) -> None:
        if (need := self._memory_need(request)) is not None:
            _note(self.memory, request, need - request.prompt_len - request._generated)

    def check(self, riders: list[R]) -> None:
        """Raise IntegrityError unless exactly `riders` ride, with true sums and calendars."""
        if len(riders) != self.riders:
            raise IntegrityError(f"the clock counts {self.riders} riders, the queue {len(riders)}")
        context = sum(r.width * r.num_tokens for r in riders)
        if context != self.context:
            raise IntegrityError(f"the clock sums {self.context} tokens, its riders {context}")
        if (width := sum(r.width for r in riders)) != self.width:
            raise IntegrityError(f"the clock counts {self.width} sequences, {width} ride")
        if (said := sum(r.generated for r in riders)) != self.generated_in_all:
            raise IntegrityError(f"the clock sums {self.generated_in_all} generated, of {said}")
        if self._groups is not None:
            groups = Counter(map(self._group, riders))
            if groups != {group: count for group, (count, _) in self._groups.items()} or (
                said != sum(map(self.generated, groups))
            ):
                raise IntegrityError(f"the clock counts {self._groups} by group, of {dict(groups)}")
        wide = Counter(r.width for r in riders if r.width > 1)
        if wide != self.wide:
            raise IntegrityError(f"the clock counts groups of {self.wide}, of {dict(wide)} ride")
        self._check_calendar("memory", self.memory, riders, self._memory_need)
        self._check_calendar("end", self.ends, riders, self._end)

    def _check_calendar(
        self,
        name: str,
        calendar: Calendar[R],
        riders: list[R],
        length: Callable[[R], int | None],
    ) -> None:
        want: dict[int, set[R]] = {}
        for request in riders:
            if (at := length(request)) is not None:
                tick = at - request.prompt_len - request._generated
                want.setdefault(tick, set()).add(request)
        have = {tick: set(entry) for tick, entry in calendar.items()}
        if have != want:
            raise IntegrityError(f"the {name} calendar says {have}, its riders need {want}")
        if past := [tick for tick in have if tick < self.tick]:
            raise IntegrityError(f"the {name} calendar still has ticks {past}: it is {self.tick}")
        if sum(map(len, calendar.values())) > sum(map(len, want.values())):
            raise IntegrityError(f"the {name} calendar has a rider twice: {calendar}")


def _note(calendar: Calendar[R], request: R, tick: int) -> None:
    riders = calendar.get(tick)
    if riders is None:
        calendar[tick] = [request]
    else:
        riders.append(request)


def _strike(calendar: Calendar[R], request: R, tick: int) -> None:
    riders = calendar[tick]
    if len(riders) == 1 and riders[0] is request:
        del calendar[tick]
    else:
        riders.remove(request)


STILL: Clock[Any] = Clock(lambda request: None, lambda request: 0)
"""The clock that never ticks: where a request's length stands while it does not decode."""

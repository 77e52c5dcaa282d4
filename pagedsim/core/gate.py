"""How requests come to a scheduler and leave it; with their keys and values, if they can be read.

A request that decodes may go on at another scheduler:

        here                                     there
        …decodes                                 reserve(request) -> True: room for all of it
        part(request): out of the batch,
        its blocks stay
        its keys and values are copied ────────▶
        let_go(request): its blocks are free     board(request): it decodes in the next step

`reserve` may come before `detach` or after it. Where copies are made while the request goes on
decoding, `reserve` is asked again for the tokens that it has gained, and once more after `detach`.
Who was told "not now" comes before those who wait (under a policy with an order, if it ranks
before their first), so that neither memory nor a seat is taken from it again and again; it comes
after those who are swapped out. What it asks for holds them back until it is given, so it must
ask again after each step and whenever memory has come free, or call `release_reservation`.
Several who hold a part of what they need can wait for each other: then one of them must let go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

from pagedsim.core.batching import Batching
from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import ConfigError, RequestError, is_whole
from pagedsim.core.events import Arrived
from pagedsim.core.holdings import KVTransfer, Placeholder
from pagedsim.core.memory import Memory
from pagedsim.core.plan import StepPlan
from pagedsim.core.policy import Policy
from pagedsim.core.queues import Queues
from pagedsim.core.request import Request, RequestId, State

_NEW: Final = State.NEW


@mypyc_attr(allow_interpreted_subclasses=True)
class Gate:
    """The part of a scheduler that requests pass when they come and go."""

    def __init__(self, queues: Queues, policy: Policy, batching: Batching) -> None:
        self.queues = queues
        self.policy = policy
        self.batching = batching
        self.memory: Memory = queues.memory
        self.requests: dict[RequestId, Request] = queues.requests
        self._placeholders = queues.holdings.placeholders
        self.pending: StepPlan | None = None
        """The plan that is neither committed nor launched."""
        self.disturbed = False
        """Whether so much has come from outside since the plan that the next is no repetition; who
        merely came to wait behind others is none the less one more in `waiting`."""
        self._pending_events: deque[Arrived] = deque()  # what the policy is not told of yet

    # -- one server's affairs --------------------------------------------------------------------

    def add(self, request: Request, now: float, output_len: int | None = None) -> None:
        """Queue a request: a new one, or one that is away and computes all its tokens again.

        In a simulation `output_len` is the length at which its output ends, which no policy sees;
        an engine leaves it out and tells `commit` who finished. Either way it ends at its
        `max_tokens` and at `max_model_len`.

        The policy hears of it with the next plan: an engine cannot look at who comes while a step
        runs, so what the policy sees then must be the same in a simulation.
        """
        if request.id in self.requests or self._placeholders:
            self._refuse_known(request)
        if output_len is not None and output_len <= request.generated:
            raise _ended(request, output_len)
        if request.state is not _NEW:
            self._refuse_unfit(request)
            self.queues.count_lost(request)
        queues = self.queues
        queues.now = now
        waiting = queues.waiting
        first = waiting.head if queues.steady and len(waiting) else None
        try:
            queues.enter(request, output_len)
        except TypeError:
            queues.refuse_mixed_ranks(request)
            raise
        if first is None or waiting.head is not first or queues.looking_back:
            self.disturbed = True
        if self.queues.observing:
            self._pending_events.append(Arrived(request, now))

    def _deliver_events(self) -> None:
        """Tell the policy who has come."""
        while self._pending_events:
            self.policy.observe(self._pending_events.popleft())

    def abort(self, request_id: RequestId, now: float) -> Request:
        """End a request wherever it is, and free all that it holds here.

        One that is away is ended as well; what another scheduler holds for it, that one is to let
        go.
        """
        request = self.requests.get(request_id)
        if request is None:
            return self._abort_away(request_id, now)
        self._deliver_events()
        in_batch = request in self.queues.running
        self._materialise_decodes()
        self.queues.take_out(request)
        if in_batch:
            self.memory.retract(request, request.computed)
        self.disturbed = True
        self.queues.leave(request, State.ABORTED, "abort", now)
        return request

    def _abort_away(self, request_id: RequestId, now: float) -> Request:
        placeholder = self._placeholders.get(request_id)
        if placeholder is None:
            raise RequestError(f"cannot abort request {request_id!r}: not known, or ended already")
        request = placeholder.of
        if request.state is not State.AWAY:
            raise RequestError(
                f"cannot abort request {request_id!r}: it is {request.state.value} at another "
                "scheduler; abort it there, and let it go here"
            )
        self.release_reservation(request)
        request.state, request.finish_reason, request.finished_at = State.ABORTED, "abort", now
        return request

    def crash(self, now: float) -> list[Request]:
        """Lose everything at once: who is here is aborted, what is held for others is let go,
        plans that are under way will not be told of, and caches are empty.

        Returns who was here, in the order of `requests`.
        """
        self.pending = None
        lost = [self.abort(name, now) for name in list(self.requests)]
        for request in self.held:
            self.release_reservation(request)
        self.queues.in_flight.clear()
        self.queues.copies = {}
        self.memory.forget()
        return lost

    def withdraw(self, request: Request, now: float) -> int:
        """Take a living request out, wherever it is, so that it can be added to another scheduler.

        All that it holds is freed, and what it has said stays said: it computes these tokens
        again. Of a step that is under way its part is lost. Returns `output_len` for `add`: the
        length at which its output would have ended here.
        """
        self._refuse_stranger(request)
        self._deliver_events()
        self.queues.now = now
        self._materialise_decodes()
        output_len = self.queues.withdraw(request)
        self._strike(request)
        return output_len

    def infeasible(self, request: Request) -> str | None:
        """Why a request can never be served, or None."""
        if request.generated and request.id not in self.requests:
            return self.queues.outgrown(request)
        return self.batching.infeasible(self.queues, request)

    # -- going on elsewhere ----------------------------------------------------------------------

    @property
    def detach_error(self) -> str | None:
        """Why nobody can go on elsewhere with its keys and values, or None."""
        if self.memory.can_hold:
            return None
        name = type(self.memory).__name__
        return f"{name} holds nothing for requests that are elsewhere: choose paged or prefix"

    @property
    def attach_error(self) -> str | None:
        """Why nobody can come with its keys and values, or None."""
        if self.batching.joins_midway:
            return self.detach_error
        return f"{type(self.batching).__name__} lets nobody join a batch: choose another batching"

    @property
    def held(self) -> Collection[Request]:
        """For whom memory is held: who has parted, and who is to come."""
        return [placeholder.of for placeholder in self._placeholders.values()]

    @property
    def asking(self) -> Collection[Request]:
        """Who was told "not now" by `reserve` or `attach`, and should ask again or be let go."""
        holdings = self.queues.holdings
        return [
            placeholder.of
            for placeholder in (*holdings.asking.values(), *holdings.standing.values())
        ]

    def detach(self, request: Request, now: float) -> int:
        """Take a request that decodes out of the batch, so that it can go on elsewhere.

        It is alive, and no longer among `requests`. Its blocks stay as they are until
        `release_reservation`, or until it is attached here again. Of a step that is under way its
        part is lost: it will decode that token elsewhere. Returns `output_len` for `attach`: the
        length at which its output would have ended here.
        """
        if reason := self.detach_error:
            raise ConfigError(reason)
        self._refuse_stranger(request)
        if request.params.width > 1:
            raise RequestError(f"request {request.id!r} cannot part: it is a group of sequences")
        if not request.decoding or request.generated <= self.queues.under_way(request):
            raise RequestError(f"request {request.id!r} cannot part: it does not decode yet")
        self.queues.now = now
        self._materialise_decodes()
        output_len = self.queues.detach(request)
        self._strike(request)
        return output_len

    def reserve(self, request: Request, now: float, tokens: int | None = None) -> bool:
        """Hold memory for a request that is to come with its keys and values; False: not now.

        It is for `tokens` tokens, or for those that the request has by now, of which the last is
        computed here. The memory that was reserved before stays reserved, and is added to. The
        beginning of a prompt that the prefix cache has need not be brought (see `kv_transfer`);
        what is brought may be written when the next plan has made its moves. No seat is reserved.
        RequestError if the request can never be served here.
        """
        if reason := self.attach_error:
            raise ConfigError(reason)
        placeholder = self._placeholders.get(request.id)
        if placeholder is None:
            self._refuse_known(request)
        elif placeholder.of is not request:
            raise RequestError(f"request {request.id!r}: memory is held for another of that id")
        elif placeholder.kept:
            raise RequestError(f"request {request.id!r}: its memory is kept here: board, or let go")
        tokens = request.num_tokens if tokens is None else tokens
        self._refuse_never(request, tokens)
        self.queues.now = now
        self.disturbed = True
        placeholder = placeholder or self.queues.expect(request)
        placeholder.follow()
        return self.queues.reserve(placeholder, tokens, self.batching.margin(self.queues))

    def kv_transfer(self, request: Request, carried: int = 0) -> KVTransfer:
        """What is still to be brought here of a request for which memory is reserved.

        These are the keys and values of the tokens that it has computed by now, less the first
        ones that the prefix cache had, or that have been `carried` before.
        """
        placeholder = self._held_for(request)
        there = max(carried, placeholder.computed)
        blocks = self.memory.blocks_for(request.computed) - there // self.memory.block_size
        tokens = request.computed - there
        return KVTransfer(tokens, blocks) if tokens > 0 else KVTransfer(0, 0)

    def attach(self, request: Request, now: float, output_len: int | None = None) -> bool:
        """A request has come with its keys and values; False: no seat is free now.

        It has parted elsewhere, and memory is reserved here for all of it, or it has parted here
        and its blocks are kept. It joins the batch, and decodes from the next plan on. `output_len`
        is what `detach` returned.
        """
        placeholder = self._held_for(request)
        if request.state is not State.AWAY or not request.ready:
            what = "has no keys and values" if request.state is State.AWAY else "has not parted"
            raise RequestError(f"request {request.id!r} cannot board: it {what}")
        self._refuse_gap(placeholder)
        if output_len is not None and output_len <= request.generated:
            raise _ended(request, output_len)
        queues = self.queues
        queues.now = now
        self.disturbed = True
        placeholder.follow()
        if queues.seats + request.width > queues.max_seqs:
            queues.holdings.standing[request.id] = placeholder
            return False
        if queues.ranked:
            queues.order(request)  # first, since a policy's rank may fail
        self._materialise_decodes()
        queues.attach(placeholder, output_len)
        if (pending := self.pending) is not None and pending.decode_count:
            pending.held = (*pending.held, request)  # the plan that is under way is without it
        return True

    def release_reservation(self, request: Request) -> None:
        """Free what is held here for a request: it has been read, or is not needed any more."""
        self.disturbed = True
        self.queues.holdings.drop(self._held_for(request))

    # -- what is refused -------------------------------------------------------------------------

    def _held_for(self, request: Request) -> Placeholder:
        placeholder = self._placeholders.get(request.id)
        if placeholder is None or placeholder.of is not request:
            raise RequestError(f"request {request.id!r}: no memory is held for it here")
        return placeholder

    def _refuse_known(self, request: Request) -> None:
        if request.id in self.requests:
            raise RequestError(f"request {request.id!r} is already here; ids must be unique")
        if request.id in self._placeholders:
            raise RequestError(f"request {request.id!r}: memory is held for it here: let it go")

    def _refuse_stranger(self, request: Request) -> None:
        if self.requests.get(request.id) is not request:
            raise RequestError(f"request {request.id!r}: not known here, or ended already")

    def _refuse_unfit(self, request: Request) -> None:
        """Raise RequestError for one that is not new, and not away or too long by now."""
        if request.state is not State.AWAY:
            raise RequestError(f"request {request.id!r} was {request.state.value} already")
        if request.generated and (reason := self.queues.outgrown(request)):
            raise RequestError(f"request {request.id!r}: {reason}")

    def _refuse_never(self, request: Request, tokens: int) -> None:
        """Raise RequestError for what could not be reserved in an empty memory either."""
        if not request.alive:
            raise RequestError(f"request {request.id!r} was {request.state.value} already")
        if request.state is State.NEW:
            raise RequestError(f"request {request.id!r} is new, and has nothing that could come")
        if request.params.width > 1:
            raise RequestError(f"request {request.id!r} cannot board: it is a group of sequences")
        if reason := self.queues.outgrown(request):
            raise RequestError(f"request {request.id!r} can never be served here: {reason}")
        if not is_whole(tokens) or not 0 < tokens <= self.queues.max_model_len:
            raise RequestError(
                f"request {request.id!r}: tokens={tokens}: must be a whole number from 1 to "
                f"max_model_len={self.queues.max_model_len}"
            )

    def _refuse_gap(self, placeholder: Placeholder) -> None:
        """Raise RequestError unless what is held can be all that the request has computed."""
        computed, name = placeholder.of.computed, placeholder.id
        if placeholder.kept and placeholder.computed != computed:
            raise RequestError(
                f"request {name!r} cannot board: {placeholder.computed} tokens are kept here, and "
                f"it has computed {computed} by now"
            )
        if not self.queues.holdings.covers(placeholder, computed):
            reserved = sum(map(len, placeholder.tables)) * self.memory.block_size
            raise RequestError(
                f"request {name!r} cannot board: it has computed {computed} tokens, and memory is "
                f"reserved for {reserved}"
            )

    def _materialise_decodes(self) -> None:
        """The batch is about to change: who decodes in the plan under way is found out before."""
        if self.pending is not None:
            self.pending.materialise_decodes()

    def _strike(self, request: Request) -> None:
        """Plans that are under way have nothing to do with a request any more."""
        self.disturbed = True
        for plan in self.queues.in_flight:
            plan.gone = (*plan.gone, request)
            plan.ending = [one for one in plan.ending if one is not request]
        if (pending := self.pending) is not None:
            pending.gone = (*pending.gone, request)
            pending.held = tuple(one for one in pending.held if one is not request)


def _ended(request: Request, output_len: int) -> RequestError:
    """The error for an output that would have ended already."""
    least = request.generated + 1
    return RequestError(f"request {request.id!r}: output_len={output_len}: at least {least}")

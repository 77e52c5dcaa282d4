"""Migration: a request that decodes continues at another scheduler with its keys and values.

        source                                    target
        …decodes                                  reserve(request) -> True: room for all of it
        detach(request): out of the batch,
        its blocks stay allocated
        keys and values are copied ─────────────▶
        release_reservation(request)              attach(request): it decodes in the next step

`reserve` may come before `detach` or after it. Where copies are made while the request continues
to decode, `reserve` is called again for the tokens that it has gained, and once more after
`detach`. A reservation that was refused comes before waiting requests (under a policy with an
order, if it ranks before their head), so that neither memory nor a seat is taken from it again and
again; it comes after swapped requests. It holds waiting requests back until it is granted, so the
driver must retry it after each step and whenever memory has come free, or release it. Several
partial reservations can wait for each other: then one of them must be released.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from pagedsim.core.batching import Batching
from pagedsim.core.errors import ConfigError, RequestError, is_whole
from pagedsim.core.memory import Memory
from pagedsim.core.queues import Queues
from pagedsim.core.request import Request, State
from pagedsim.core.reservations import Placeholder


class KVTransfer(NamedTuple):
    """Keys and values still to be copied to a scheduler."""

    tokens: int
    blocks: int
    """Blocks of the target, the last one perhaps filled in part."""


class Migration:
    """Requests that leave one scheduler, or join it, with their keys and values."""

    def __init__(self, queues: Queues, batching: Batching) -> None:
        self._queues = queues
        self._batching = batching
        self._memory = queues.memory
        self._reservations = queues.reservations
        self._placeholders = queues.reservations.placeholders

    @property
    def detach_error(self) -> str | None:
        """Why no request can leave with its keys and values, or None."""
        if self._queues.connector is not None:
            return "with a host tier (offload) keys and values do not leave; choose offload=none"
        if self._memory.can_hold:
            return None
        name, batching = type(self._memory).__name__, type(self._batching).__name__
        also = "" if self._batching.joins_midway else f", and another batching than {batching}"
        return (
            f"{name} holds nothing for requests that are elsewhere: choose memory=paged or "
            f"prefix{also}"
        )

    @property
    def attach_error(self) -> str | None:
        """Why no request can join with its keys and values, or None."""
        if self._batching.joins_midway:
            return self.detach_error
        name = type(self._batching).__name__
        return f"{name} cannot accept a migrated request: choose another batching"

    @property
    def held(self) -> Collection[Request]:
        """Requests for which blocks are held here: detached or to be attached."""
        return [placeholder.request for placeholder in self._placeholders.values()]

    @property
    def deferred(self) -> Collection[Request]:
        """Requests whose `reserve` or `attach` was refused: to be retried or released."""
        reservations = self._reservations
        refused = (*reservations.awaiting_memory.values(), *reservations.awaiting_seat.values())
        return [placeholder.request for placeholder in refused]

    def detach(self, request: Request, now: float) -> int:
        """Take a request that decodes out of the batch, so that it can continue elsewhere.

        It is alive, and no longer among the scheduler's `requests`. Its blocks stay as they are
        until `release_reservation`, or until it is attached here again. Its part in a step that is
        in flight is lost: it will decode that token elsewhere. Returns `output_len` for `attach`:
        the length at which its output would have ended here.
        """
        if reason := self.detach_error:
            raise ConfigError(reason)
        queues = self._queues
        queues.require_present(request)
        if request.params.num_seqs > 1:
            raise RequestError(f"request {request.id!r} cannot migrate: it is a group of sequences")
        if not request.decoding or request.generated <= queues.tokens_in_flight(request):
            raise RequestError(f"request {request.id!r} cannot migrate: it does not decode yet")
        queues._now = now
        queues.materialise_decodes()
        output_len = queues.detach(request)
        queues.discard_from_plans(request)
        return output_len

    def reserve(self, request: Request, now: float, tokens: int | None = None) -> bool:
        """Hold memory for a request that is to come with its keys and values; False: not now.

        It is for `tokens` tokens, or for those that the request has by now, of which the last is
        computed here. Memory that was reserved before stays reserved, and is added to. Tokens that
        the prefix cache has need not be copied (see `kv_transfer`); what is copied may be written
        when the next plan has made its moves. No seat is reserved. RequestError if the request can
        never be served here.
        """
        if reason := self.attach_error:
            raise ConfigError(reason)
        queues = self._queues
        placeholder = self._placeholders.get(request.id)
        if placeholder is None:
            queues.require_absent(request)
        elif placeholder.request is not request:
            raise RequestError(f"request {request.id!r}: memory is held for another of that id")
        elif placeholder.kept:
            raise RequestError(
                f"request {request.id!r}: its memory is kept here: attach or release it"
            )
        tokens = request.num_tokens if tokens is None else tokens
        self._require_reservable(request, tokens)
        queues._now = now
        queues.disturbed = True
        placeholder = placeholder or queues.expect(request)
        placeholder.follow()
        return queues.reserve(placeholder, tokens, self._batching.margin(queues))

    def kv_transfer(self, request: Request, copied: int = 0) -> KVTransfer:
        """What is still to be copied here of a request for which memory is reserved.

        These are the keys and values of the tokens that it has computed by now, less the first
        ones that the prefix cache had, or that have been `copied` before.
        """
        placeholder = self._placeholder_of(request)
        known = max(copied, placeholder.computed)
        blocks = self._memory.blocks_for(request.computed) - known // self._memory.block_size
        tokens = request.computed - known
        return KVTransfer(tokens, blocks) if tokens > 0 else KVTransfer(0, 0)

    def attach(self, request: Request, now: float, output_len: int | None = None) -> bool:
        """Add a request, whose keys and values have come, to the batch; False: no free seat.

        It was detached elsewhere, and memory is reserved here for all of it, or it was detached
        here and its blocks are kept. It decodes from the next plan on. `output_len` is what
        `detach` returned.
        """
        placeholder = self._placeholder_of(request)
        if request.state is not State.AWAY or not request.ready:
            away = request.state is State.AWAY
            what = "has no keys and values" if away else "was not detached"
            raise RequestError(f"request {request.id!r} cannot be attached: it {what}")
        self._require_covered(placeholder)
        queues = self._queues
        queues.require_output_left(request, output_len)
        queues._now = now
        queues.disturbed = True
        placeholder.follow()
        if queues.seats + request.num_seqs > queues.max_seqs:
            self._reservations.awaiting_seat[request.id] = placeholder
            return False
        if queues.ranked:
            queues.order(request)  # first, since a policy's rank may fail
        queues.materialise_decodes()
        queues.attach(placeholder, output_len)
        if (pending := queues.pending) is not None and pending._decode_count:
            pending._held = (*pending._held, request)  # it is not in the pending plan
        return True

    def release_reservation(self, request: Request) -> None:
        """Free the blocks held here for a request: they have been copied, or are not needed."""
        self._queues.disturbed = True
        self._reservations.drop(self._placeholder_of(request))

    # -- prefixes of requests that are still to be added -------------------------------------------

    @property
    def prefix_error(self) -> str | None:
        """Why no prefix of another scheduler can be put into the cache here, or None."""
        kind = type(self._memory)
        if kind.lookup is not Memory.lookup:
            return None
        return f"{kind.__name__} has no prefix cache: choose memory=prefix or radix"

    def expect_prefix(self, request: Request, tokens: int, now: float) -> bool:
        """Hold memory for the first `tokens` tokens of a request, which come before it is added
        here; False: there is no room. A memory that cannot hold any gives it when they are there.
        """
        self._queues.require_absent(request)
        placeholder = self._queues.expect(request)
        if not self._memory.can_hold or self._fill(placeholder, tokens, now):
            return True
        self._reservations.drop(placeholder)
        return False

    def put_prefix(self, request: Request, tokens: int, now: float) -> int:
        """Of these, `tokens` tokens have come: they are in the cache from now on, for this request
        as for others, and no memory is held any more. Returns how many the cache had not."""
        placeholder = self._placeholder_of(request)
        news = 0
        if tokens and (placeholder._tables or self._fill(placeholder, tokens, now)):
            news = max(tokens - placeholder.computed, 0)
        if news:
            self._memory.filled(placeholder, tokens)
        self.release_reservation(request)
        return news

    def _fill(self, placeholder: Placeholder, tokens: int, now: float) -> bool:
        queues = self._queues
        queues._now = now
        queues.disturbed = True
        filled = self._reservations.fill(placeholder, tokens, self._batching.margin(queues))
        if filled and queues.connector is not None:
            queues.connector.received.update(placeholder._tables[0])
        return filled

    # -- checks ----------------------------------------------------------------------------------

    def _placeholder_of(self, request: Request) -> Placeholder:
        placeholder = self._placeholders.get(request.id)
        if placeholder is None or placeholder.request is not request:
            raise RequestError(f"request {request.id!r}: no memory is held for it here")
        return placeholder

    def _require_reservable(self, request: Request, tokens: int) -> None:
        """Raise RequestError for what could not be reserved in an empty memory either."""
        if not request.alive:
            raise RequestError(f"request {request.id!r} was {request.state.value} already")
        if request.state is State.NEW:
            raise RequestError(f"request {request.id!r} is new: it has no keys and values")
        if request.params.num_seqs > 1:
            raise RequestError(f"request {request.id!r} cannot migrate: it is a group of sequences")
        if reason := self._queues.outgrown(request):
            raise RequestError(f"request {request.id!r} can never be served here: {reason}")
        if not is_whole(tokens) or not 0 < tokens <= self._queues.max_model_len:
            raise RequestError(
                f"request {request.id!r}: tokens={tokens}: must be a whole number from 1 to "
                f"max_model_len={self._queues.max_model_len}"
            )

    def _require_covered(self, placeholder: Placeholder) -> None:
        """Raise RequestError unless the held blocks have room for all computed tokens."""
        computed, name = placeholder.request.computed, placeholder.id
        if placeholder.kept and placeholder.computed != computed:
            raise RequestError(
                f"request {name!r} cannot be attached: {placeholder.computed} tokens are kept "
                f"here, and it has computed {computed} by now"
            )
        if not self._reservations.covers(placeholder, computed):
            reserved = sum(map(len, placeholder._tables)) * self._memory.block_size
            raise RequestError(
                f"request {name!r} cannot be attached: it has computed {computed} tokens, and "
                f"memory is reserved for {reserved}"
            )

"""The storage tier below SGLang's host tier: what it has of waiting prompts is fetched ahead.

When a request joins the queue, a *look-up* asks for what follows its match; what the storage has of
it is *fetched* into blocks of the host tier, and enters the tree below the match. Admission finds
it there, and loads it as any host hit. What has been written to the host is *backed up*.

An executor carries look-ups, fetches and backups out. It takes those that are new (`take_jobs`),
and reports what was found, read and written (`found`, `arrived`, `backed_up`); the next step begins
with these reports.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, nextafter
from typing import ClassVar, Literal

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import require_number, require_whole, unknown
from pagedsim.core.memory.eviction_policy import EvictionPolicy
from pagedsim.core.request import Request
from pagedsim.core.transfers import LowerMove
from pagedsim.sglang.hicache import Copy, HiCache, WritePolicy
from pagedsim.sglang.radix import Hold, Node, common_pages

PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]
POLICIES = ("best_effort", "wait_complete", "timeout")
LATE = -inf
SHARE = 0.5
"""Of the host tier: look-ups and fetches under way that ask for as much let no other begin."""


@dataclass(frozen=True, kw_only=True)
class PrefetchSettings:
    """How prompts are fetched; the defaults are SGLang's."""

    policy: PrefetchPolicy = "timeout"
    """What happens where a prompt could be admitted and its fetch is under way. `best_effort`: it
    takes what has arrived; `wait_complete`: it waits, and others may go before it; `timeout`: so it
    does for a time, and then takes what has arrived."""
    threshold: int = 256
    """Tokens: fewer are not fetched."""
    timeout_base: float = 1.0
    """Seconds to wait for any fetch."""
    timeout_per_ki_token: float = 0.25
    """Seconds more for each 1024 tokens asked for."""
    retry_interval: int = 0
    """Steps after which what was not there is looked up again; 0: never."""
    retry_max: int = 8
    """Look-ups of a request, after its first."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise unknown("prefetch.policy", str(self.policy), POLICIES)
        for name in ("threshold", "retry_interval", "retry_max"):
            require_whole(f"prefetch.{name}", getattr(self, name), 0)
        for name in ("timeout_base", "timeout_per_ki_token"):
            require_number(f"prefetch.{name}", getattr(self, name), 0)


class Prefetch:
    """A look-up of pages of a prompt, and then perhaps their fetch."""

    def __init__(
        self, request: Request, anchor: Hold, keys: Sequence[Hashable], start: int, assumed: bool
    ) -> None:
        self.request = request
        self.anchor = anchor
        """Keeps the node below which they belong."""
        self.keys = keys
        """Of the pages: those asked for, then those that are fetched."""
        self.asked = len(keys)
        self.start = start
        """Pages of the prompt before them."""
        self.assumed = assumed
        """Whether the storage was found to have them, so that the look-up need not ask it."""
        self.blocks: list[int] = []
        """Where a fetch puts them, in the host tier; none during the look-up."""
        self.arrived = 0
        """Pages that have been fetched."""
        self.cut = False
        """Whether nothing more is wanted; an executor looks before each part of the work."""
        self.late = False
        """Whether it was cut because it took too long."""


class Backup:
    """A copy of a node from the host tier to the storage."""

    def __init__(self, keys: Sequence[Hashable], blocks: Sequence[int], anchor: Hold) -> None:
        self.keys = keys
        self.blocks = blocks
        self.anchor = anchor


class _Retry:
    """A look-up that is to be sent again."""

    def __init__(self, end: int | None) -> None:
        self.end = end  # pages of the prompt up to which the storage was found to have it
        self.due: int | None = None  # the pass in which it is sent, once it has waited for one


@mypyc_attr(allow_interpreted_subclasses=True)
class StoredHiCache(HiCache):
    """A radix tree over the GPU and the host, with a storage below."""

    lower_tiers: ClassVar[Sequence[str]] = ("storage",)

    def __init__(
        self,
        blocks: int,
        block_size: int = 1,
        cpu_blocks: int = 0,
        eviction: EvictionPolicy | None = None,
        low_values_first: bool = False,
        host_blocks: int = 1,
        write_policy: WritePolicy = "write_through",
        prefetch: PrefetchSettings | None = None,
    ) -> None:
        super().__init__(
            blocks, block_size, cpu_blocks, eviction, low_values_first, host_blocks, write_policy
        )
        self.prefetch = prefetch = prefetch or PrefetchSettings()
        self._threshold = max(prefetch.threshold, self.block_size)
        self._most_asked = int(SHARE * self.host_total * self.block_size)
        self._asked = 0  # tokens of look-ups and fetches under way
        self._prefetches: dict[Request, Prefetch] = {}
        self._fetching: dict[Prefetch, None] = {}  # which have blocks, wanted or not
        self._backups: dict[Backup, None] = {}
        self._new: tuple[list[Prefetch], list[Prefetch], list[Backup]] = ([], [], [])
        self._found: list[tuple[Prefetch, int]] = []  # reports
        self._arrived: list[tuple[Prefetch, int, bool]] = []
        self._backed_up: list[Backup] = []
        self._releasing: list[int] = []  # blocks that are free from the next step on
        self._retries: dict[Request, _Retry] = {}
        self._passes = 0
        self._sent: dict[Request, int] = {}  # look-ups of a waiting request after its first
        self._matched: dict[Request, int] = {}  # tokens, when it was last looked up
        self._waits: dict[Request, float] = {}  # until when; `LATE` once that is over
        self._asked_again = False  # whether a request was passed over as it was looked up again
        self._moves: list[LowerMove] = []  # that have ended since the last plan

    # -- inspection ------------------------------------------------------------------------------

    @property
    def transferring(self) -> bool:
        under_way = self._fetching or self._backups or self._prefetches or self._releasing
        return bool(super().transferring or under_way)

    @property
    def unbegun(self) -> bool:
        return super().unbegun or self._asked_again

    def held_blocks(self) -> Sequence[int]:
        fetched = chain.from_iterable(prefetch.blocks for prefetch in self._fetching)
        return [*self._releasing, *fetched]

    # -- the executor ------------------------------------------------------------------------------

    def take_jobs(self) -> tuple[list[Prefetch], list[Prefetch], list[Backup]]:
        """The look-ups, fetches and backups that are new since the last call; each kind is served
        one after another."""
        new, self._new = self._new, ([], [], [])
        return new

    def found(self, look_up: Prefetch, pages: int) -> None:
        """A look-up has found so many of its pages in a row from the first."""
        self._found.append((look_up, pages))

    def arrived(self, fetch: Prefetch, pages: int, ended: bool) -> None:
        """So many pages of a fetch have arrived by now. It has ended with all of them, with a page
        that is missing, or where it was cut."""
        self._arrived.append((fetch, pages, ended))

    def backed_up(self, backup: Backup) -> None:
        """The storage has a backup."""
        self._backed_up.append(backup)

    @property
    def reported(self) -> bool:
        """Whether there are reports for the next step."""
        return bool(self._found or self._arrived or self._backed_up)

    def settle(self) -> None:
        """Take the reports while there are no requests, and so no steps."""
        self.poll(())
        self.poll(())  # in which blocks come free that nothing has arrived for

    # -- a step ------------------------------------------------------------------------------------

    def poll(self, waiting: Iterable[Request]) -> None:
        """Take the reports since the last step, and send again what is due."""
        self._asked_again = False
        released, self._releasing = self._releasing, []
        found, self._found = self._found, []
        for look_up, pages in found:
            self._take_found(look_up, pages)
        arrived, self._arrived = self._arrived, []
        for fetch, pages, ended in arrived:
            if fetch in self._fetching:
                self._take_arrived(fetch, pages, ended)
        for backup in self._backed_up:
            if self._backups.pop(backup, False) is None:
                self._let_go(backup.anchor)
                self._moves.append(LowerMove(1, False, len(backup.keys)))
        self._backed_up = []
        self._host_free += released
        self._retry(waiting)

    def take_moves(self) -> Sequence[LowerMove]:
        """What fetches have brought and backups have taken since the last call."""
        moves, self._moves = self._moves, []
        return moves

    def _take_found(self, look_up: Prefetch, pages: int) -> None:
        request = look_up.request
        if request not in self._prefetches:
            return
        if look_up.cut or pages * self.block_size < self._threshold:
            if not look_up.late:
                self._retries[request] = _Retry(None)
            self.revoke(request)
            return
        blocks = self.take_blocks(look_up, pages)
        if not blocks:
            self.revoke(request)
            self._retries[request] = _Retry(look_up.start + pages)
            return
        look_up.blocks = blocks
        look_up.keys = look_up.keys[: len(blocks)]
        self._fetching[look_up] = None
        self._new[1].append(look_up)

    def take_blocks(self, look_up: Prefetch, pages: int) -> list[int]:
        """Blocks of the host tier for what was found, or for a part that is worth it."""
        free = self._host_free
        if pages > len(free):
            self.evict_host(pages)
            pages = min(pages, len(free))
            if pages * self.block_size < self._threshold:
                return []
        blocks = free[-pages:]
        del free[-pages:]
        return blocks

    def _take_arrived(self, fetch: Prefetch, pages: int, ended: bool) -> None:
        wanted = self._prefetches.get(fetch.request) is fetch
        if wanted:
            fetch.arrived = pages
        if not ended:
            return
        if wanted:
            self.finish(fetch)
        self._releasing += fetch.blocks
        fetch.blocks = []
        del self._fetching[fetch]

    def _retry(self, waiting: Iterable[Request]) -> None:
        """Send look-ups again whose time has come, in the order of the queue."""
        self._passes += 1
        if not self._retries:
            return
        requests = list(waiting)
        if not requests:
            return
        self._retries.pop(requests[0], None)  # the head of the queue does not wait
        for request in requests:
            retry = self._retries.get(request)
            if retry is None:
                continue
            exhausted = self._sent.get(request, 0) >= self.prefetch.retry_max
            if exhausted or not self.prefetch.retry_interval:
                del self._retries[request]
                continue
            if retry.due is None:
                retry.due = self._passes + self.prefetch.retry_interval
            if retry.due <= self._passes:
                del self._retries[request]
                self._send_again(request, retry.end)

    # -- requests ----------------------------------------------------------------------------------

    def queued(self, request: Request) -> None:
        self._sent.pop(request, None)
        self._look_up(request, None)

    def _send_again(self, request: Request, end: int | None) -> None:
        self._sent[request] = self._sent.get(request, 0) + 1
        self._look_up(request, end)

    def _look_up(self, request: Request, end: int | None) -> None:
        """Look up what follows the match of a request, if that is worth it; with an `end`, only up
        to there, where the storage was found to have it."""
        start = len(self.touch(request)) + self.loadable(request) // self.block_size
        self._matched[request] = start * self.block_size
        node = self._best
        if not (node.host or node.parent is None):
            return
        self._retries.pop(request, None)
        if self._waits.get(request) == LATE or request in self._prefetches:
            return
        keys = self._findable(request)[start:]
        assumed = end is not None and start < end <= start + len(keys)
        if assumed and end is not None:
            keys = keys[: end - start]
        if len(keys) * self.block_size < self._threshold:
            return
        if self._asked >= self._most_asked:
            self._retries[request] = _Retry(end)
            return
        self._asked += len(keys) * self.block_size
        look_up = Prefetch(request, self.keep(node), keys, start, assumed)
        self._prefetches[request] = look_up
        self._new[0].append(look_up)

    def ready(self, request: Request, now: float) -> bool:
        """Whether a request whose turn it is need not wait for its prefetch, which then ends."""
        prefetch = self._prefetches.get(request)
        if prefetch is None:
            return True
        if not prefetch.cut:
            policy = self.prefetch.policy
            if policy == "wait_complete" or (policy == "timeout" and not self._late(prefetch, now)):
                return False
            if policy == "timeout":
                prefetch.late = True
                self._retries.pop(request, None)
                self._waits[request] = LATE
        prefetch.cut = True
        if prefetch.blocks:
            self.finish(prefetch)
        else:
            if not prefetch.late:
                self._retries[request] = _Retry(None)
            self.revoke(request)
        return True

    def _late(self, prefetch: Prefetch, now: float) -> bool:
        """Whether a request has waited long enough for its prefetch, as it does from now on."""
        request = prefetch.request
        complete = prefetch.blocks and prefetch.arrived >= len(prefetch.keys)
        until = self._waits.get(request)
        if until is None:
            per_page = self.block_size / 1024 * self.prefetch.timeout_per_ki_token
            self._waits[request] = now + self.prefetch.timeout_base + prefetch.asked * per_page
            return False
        return not complete and now > until

    def next_timeout(self, now: float) -> float:
        """The first time after `now` at which a request has waited long enough; infinity: none."""
        ends = [nextafter(self._waits.get(request, LATE), inf) for request in self._prefetches]
        return min([end for end in ends if end > now], default=inf)

    def shrunk(self, request: Request, matched: int) -> bool:
        """Whether so many tokens, which a request was just found to match, are fewer than at its
        last look-up: then another is sent, and it waits."""
        before = self._matched.get(request, 0)
        if not before or matched >= before:
            return False
        if self._sent.get(request, 0) >= self.prefetch.retry_max:
            self._matched[request] = matched
            return False
        self._send_again(request, None)
        self._asked_again = True
        return True

    def admitted(self, request: Request) -> None:
        """A request has left the queue."""
        self._waits.pop(request, None)
        self._retries.pop(request, None)

    def release(self, request: Request) -> None:
        super().release(request)
        self.admitted(request)
        self._sent.pop(request, None)
        self._matched.pop(request, None)
        if (prefetch := self._prefetches.get(request)) is not None:
            prefetch.cut = True
            self._retire(request)

    # -- ends of prefetches ------------------------------------------------------------------------

    def revoke(self, request: Request) -> None:
        """A look-up has led to no fetch."""
        self._retire(request)

    def _retire(self, request: Request) -> None:
        prefetch = self._prefetches.pop(request)
        self._let_go(prefetch.anchor)
        self._asked -= prefetch.asked * self.block_size

    def finish(self, fetch: Prefetch) -> int:
        """Put what has arrived into the tree; returns how many of these pages are new to it."""
        known = self._graft(fetch)
        self._host_free += fetch.blocks[:known]
        fetch.blocks = fetch.blocks[fetch.arrived :]
        self._moves.append(LowerMove(1, True, fetch.arrived))
        self._retire(fetch.request)
        new = fetch.arrived - known
        fetch.request._stored += new * self.block_size
        return new

    def _graft(self, fetch: Prefetch) -> int:
        """Put the pages that have arrived below their anchor; returns how many of them the host has
        already (under write_back, the tree)."""
        node, done, known = fetch.anchor.node, 0, 0
        keys, blocks = fetch.keys[: fetch.arrived], fetch.blocks
        self._use(node, self._leaves.tick())
        while done < len(keys) and (child := node.children.get(keys[done])):
            self._use(child, self._leaves.tick())
            common = common_pages(child.keys, keys, done)
            node = child if common == len(child.keys) else self._split(child, common)
            if node.host or self.writes_back:
                known += common
            else:
                self._put(node, blocks[done : done + common])
            done += common
        if done < len(keys):
            self._add_below(node, list(keys[done:]), blocks[done : len(keys)])
        return known

    def _put(self, node: Node, blocks: list[int]) -> None:
        """Give a node a copy on the host."""
        node.host = blocks
        if not self._host_leaves.is_lru:
            self._host_leaves.policy.inserted(node, None)
        self._note_duplicate(node)

    def _add_below(self, parent: Node, keys: list[Hashable], blocks: list[int]) -> None:
        node = Node(parent, keys, [], self._leaves.tick(), parent.priority)
        node.uses = 1 if self.writes_back else 0
        self._hang(node, parent)
        self._put(node, blocks)
        self._offer(node)
        self._offer(parent)

    # -- backups -----------------------------------------------------------------------------------

    def _end(self, copy: Copy) -> None:
        nodes = list(copy.nodes)
        super()._end(copy)
        if copy.request is None:
            for node in nodes:
                backup = Backup(list(node.keys), list(node.host), self.keep(node))
                self._backups[backup] = None
                self._new[2].append(backup)

    def forget(self) -> None:
        super().forget()
        for request in list(self._prefetches):
            self._retire(request)
        for backup in self._backups:
            self._let_go(backup.anchor)
        for fetch in self._fetching:
            fetch.cut = True
            self._host_free += fetch.blocks
        self._host_free += self._releasing
        self._releasing = []
        self._fetching.clear()
        self._backups.clear()
        self._new = ([], [], [])
        self._found, self._arrived, self._backed_up = [], [], []

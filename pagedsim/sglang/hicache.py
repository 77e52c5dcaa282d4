"""SGLang's hierarchical cache (HiCache): the radix tree with a host tier.

A node has pages on the GPU, blocks of the host tier, or both. Below a node without pages nothing
has any, so a path is on the GPU, then on the host alone: what a prompt finds there is a *host hit*,
and its admission *loads it back*. The write policy says when a node is copied to the host:

- `write_through`: when a request inserts it; `write_through_selective`: when a second one does.
  Ancestors are copied first, so host content is a prefix of each path, too. Until the copy has
  ended its path is locked on the GPU. What is on both tiers is given up on the GPU alone.
- `write_back`: when it is evicted from the GPU, which waits for the copy. Where the host tier is
  full, blocks whose content is on the GPU, too (*duplicates*), are given up first.

A step begins with the copies that results before it have queued, as one store; its admissions'
loads begin with it, too. The executor reports their ends (`transferred`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import chain
from typing import ClassVar, Literal

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import IntegrityError, PagedsimError, PlanError, require_whole, unknown
from pagedsim.core.memory.eviction import EvictionQueue
from pagedsim.core.memory.eviction_policy import EvictionPolicy
from pagedsim.core.request import Request
from pagedsim.core.transfers import Direction, Transfer
from pagedsim.sglang.radix import Hold, Node, RadixMemory, to_root

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
USES_TO_WRITE = {"write_through": 1, "write_through_selective": 2, "write_back": 0}
"""Requests that must have inserted a node before it is copied to the host; 0: an eviction does."""
LEAST_LOADED = 10
"""Tokens: a host hit of fewer is computed again."""


class Copy(Hold):
    """A copy of one path's blocks between the tiers: from its queueing to its end it locks the
    path on the GPU, but for a store that an eviction waits for."""

    def __init__(self, node: Node, pages: Sequence[int], blocks: Sequence[int]) -> None:
        super().__init__(node, moving=True)
        self.pages = list(pages)
        self.blocks = list(blocks)
        self.request: Request | None = None
        """The request that is to find what is loaded; a store has none."""
        self.anchor: Hold | None = None
        """Keeps the end of a loaded path on the host."""


@mypyc_attr(allow_interpreted_subclasses=True)
class HiCache(RadixMemory):
    """A radix tree over two tiers: pages on the GPU and blocks on the host."""

    begins_transfers: ClassVar[bool] = True

    def __init__(
        self,
        blocks: int,
        block_size: int = 1,
        cpu_blocks: int = 0,
        eviction: EvictionPolicy | None = None,
        low_values_first: bool = False,
        host_blocks: int = 1,
        write_policy: WritePolicy = "write_through",
    ) -> None:
        """`host_blocks` is the size of the host tier. Each tier evicts in the order of its own copy
        of `eviction`."""
        super().__init__(blocks, block_size, cpu_blocks, eviction, low_values_first)
        self.host_total = require_whole("host_blocks", host_blocks, 1)
        if write_policy not in USES_TO_WRITE:
            raise unknown("write_policy", write_policy, USES_TO_WRITE)
        self.write_policy = write_policy
        self.writes_back = write_policy == "write_back"
        self._uses_to_write = USES_TO_WRITE[write_policy]
        self._host_free: list[int] = list(range(self.host_total - 1, -1, -1))
        self._host_leaves: EvictionQueue[Node] = EvictionQueue(
            eviction or EvictionPolicy(), self.host_total, first=1 << 48
        )
        self._duplicates: dict[Node, None] = {}  # some are none any more
        self._inserted: dict[Request, int] = {}  # pages that a request has inserted before
        self._stores: list[Copy] = []  # queued
        self._under_way: dict[int, list[Copy]] = {}  # by job
        self._jobs = 0
        self._begun: list[Transfer] = []
        self._flushed: list[int] = []

    # -- inspection ------------------------------------------------------------------------------

    @property
    def host_free(self) -> int:
        """Blocks of the host tier without content."""
        return len(self._host_free)

    @property
    def unbegun(self) -> bool:
        return bool(self._stores)

    @property
    def transferring(self) -> bool:
        """Whether any copy is queued or under way."""
        return bool(self._stores or self._under_way)

    @property
    def shared(self) -> int:
        """GPU blocks saved by sharing; copies that lock a node use none."""
        saved = self._saved
        if self._under_way or self._stores:
            pins = Counter(above for node in self._locked_by_copies() for above in to_root(node))
            for node, count in pins.items():
                saved -= len(node.pages) * (count if node.owners > count else count - 1)
        return saved

    @shared.setter
    def shared(self, blocks: int) -> None:
        self._saved = blocks

    def loadable(self, request: Request) -> int:
        return sum(len(node.keys) for node in self._host_only()) * self.block_size

    def host_tokens(self, request: Request, cached: int) -> int:
        path = self._known_path(request)
        return self.block_size * sum([common for node, common in path if not node.pages])

    def _host_only(self) -> list[Node]:
        """The nodes that the last match found on the host alone, the upper ones first."""
        nodes, node = [], self._best
        while not node.pages and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    # -- the tree ----------------------------------------------------------------------------------

    def _insert(
        self, keys: Sequence[Hashable], pages: Sequence[int], kept: int, request: Request
    ) -> Node:
        """The same as without a host tier; nodes on the host alone take the pages, and those that
        enough requests have inserted are written to the host."""
        node = super()._insert(keys, pages, kept, request)
        self._inserted[request] = max(self._inserted.get(request, 0), len(keys))
        return node

    def _meet(
        self, node: Node, pages: Sequence[int], start: int, kept: int, request: Request
    ) -> None:
        node.priority = min(node.priority, self._value(request))
        if node.pages:
            self._free += pages[max(0, kept - start) :]
        else:
            self._fill(node, list(pages), request)
            self._note_duplicate(node)
        if start + len(pages) > self._inserted.get(request, 0) and self._uses_to_write:
            self._leaves.use(node, request)
            if node.host and not self._host_leaves.is_lru:
                self._host_leaves.policy.used(node, None)
            self._write_if_due(node)

    def _add(self, parent: Node, keys: list[Hashable], pages: list[int], request: Request) -> Node:
        node = super()._add(parent, keys, pages, request)
        self._write_if_due(node)
        return node

    def _fill(self, node: Node, pages: list[int], request: Request) -> None:
        """Give a node on the host alone pages with the same content."""
        self._host_leaves.discard(node)
        node.pages = pages
        if not node.owners:
            self._evictable += len(pages)
        self._leaves.insert(node, request)
        self._offer(node)
        assert node.parent is not None
        self._offer(node.parent)

    def _split(self, child: Node, pages: int) -> Node:
        above = super()._split(child, pages)
        above.host, child.host = child.host[:pages], child.host[pages:]
        above.holds = list(child.holds)
        for hold in child.holds:
            hold.nodes.insert(hold.nodes.index(child), above)
        self._note_duplicate(above)
        return above

    def _hold(self, hold: Hold, nodes: Iterable[Node]) -> None:
        hold.nodes = list(nodes)
        for node in hold.nodes:
            node.holds.append(hold)
            self._offer(node)

    def _let_go(self, hold: Hold) -> None:
        for node in reversed(hold.nodes):
            node.holds.remove(hold)
            self._offer(node)
            if hold.moving:
                self._note_duplicate(node)

    def keep(self, node: Node) -> Hold:
        """Hold a node's blocks on the host, until `let_go`."""
        hold = Hold(node, moving=False)
        self._hold(hold, (node,) if node.host or self.writes_back else ())
        return hold

    def _note_duplicate(self, node: Node) -> None:
        """Remember a node that is on both tiers, in the order in which they became so."""
        if not self.writes_back:
            return
        if node.pages and node.host and not any(hold.moving for hold in node.holds):
            self._duplicates.setdefault(node)
        else:
            self._duplicates.pop(node, None)

    # -- writing to the host -----------------------------------------------------------------------

    def _write_if_due(self, node: Node) -> None:
        """Queue a store of a node, and of those above it that are not on the host, if there is room
        for it; those before one without room stay queued."""
        if node.host or not 0 < self._uses_to_write <= node.uses:
            return
        path = to_root(node)
        for target in reversed([above for above in path if not above.host]):
            if not self._host_room(len(target.keys)):
                return
            self._lock(target)
            self._stores.append(self._store(target))

    def _store(self, node: Node) -> Copy:
        """Give a node blocks of the host tier, which has room for it."""
        count = len(node.keys)
        node.host = self._host_free[-count:]
        del self._host_free[-count:]
        if not self._host_leaves.is_lru:
            self._host_leaves.policy.inserted(node, None)
        store = Copy(node, node.pages, node.host)
        self._hold(store, (node,))
        return store

    def begin_stores(self) -> None:
        """Begin all stores that are queued, as one."""
        if self._stores:
            self._begin(Direction.STORE, self._stores)
            self._stores = []

    def _begin(self, direction: Direction, copies: list[Copy]) -> int:
        self._jobs += 1
        self._under_way[self._jobs] = copies
        pages = [page for copy in copies for page in copy.pages]
        blocks = [block for copy in copies for block in copy.blocks]
        request = copies[0].request
        self._begun.append(Transfer(self._jobs, direction, request, pages, blocks, beside=True))
        return self._jobs

    def take_transfers(self) -> tuple[Sequence[Transfer], Sequence[int]]:
        """Those that have begun since the last call, and those that evictions wait for."""
        begun, self._begun = self._begun, []
        flushed, self._flushed = self._flushed, []
        return begun, flushed

    def transferred(
        self, jobs: Iterable[int], now: float, failed: Collection[int]
    ) -> Sequence[Request]:
        for job in jobs:
            if job not in self._under_way:
                raise PlanError(
                    f"transfer {job} has ended that was never begun, or has ended before"
                )
            self._end_all(self._under_way.pop(job))
        if failed:
            self._lose_host()
        return ()

    def _end_all(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self._end(copy)
            self._unlock(copy.node)

    def _lose_host(self) -> None:
        """Forget what is on the host; copies that are queued or under way are for nothing."""
        for job, copies in self._under_way.items():
            self._end_all(copies)
            self._under_way[job] = []
        stores, self._stores = self._stores, []
        self._end_all(stores)
        for node in reversed(self._all_nodes()[1:]):
            if not node.pages:
                self._host_leaves.remove(node)
                self._remove(node)
            elif node.host:
                self._give_up(node)
                self._duplicates.pop(node, None)

    def _end(self, copy: Copy) -> None:
        self._let_go(copy)
        if copy.anchor is not None:
            self._let_go(copy.anchor)

    # -- loading back ------------------------------------------------------------------------------

    def load(self, request: Request) -> Sequence[int]:
        """Queue a load of what the last `touch`, which was for this request, found on the host
        alone; returns its pages, or none where it is too short or the GPU has no room."""
        nodes, end = self._host_only(), self._best
        count = sum(len(node.keys) for node in nodes)
        if count * self.block_size < LEAST_LOADED:
            return ()
        anchor = self.keep(end)
        self._lock(end)
        self.reclaim(count)
        if len(self._free) < count:
            self._unlock(end)
            self._let_go(anchor)
            return ()
        pages = self._take(count)
        load = Copy(end, pages, list(chain.from_iterable(node.host for node in nodes)))
        load.request, load.anchor = request, anchor
        request._loaded = count * self.block_size
        self._hold(load, nodes if self.writes_back else ())
        done = 0
        for node in nodes:
            self._fill(node, pages[done : done + len(node.keys)], request)
            done += len(node.keys)
        self._begin(Direction.LOAD, [load])
        return pages

    # -- eviction ----------------------------------------------------------------------------------

    def _on_edge(self, node: Node) -> bool:
        """Whether a node can be evicted from the GPU."""
        if not node.pages or node.owners or node.parent is None:
            return False
        return not any(child.pages for child in node.children.values())

    def _on_host_edge(self, node: Node) -> bool:
        """Whether a node can be evicted from the host."""
        return not (node.pages or node.children or node.holds or node.owners)

    def _offer(self, node: Node) -> None:
        if node.parent is None:
            return
        if node.pages:
            if self._on_edge(node):
                self._leaves.add(node)
            else:
                self._leaves.discard(node)
        elif self._on_host_edge(node):
            self._host_leaves.add(node)
        else:
            self._host_leaves.discard(node)

    def reclaim(self, blocks: int) -> None:
        stuck = []
        while len(self._free) < blocks and self._leaves.count:
            node = self._leaves.pop()
            if not self._evict(node):
                stuck.append(node)
        for node in stuck:
            self._leaves.insert(node, None)
            self._offer(node)

    def _evict(self, node: Node) -> bool:
        """Evict a node from the GPU; returns whether that was possible."""
        if not node.host and self.writes_back:
            if self._host_room(len(node.keys)):
                store = self._store(node)
                job = self._begin(Direction.STORE, [store])
                self._flushed.append(job)
                self._under_way[job] = []  # it has ended for all that follows
                self._end(store)
            elif not self._drop_below(node):
                return False
            self._leaves.discard(node)
        self._changes += 1
        self._evictable -= len(node.pages)
        self._free += node.pages
        node.pages = []
        if node.host:
            parent = node.parent
            assert parent is not None
            self._offer(node)
            self._offer(parent)
        else:
            self.dropped(node)
            self._remove(node)
        return True

    def dropped(self, node: Node) -> None:
        """A node is evicted of which no copy is left."""

    def _drop_below(self, node: Node) -> bool:
        """Remove the nodes below one that is to be evicted without a copy, all on the host alone;
        returns whether that was possible."""
        below = [node]
        for above in below:
            if above.holds or above.owners:
                return False
            below += above.children.values()
        for last in reversed(below[1:]):
            self._host_leaves.remove(last)
            self._remove(last)
        return True

    def _remove(self, node: Node) -> None:
        """Remove a node without children and pages."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.keys[0]]
        node.parent = None
        self._host_free += node.host
        node.host = ()
        self._duplicates.pop(node, None)
        self._offer(parent)

    def _host_room(self, blocks: int) -> bool:
        lacking = blocks - len(self._host_free)
        return lacking <= 0 or self.evict_host(lacking) >= lacking

    def evict_host(self, blocks: int) -> int:
        """Evict from the host tier until so many blocks have come free, as far as that goes;
        returns how many have."""
        before = len(self._host_free)
        enough = before + blocks
        if self.writes_back:
            self._give_up_duplicates(enough)
        while len(self._host_free) < enough and self._host_leaves.count:
            self._remove(self._host_leaves.pop())
        return len(self._host_free) - before

    def _give_up_duplicates(self, enough: int) -> None:
        """Free the blocks of nodes that are on the GPU, too; those last that are evicted there
        next."""
        gone: list[Node] = []
        for sparing in (True, False):
            for node in self._duplicates:
                if len(self._host_free) >= enough:
                    break
                if not (node.pages and node.host):
                    gone.append(node)
                elif not (node.holds or (sparing and self._on_edge(node))):
                    self._give_up(node)
                    gone.append(node)
        for node in gone:
            self._duplicates.pop(node, None)

    def _give_up(self, node: Node) -> None:
        """Free the host's blocks of a node that has pages, too."""
        self._host_free += node.host
        node.host = ()
        if not self._host_leaves.is_lru:
            self._host_leaves.policy.removed(node, True)

    def _take(self, count: int) -> list[int]:
        pages = super()._take(count)
        if len(pages) < count:
            raise PagedsimError(
                f"{count} pages are needed, and {len(pages)} can be freed: what the storage reads "
                "or writes below them holds the others; give the host tier more room, or choose "
                "write_policy=write_through"
            )
        return pages

    def forget(self) -> None:
        self._lose_host()
        self._under_way.clear()
        self.take_transfers()
        for node in reversed(self._all_nodes()[1:]):
            if not node.owners:
                self._evictable -= len(node.pages)
                self._free += node.pages
                self._leaves.remove(node)
                node.pages = []
                self._remove(node)
        self._changes += 1

    # -- requests ----------------------------------------------------------------------------------

    def admit(self, request: Request, tokens: int, hit: Sequence[int]) -> None:
        # Its use of nodes counts when it inserts them.
        node, pages = self._match(self._findable(request)[: len(hit)])
        self._lock(node)
        self._node_of[request] = node
        request._registered = len(pages)
        request._tables = [[*pages, *self._take(self.blocks_for(tokens) - len(pages))]]

    def release(self, request: Request) -> None:
        self._inserted.pop(request, None)
        super().release(request)

    # -- integrity ---------------------------------------------------------------------------------

    def _copies(self) -> list[Copy]:
        """The copies that are queued or under way."""
        return [*self._stores, *chain.from_iterable(self._under_way.values())]

    def _locked_by_copies(self) -> Sequence[Node]:
        return [copy.node for copy in self._copies()]

    def held_blocks(self) -> Sequence[int]:
        """Blocks of the host tier that are neither free nor a node's; for a tier below."""
        return ()

    def check(self, requests: Iterable[Request]) -> None:
        super().check(requests)
        nodes = self._all_nodes()[1:]
        blocks = [*self._host_free, *self.held_blocks()]
        for node in nodes:
            blocks += node.host
            parent = node.parent
            assert parent is not None
            if not (node.pages or node.host):
                raise IntegrityError("a node is on neither tier")
            if any(part and len(part) != len(node.keys) for part in (node.pages, node.host)):
                raise IntegrityError("a node is in part on a tier")
            if node.pages and not parent.pages and parent.parent is not None:
                raise IntegrityError("a node is on the GPU, and the one above it is not")
            if node.host and not (parent.host or self.writes_back or parent.parent is None):
                raise IntegrityError("a node is on the host, and the one above it is not")
            if any(node not in hold.nodes for hold in node.holds):
                raise IntegrityError("a node is held by what does not know it")
        if sorted(blocks) != list(range(self.host_total)):
            raise IntegrityError("a block of the host tier is lost, or has two owners")
        for leaves, count in (
            (self._leaves, sum(map(self._on_edge, nodes))),
            (self._host_leaves, sum(self._on_host_edge(node) for node in nodes)),
        ):
            if leaves.count != count:
                raise IntegrityError(f"{leaves.count} nodes can be evicted: {count} could be")
        if wrong := [copy for copy in self._copies() if copy.node.parent is None]:
            raise IntegrityError(f"{len(wrong)} copies are of nodes that are gone")

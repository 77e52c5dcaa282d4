"""SGLang's prefix cache: a radix tree of tokens, page by page, beside the pages of requests.

A request's tokens enter the tree when they have been computed: a prompt when its result is known,
a chunk before the next step is composed, and all of it when the request ends. From then on the tree
owns the pages, and the request locks the path from its node to the root. Pages that the tree has
already are freed, and the tree's are used in their place. Nodes that no request locks can be
evicted, leaf by leaf, in the order of a policy.

As in SGLang, a node's `uses` are the requests that have gone through it, and its priority is the
most urgent of theirs; that of a prompt's nodes is one more urgent, so that they outlive answers.

Pages are this memory's blocks. Equal keys mean equal tokens up to the end of a page, as in
`core/memory/prefix.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import ClassVar, Final

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import IntegrityError, require_flag
from pagedsim.core.memory.base import Copies, Fit, Memory
from pagedsim.core.memory.cache_entry import CacheEntry
from pagedsim.core.memory.eviction import EvictionQueue
from pagedsim.core.memory.eviction_policy import EvictionPolicy
from pagedsim.core.memory.prefix import page_keys
from pagedsim.core.request import Request

_NOW: Final = Fit.NOW
_LATER: Final = Fit.LATER
_NEVER: Final = Fit.NEVER

DEEPER: Final = 1e-5
"""Of the nodes of a path that is matched, each is as much older than the one below it."""


class Node(CacheEntry):
    """A run of pages that all requests with its tokens share."""

    __slots__ = ("children", "holds", "host", "owners", "pages", "parent")

    def __init__(
        self,
        parent: Node | None,
        keys: list[Hashable],
        pages: list[int],
        now: float,
        priority: float,
    ) -> None:
        super().__init__(keys, now, priority)
        self.parent = parent
        self.pages = pages
        self.owners = 0  # requests, and copies to or from the host, that lock it
        self.children: dict[Hashable, Node] = {}
        # Of a host tier (`hicache.py`); there a node may have pages, blocks of the host, or both.
        self.host: Sequence[int] = ()
        self.holds: list[Hold] = []


class Hold:
    """What keeps the blocks of nodes in the host tier; both parts of a node that is split."""

    def __init__(self, node: Node, moving: bool) -> None:
        self.node = node
        """The lowest of its nodes."""
        self.moving = moving
        """Whether a copy to or from these blocks is under way."""
        self.nodes: list[Node] = [node]
        """The upper ones first."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RadixMemory(Memory):
    """A pool of pages and a radix tree of what requests have computed."""

    in_order_of_results: ClassVar[bool] = True

    def __init__(
        self,
        blocks: int,
        block_size: int = 1,
        cpu_blocks: int = 0,
        eviction: EvictionPolicy | None = None,
        low_values_first: bool = False,
    ) -> None:
        """`eviction` is the order in which leaves are evicted, which it copies; default: LRU.

        SGLang evicts by the values of priorities: where low values are served first, an order by
        priority evicts first what urgent requests have used, as here with `low_values_first`.
        """
        super().__init__(blocks, block_size, cpu_blocks)
        self._free: list[int] = list(range(blocks - 1, -1, -1))
        self.root = Node(None, [], [], 0.0, 0.0)
        self._best = self.root  # where the last match ended, with pages or without
        self._node_of: dict[Request, Node] = {}
        self._evictable = 0  # pages of nodes without an owner
        self._leaves: EvictionQueue[Node] = EvictionQueue(eviction or EvictionPolicy(), blocks)
        self._leaves.sign = -1 if require_flag("low_values_first", low_values_first) else 1
        self._changes = 0
        self._saved = 0

    # -- inspection ------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self._free) + self._evictable

    @property
    def cached(self) -> int:
        return self._evictable

    @property
    def is_lru(self) -> bool:
        """Whether what was used least recently is evicted first."""
        return self._leaves.is_lru

    @property
    def cache_changes(self) -> int:
        return self._changes

    def known_blocks(self) -> Iterable[int]:
        return sorted(chain.from_iterable(node.pages for node in self._all_nodes()))

    def _all_nodes(self) -> list[Node]:
        nodes = [self.root]
        for node in nodes:
            nodes += node.children.values()
        return nodes

    # -- the tree ----------------------------------------------------------------------------------

    def lookup(self, request: Request) -> Sequence[int]:
        return [page for node, common in self._known_path(request) for page in node.pages[:common]]

    def _known_path(self, request: Request) -> list[tuple[Node, int]]:
        """The nodes that have the beginning of a request, and how many pages of each: no use."""
        path: list[tuple[Node, int]] = []
        keys, node, done = self._findable(request), self.root, 0
        while done < len(keys) and (child := node.children.get(keys[done])):
            common = common_pages(child.keys, keys, done)
            path.append((child, common))
            done += common
            if common < len(child.keys):
                break
            node = child
        return path

    def touch(self, request: Request) -> Sequence[int]:
        return self._match(self._findable(request))[1]

    def cached_tokens(self, request: Request) -> int:
        return len(self._match(self._all_keys(request))[1]) * self.block_size

    def node_of(self, request: Request) -> Node:
        """The node at which the longest known prefix of a request ends."""
        return self._match(self._all_keys(request))[0]

    def _match(self, keys: Sequence[Hashable]) -> tuple[Node, list[int]]:
        """The last node with pages on the longest path of these keys, and the pages: a node is
        split where the path ends in it. The path is now the most recently used."""
        node: Node = self.root
        matched, done = node, 0
        hit: list[int] = []
        while done < len(keys) and (child := node.children.get(keys[done])):
            common = common_pages(child.keys, keys, done)
            node = child if common == len(child.keys) else self._split(child, common)
            done += common
            if node.pages:
                matched = node
                hit += node.pages
            if node is not child:
                break
        self._best = node
        if keys:
            self._use_path(node)
        return matched, hit

    def _use_path(self, node: Node) -> None:
        """A path is now the most recently used."""
        used = self._leaves.tick()
        above: Node | None = node
        while above is not None:
            self._use(above, used)
            used -= DEEPER
            above = above.parent
        self._changes += 1

    def _insert(
        self, keys: Sequence[Hashable], pages: Sequence[int], kept: int, request: Request
    ) -> Node:
        """Add a path of a request, and return its last node. Of pages that the tree has already,
        those from place `kept` on are freed: others have computed them."""
        node, done = self.root, 0
        self._use(node, self._leaves.tick())
        self._changes += 1
        while done < len(keys) and (child := node.children.get(keys[done])):
            self._use(child, self._leaves.tick())
            common = common_pages(child.keys, keys, done)
            node = child if common == len(child.keys) else self._split(child, common)
            self._meet(node, pages[done : done + common], done, kept, request)
            done += common
        if done < len(keys):
            node = self._add(node, list(keys[done:]), list(pages[done:]), request)
        return node

    def _meet(
        self, node: Node, pages: Sequence[int], start: int, kept: int, request: Request
    ) -> None:
        """A path that is added, which has these pages from place `start` on, leads through a node
        of the tree."""
        self._free += pages[max(0, kept - start) :]
        if start + len(pages) > kept:
            self._leaves.use(node, request)

    def _add(self, parent: Node, keys: list[Hashable], pages: list[int], request: Request) -> Node:
        node = Node(parent, keys, pages, self._leaves.tick(), self._value(request))
        self._leaves.insert(node, request)
        self._hang(node, parent)
        self._evictable += len(pages)
        self._offer(node)
        return node

    def _hang(self, node: Node, parent: Node) -> None:
        """Put a node below another, which is a longer path for all above it."""
        parent.children[node.keys[0]] = node
        node.start = parent.start + len(parent.keys) * self.block_size
        end = node.longest = node.start + len(node.keys) * self.block_size
        above: Node | None = parent
        while above is not None and above.longest < end:
            above.longest = end
            above = above.parent

    def _value(self, request: Request) -> float:
        """The priority that nodes get from a request: the smallest is kept longest."""
        return self._leaves.sign * request._priority

    def _split(self, child: Node, pages: int) -> Node:
        """Split the first pages of a node off; returns the new node, which has them."""
        parent = child.parent
        assert parent is not None
        now = self._leaves.tick()
        above = Node(parent, child.keys[:pages], child.pages[:pages], now, child.priority)
        above.owners, above.uses, above.created = child.owners, child.uses, child.created
        above.start, above.longest = child.start, child.longest
        child.start += pages * self.block_size
        above.children[child.keys[pages]] = child
        parent.children[above.keys[0]] = above
        child.parent, child.keys, child.pages = above, child.keys[pages:], child.pages[pages:]
        self._use(child, self._leaves.tick())
        return above

    def _use(self, node: Node, used: float) -> None:
        node.last_use = used
        self._offer(node)

    def _lock(self, node: Node) -> None:
        """Add an owner to all nodes from this one to the root."""
        for above in to_root(node):
            if above.owners:
                self._saved += len(above.pages)
            else:
                self._evictable -= len(above.pages)
                self._leaves.discard(above)
            above.owners += 1

    def _unlock(self, node: Node) -> None:
        for above in to_root(node):
            above.owners -= 1
            if above.owners:
                self._saved -= len(above.pages)
            else:
                self._evictable += len(above.pages)
                self._offer(above)

    # -- eviction ----------------------------------------------------------------------------------

    def _offer(self, node: Node) -> None:
        """Let a node be evicted, if it can be."""
        if not node.owners and not node.children and node.parent is not None:
            self._leaves.add(node)

    def reclaim(self, blocks: int) -> None:
        while len(self._free) < blocks and self._leaves.count:
            node = self._leaves.pop()
            parent = node.parent
            assert parent is not None
            del parent.children[node.keys[0]]
            node.parent = None
            self._free += node.pages
            self._evictable -= len(node.pages)
            self._changes += 1
            self._offer(parent)

    def _take(self, count: int) -> list[int]:
        """`count` free pages; the caller has made sure that there are as many."""
        if count <= 0:
            return []
        self.reclaim(count)
        pages = self._free[-count:]
        del self._free[-count:]
        return pages[::-1]

    def forget(self) -> None:
        self.reclaim(self.total)

    # -- requests ----------------------------------------------------------------------------------

    def _all_keys(self, request: Request) -> Sequence[Hashable]:
        return self._keys(request, request.num_tokens)

    def _findable(self, request: Request) -> Sequence[Hashable]:
        return self._keys(request, request.num_tokens - 1)  # one token must be computed

    def _keys(self, request: Request, tokens: int) -> Sequence[Hashable]:
        """The keys of the pages that its first tokens fill."""
        if request._prompt is None:
            return ()
        most = tokens // self.block_size
        keys = page_keys(request, most, self.block_size, self.with_tokens)
        return keys if len(keys) == most else keys[:most]

    def fit(self, request: Request, tokens: int, spare: int, hit: Sequence[int]) -> Fit:
        need = self.blocks_for(tokens)
        if self.total - need < spare:
            return _NEVER
        taken = need - len(hit) + (self.unheld(request, hit) if hit else 0)
        return _NOW if self.free - taken >= spare else _LATER

    def unheld(self, request: Request, hit: Sequence[int]) -> int:
        keys, node, done, unheld = self._findable(request), self.root, 0, 0
        while done < len(hit):
            node = node.children[keys[done]]
            pages = min(len(node.pages), len(hit) - done)
            done += pages
            unheld += 0 if node.owners else pages
        return unheld

    def admit(self, request: Request, tokens: int, hit: Sequence[int]) -> None:
        node, pages = self._match(self._findable(request)[: len(hit)])
        for above in to_root(node):
            self._leaves.use(above, request)
        self._lock(node)
        self._node_of[request] = node
        request._registered = len(pages)
        request._tables = [[*pages, *self._take(self.blocks_for(tokens) - len(pages))]]

    def holds(self, request: Request, tokens: int, spare: int, hit: Sequence[int]) -> bool:
        return self.fit(request, tokens, spare, hit) is _NOW

    def hold(self, request: Request, tokens: int, hit: Sequence[int]) -> None:
        self.admit(request, tokens, hit)

    def stride(self, forked: bool) -> int | None:
        return self.block_size

    def extend(self, request: Request, tokens: int, copies: Copies) -> None:
        request._tables[0] += self._take(self.blocks_for(tokens) - len(request._tables[0]))

    def grow(self, due: Sequence[Request], spare: int, copies: Copies, forked: bool) -> bool:
        if len(due) + spare > self.free:
            return False
        for request, page in zip(due, self._take(len(due)), strict=True):
            request._tables[0].append(page)
        return True

    def filled(self, request: Request, tokens: int) -> None:
        """Put the pages of the first tokens into the tree; its end is what the request locks."""
        if request._prompt is None or not request._tables:
            return
        table, known = request._tables[0], request._registered
        pages = tokens // self.block_size
        keys = page_keys(request, pages, self.block_size, self.with_tokens)[:pages]
        node = self._insert(keys, table[:pages], known, request)
        # The prompt ends in a node of its own, so that answers can be evicted without it.
        prompt = request._prompt_len // self.block_size
        if 0 < prompt < pages:
            end = self._insert(keys[:prompt], table[:prompt], prompt, request)
            for above in to_root(end):
                above.priority = min(above.priority, self._value(request) - 1)
        self._lock(node)
        self._unlock(self._node_of[request])
        self._node_of[request] = node
        shared = _path(node)
        if table[known:pages] != shared[known:]:  # another list, so that an engine sends it anew
            request._tables = [[*shared, *table[pages:]]]
        request._registered = pages

    def release(self, request: Request) -> None:
        if request._tables:
            self._free += request._tables[0][request._registered :]
            self._unlock(self._node_of.pop(request))
        request._tables = ()
        request._registered = 0

    def _locked_by_copies(self) -> Sequence[Node]:
        """The nodes that copies under way lock, as requests do."""
        return ()

    def check(self, requests: Iterable[Request]) -> None:
        nodes, owners = self._all_nodes(), dict.fromkeys(self._all_nodes(), 0)
        for node in self._locked_by_copies():
            for above in to_root(node):
                owners[above] += 1
        private: list[int] = []
        for request in requests:
            if not request._tables:
                continue
            node = self._node_of[request]
            if request._tables[0][: request._registered] != _path(node):
                raise IntegrityError(f"the table of {request!r} has other pages than its node")
            private += request._tables[0][request._registered :]
            for above in to_root(node):
                owners[above] += 1
        if wrong := [node.pages for node in nodes if node.owners != owners[node]]:
            raise IntegrityError(f"nodes of pages {wrong} count other owners than lock them")
        if sum(len(n.pages) for n in nodes if not n.owners) != self._evictable:
            raise IntegrityError(f"{self._evictable} pages are counted as evictable: not so")
        pages = sorted([*private, *self._free, *chain.from_iterable(node.pages for node in nodes)])
        if pages != list(range(self.total)):
            raise IntegrityError("a page is lost, or has two owners")
        if sum(max(n.owners - 1, 0) * len(n.pages) for n in nodes) != self._saved:
            raise IntegrityError(f"{self._saved} shared pages are counted: not so")


def common_pages(keys: list[Hashable], path: Sequence[Hashable], start: int) -> int:
    """How many of `keys` the path has, from `start` on. It has the first, and keys are equal only
    where those before them are."""
    most = min(len(keys), len(path) - start)
    if keys[most - 1] == path[start + most - 1]:
        return most
    return bisect_left(range(most), True, key=lambda place: keys[place] != path[start + place])


def to_root(node: Node) -> list[Node]:
    """A node and those above it, without the root."""
    nodes: list[Node] = []
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes


def _path(node: Node) -> list[int]:
    """The pages from the root to the end of a node."""
    return list(chain.from_iterable(above.pages for above in reversed(to_root(node))))

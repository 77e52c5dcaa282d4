"""Which block of a prefix cache has which content, in chains of blocks that follow one another.

A key stands for all tokens up to the end of its block, so prompts that agree in a key agree in all
before it. How far a prompt goes along a chain is found by bisection, and its blocks are a slice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Final

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import IntegrityError


@mypyc_attr(allow_interpreted_subclasses=True)  # so that it can be copied, as memories are
class Chain:
    """Blocks with new content, each registered after the one before, and their keys."""

    __slots__ = ("blocks", "keys")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.keys: list[Hashable] = []

    def agreement(self, keys: Sequence[Hashable], start: int) -> int:
        """How many of its keys are those from `start` on; the first is."""
        low, high = 1, min(len(self.keys), len(keys) - start)
        if self.keys[high - 1] == keys[start + high - 1]:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if self.keys[middle - 1] == keys[start + middle - 1]:
                low = middle
            else:
                high = middle
        return low


_COPY: Final = Chain()


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockIndex:
    """The blocks with content by key, and back. Of blocks with equal keys the first is found."""

    def __init__(self, total: int) -> None:
        """`total` blocks exist, numbered from 0 on."""
        self.chain_of: list[Chain | None] = [None] * total
        """By block; None: it has no content."""
        self.copies: dict[Hashable, list[int]] = {}
        """The other blocks of keys that have several, in the order of their registration."""
        # By first key. Of two blocks that follow one another, both registered, the second is next
        # in the chain of the first, or the first of a chain.
        self._chains: dict[Hashable, Chain] = {}
        self._key_of_copy: dict[int, Hashable] = {}

    def __iter__(self) -> Iterator[Hashable]:
        """All keys."""
        for chain in self._chains.values():
            yield from chain.keys

    def find(self, keys: Sequence[Hashable]) -> list[int]:
        """Blocks of these keys, up to the first that has none."""
        blocks: list[int] = []
        start = 0
        while start < len(keys) and (chain := self._chains.get(keys[start])) is not None:
            count = chain.agreement(keys, start)
            blocks += chain.blocks[:count]
            start += count
        return blocks

    def register(self, table: Sequence[int], keys: Sequence[Hashable], start: int, end: int) -> int:
        """Blocks `start` to `end` of a table, with these keys, have content now; returns how many
        had none."""
        new = keys[start:end]
        chain = self.chain_of[table[start - 1]] if start else Chain()
        if (
            chain is None
            or (start and (chain is _COPY or chain.keys[-1] != keys[start - 1]))
            or not self._chains.keys().isdisjoint(new)
        ):
            return self._register_each(table[start:end], keys, start)
        # No block has any of these keys, so none of the blocks has one.
        if not start:
            self._chains[new[0]] = chain
        chain_of, blocks = self.chain_of, table[start:end]
        for block in blocks:
            chain_of[block] = chain
        chain.blocks += blocks
        chain.keys += new
        return len(blocks)

    def _register_each(self, blocks: Sequence[int], keys: Sequence[Hashable], start: int) -> int:
        """The same, of blocks or keys that may be registered already, or after a branch."""
        registered = 0
        chain, last = self._place(keys, start)
        for block, key in zip(blocks, keys[start:], strict=False):
            known = self.chain_of[block] is not None
            following = chain is not None and last + 1 < len(chain.keys)
            if chain is not None and following and chain.keys[last + 1] == key:
                last += 1
            elif (other := self._chains.get(key)) is not None:
                chain, last = other, 0
            else:
                if chain is None or following:
                    chain = self._chains[key] = Chain()
                chain.blocks.append(block)
                chain.keys.append(key)
                self.chain_of[block], last = chain, len(chain.keys) - 1
                registered += 1
                continue
            if not known:
                self.chain_of[block], self._key_of_copy[block] = _COPY, key
                self.copies.setdefault(key, []).append(block)
                registered += 1
        return registered

    def _place(self, keys: Sequence[Hashable], end: int) -> tuple[Chain | None, int]:
        """Where the last of the first `end` keys is: its chain, and its number in that."""
        chain, start, last = None, 0, -1
        while start < end:
            chain, last = self._chains.get(keys[start]), -1
            count = 1
            if chain is not None:
                count = min(chain.agreement(keys, start), end - start)
                last = count - 1
            start += count
        return chain, last

    def discard(self, blocks: Sequence[int]) -> list[Hashable]:
        """These blocks have no content any more; returns the keys that no other block has."""
        gone: list[Hashable] = []
        if len(blocks) == 1:  # as most often while requests decode
            block = blocks[0]
            chain = self.chain_of[block]
            assert chain is not None, "it has no content"
            if self.copies or chain.blocks[-1] != block or len(chain.keys) == 1:
                gone = self._discard_one(block, chain)
            else:
                chain.blocks.pop()
                gone = [chain.keys.pop()]
            self.chain_of[block] = None
            return gone
        blocks, at = list(blocks), 0
        while at < len(blocks):
            chain = self.chain_of[blocks[at]]
            assert chain is not None, "it has no content"
            count = _common_end(chain.blocks, blocks, at)
            if count and self.copies and not self.copies.keys().isdisjoint(chain.keys[-count:]):
                count = 0
            if count:
                gone += chain.keys[-count:]
                self._cut(chain, count)
            else:
                gone += self._discard_one(blocks[at], chain)
            at += count or 1
        for block in blocks:
            self.chain_of[block] = None
        return gone

    def _discard_one(self, block: int, chain: Chain) -> list[Hashable]:
        """The same for one block, anywhere."""
        if chain is _COPY:
            key = self._key_of_copy.pop(block)
            self.copies[key].remove(block)
        else:
            at = len(chain.blocks) - 1
            if chain.blocks[at] != block:
                at = chain.blocks.index(block)
            key = chain.keys[at]
            if key not in self.copies:
                self._cut(self._split(chain, at + 1), 1)
                return [key]
            block = chain.blocks[at] = self.copies[key].pop(0)
            self.chain_of[block] = chain
            del self._key_of_copy[block]
        if not self.copies[key]:
            del self.copies[key]
        return []

    def _cut(self, chain: Chain, count: int) -> None:
        """Remove the last blocks of a chain."""
        if count == len(chain.keys):
            del self._chains[chain.keys[0]]
        del chain.blocks[-count:], chain.keys[-count:]

    def _split(self, chain: Chain, at: int) -> Chain:
        """Make two chains of one; returns the first, of `at` blocks."""
        if at == len(chain.keys):
            return chain
        first, rest = chain, Chain()
        if at <= len(chain.keys) // 2:  # the shorter one is new
            first, rest = rest, chain
            first.blocks, first.keys = chain.blocks[:at], chain.keys[:at]
            del chain.blocks[:at], chain.keys[:at]
        else:
            rest.blocks, rest.keys = chain.blocks[at:], chain.keys[at:]
            del chain.blocks[at:], chain.keys[at:]
        for half in (first, rest):
            self._chains[half.keys[0]] = half
        moved = rest if first is chain else first
        for block in moved.blocks:
            self.chain_of[block] = moved
        return first

    def check(self) -> None:
        """Raise IntegrityError if blocks and keys disagree."""
        listed = {(block, _COPY, key) for block, key in self._key_of_copy.items()}
        of_keys = {(block, _COPY, key) for key, blocks in self.copies.items() for block in blocks}
        wrong, keys = listed != of_keys, [*self]
        for first, chain in self._chains.items():
            wrong |= chain.keys[0] != first or len(chain.keys) != len(chain.blocks)
            pairs = zip(chain.blocks, chain.keys, strict=False)
            listed.update((block, chain, key) for block, key in pairs)
        known = {(block, chain) for block, chain in enumerate(self.chain_of) if chain is not None}
        if (
            wrong
            or known != {(block, chain) for block, chain, _ in listed}
            or len(known) != len(listed)
            or len(keys) != len({*keys})
            or not self.copies.keys() <= {*keys}
        ):
            raise IntegrityError("the prefix cache's two indexes disagree")


def _common_end(chain: Sequence[int], blocks: Sequence[int], at: int) -> int:
    """How many blocks from `at` on are the end of a chain, the last first."""
    if not chain or chain[-1] != blocks[at]:
        return 0
    count = min(len(chain), len(blocks) - at)
    if chain[: -count - 1 : -1] == blocks[at : at + count]:
        return count
    return next(n for n in range(count) if chain[-n - 1] != blocks[at + n])

"""Blocks of a cache that nobody holds, in the order in which they are to be forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Idle:
    """Free blocks in bundles that came together; the oldest bundle goes first, from its end.

    A bundle is what was a request's block table, so its tail goes before its head, and whoever
    finds its beginning again takes that out in one piece.
    """

    def __init__(self, total: int) -> None:
        """`total`: how many blocks there are; they are numbered from 0 on."""
        self.count = 0
        """How many are here."""
        self._bundles: dict[int, list[int]] = {}  # by number, the oldest first; none is empty
        self._oldest = 0  # no bundle has a lower number
        self._next = 0  # of whoever comes
        self._bundle_of = [-1] * total  # the number of a block's bundle; -1: it is not here

    def __contains__(self, block: int) -> bool:
        return self._bundle_of[block] >= 0

    def __iter__(self) -> Iterator[int]:
        for bundle in self._bundles.values():
            yield from reversed(bundle)

    def among(self, blocks: Sequence[int]) -> int:
        """How many of these are here."""
        bundle_of, count = self._bundle_of, 0
        for block in blocks:
            count += bundle_of[block] >= 0
        return count

    def add(self, bundle: list[int]) -> None:
        """These come, at least one; the last of them is the first to go."""
        number, self._next = self._next, self._next + 1
        self._bundles[number] = bundle
        self.count += len(bundle)
        for block in bundle:
            self._bundle_of[block] = number

    def pop(self, most: int) -> list[int]:
        """The first so many go, or all if there are not as many."""
        gone: list[int] = []
        while len(gone) < most and self._bundles:
            while (bundle := self._bundles.get(self._oldest)) is None:
                self._oldest += 1
            more = most - len(gone)
            gone += bundle[: -more - 1 : -1]
            if more < len(bundle):
                del bundle[-more:]
            else:
                del self._bundles[self._oldest]
        for block in gone:
            self._bundle_of[block] = -1
        self.count -= len(gone)
        return gone

    def take_out(self, blocks: Sequence[int]) -> list[int]:
        """Those of these blocks that are here go; returns the others."""
        others, at, bundle_of = list[int](), 0, self._bundle_of
        while at < len(blocks):
            number = bundle_of[blocks[at]]
            if number < 0:
                others.append(blocks[at])
                at += 1
                continue
            bundle = self._bundles[number]
            begin = end = bundle.index(blocks[at])
            while end < len(bundle) and at < len(blocks) and bundle[end] == blocks[at]:
                bundle_of[blocks[at]] = -1
                end, at = end + 1, at + 1
            del bundle[begin:end]
            self.count -= end - begin
            if not bundle:
                del self._bundles[number]
        return others

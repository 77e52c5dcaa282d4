"""A buddy allocator: contiguous runs whose sizes are powers of two."""

from __future__ import annotations

from pagedsim.core.errors import IntegrityError


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


class BuddyAllocator:
    """Hands out aligned runs of 2^k units from `total` units.

    A total that is no power of two is a row of shrinking arenas: 15,728 = 8192 + 4096 + 2048 + …

    >>> buddy = BuddyAllocator(15728)
    >>> [buddy.take(2048) for _ in range(8)]
    [12288, 8192, 10240, 0, 2048, 4096, 6144, None]
    >>> buddy.free
    1392
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self.largest = 1 << (total.bit_length() - 1)
        # By size, the starts of the free runs; a dict keeps a set in a fixed order.
        self._runs: dict[int, dict[int, None]] = {}
        start = 0
        for bit in reversed(range(total.bit_length())):
            self._runs[1 << bit] = {}
            if total >> bit & 1:
                self._runs[1 << bit][start] = None
                start += 1 << bit

    def take(self, size: int) -> int | None:
        """Start of a run of `power_of_two(size)` units, or None if there is no such run."""
        want = power_of_two(size)
        run = min((run for run, starts in self._runs.items() if run >= want and starts), default=0)
        if not run:
            return None
        start = min(self._runs[run])
        del self._runs[run][start]
        while run > want:  # keep the lower half, free the upper one
            run //= 2
            self._runs[run][start + run] = None
        self.free -= want
        return start

    def give(self, start: int, size: int) -> None:
        """Take back what `take(size)` gave, and join it with its free neighbours."""
        run = power_of_two(size)
        self.free += run
        while run * 2 in self._runs and (start ^ run) in self._runs[run]:
            del self._runs[run][start ^ run]
            start &= ~run
            run *= 2
        self._runs[run][start] = None

    def check(self, taken: dict[int, int]) -> None:
        """Raise IntegrityError unless runs {start: size} and the free ones tile the memory."""
        runs = [(start, power_of_two(size)) for start, size in taken.items()]
        runs += [(start, run) for run, starts in self._runs.items() for start in starts]
        at = 0
        for start, run in sorted(runs):
            if start != at:
                problem = "leaked" if start > at else "given out twice"
                raise IntegrityError(f"buddy allocator: units {at} to {start} {problem}")
            at = start + run
        free = self.total - sum(power_of_two(size) for size in taken.values())
        if at != self.total or free != self.free:
            raise IntegrityError(
                f"buddy allocator: {at} of {self.total} units accounted for, "
                f"{self.free} counted free, {free} are"
            )

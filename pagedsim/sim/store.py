"""A store below host memory: a disk of one server, or what several reach over a network."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import refuse_settings, require_flag, require_number, shown
from pagedsim.sim.hardware import GIB


@dataclass(frozen=True)
class Way:
    """The timing of one direction of a link."""

    latency: float
    """Seconds before the first byte of a transfer."""
    rate: float
    """Bytes a second."""


class Link:
    """The link to a store: reads and writes are two independent FIFO queues.

    The end of a transfer is known when it is enqueued, so no simulation events are needed.
    """

    def __init__(self, read: Way, write: Way) -> None:
        self._read = read
        self._write = write
        self._read_until = 0.0
        self._write_until = 0.0

    def look_up(self, now: float) -> float:
        """Ask what is there; returns when the answer comes, which waits for no transfer."""
        return now + self._read.latency

    def read_seconds(self, size: float) -> float:
        """Seconds of a read of so many bytes while nothing is under way."""
        return _end(self._read, size, 0.0)

    def write(self, size: float, now: float) -> float:
        """Enqueue a write of so many bytes; returns when it ends."""
        self._write_until = _end(self._write, size, max(now, self._write_until))
        return self._write_until

    def read(self, size: float, now: float) -> float:
        """Enqueue a read of so many bytes; returns when it ends."""
        self._read_until = _end(self._read, size, max(now, self._read_until))
        return self._read_until


def _end(way: Way, size: float, begin: float) -> float:
    return begin + way.latency + size / way.rate


class Store:
    """Items of one size by key. The least recently written or read is evicted, and of those that
    were written or read at once the last; an item is found once it has been written."""

    def __init__(self, link: Link, size: float, capacity: float = inf) -> None:
        """`size` is that of an item in bytes, and `capacity` how many it holds."""
        self.link = link
        self._size = size
        self._capacity = capacity
        self._written: OrderedDict[Hashable, float] = OrderedDict()  # and when

    def has(self, key: Hashable, now: float) -> bool:
        return self._written.get(key, inf) <= now

    def count(self, keys: Sequence[Hashable], now: float) -> int:
        """How many of these it has in a row from the first."""
        return sum(1 for _ in takewhile(lambda key: self.has(key, now), keys))

    def write(self, keys: Sequence[Hashable], now: float) -> float:
        """Write what it does not have, or is sent already; returns when that ends."""
        new = [key for key in keys if key not in self._written]
        end = self.link.write(self._size * len(new), now) if new else now
        self._written.update(dict.fromkeys(new, end))
        self._use(keys)
        while len(self._written) > self._capacity:
            self._written.popitem(last=False)
        return end

    def read_seconds(self, count: int) -> float:
        """Seconds to read so many items while nothing is under way."""
        return self.link.read_seconds(self._size * count)

    def read(self, keys: Sequence[Hashable], now: float) -> float:
        """Read what it has; returns when that ends."""
        self._use(keys)
        return self.link.read(self._size * len(keys), now)

    def _use(self, keys: Sequence[Hashable]) -> None:
        for key in reversed(keys):
            if key in self._written:
                self._written.move_to_end(key)

    def lose(self, keys: Sequence[Hashable], end: float) -> None:
        """A write of these that was to end then has failed; others have written some before."""
        for key in keys:
            if self._written.get(key) == end:
                del self._written[key]


@dataclass(frozen=True)
class StoreSettings:
    """A store as it is configured; its size and rates are those of each GPU."""

    gib: float | None
    """0: there is none; None: without bounds."""
    read_gb_s: float | None
    """None: what is read takes the latency alone."""
    write_gb_s: float | None
    latency_us: float = 0.0
    """Before the first byte of a read or write."""
    folder: str | None = None
    """Of an engine's files, in place of a size and of rates."""
    shared: bool = False
    """Whether all replicas that are alike have one, of the size and with the link of one."""

    @classmethod
    def of(cls, where: str, settings: Any) -> StoreSettings | None:
        """What is set under `where`; None: there is no such store."""
        if settings is None:
            return None
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{where}={shown(settings)}: must be a mapping of settings, or null")
        given = {str(key): value for key, value in settings.items()}
        refuse_settings("a store", given, cls, where)
        store = cls(**given)
        for key in ("read_gb_s", "write_gb_s"):
            if (rate := getattr(store, key)) is not None:
                require_number(f"{where}.{key}", rate, above=0)
        require_number(f"{where}.gib", store.gib or 0, 0)
        require_number(f"{where}.latency_us", store.latency_us, 0)
        require_flag(f"{where}.shared", store.shared)
        if store.gib is None or store.gib:
            return store
        if store.folder is not None:
            raise ConfigError(f"{where}.folder={store.folder}: is the engine's; set gib here")
        return None

    def store(
        self, where: str, item: str, size: float, groups: int, stores: dict[str, Store]
    ) -> Store:
        """One that is empty, for so many groups of GPUs, whose items have `size` bytes a GPU; or
        that of `stores`, where one that is to be shared is put for servers that are alike."""
        if where in stores:
            return stores[where]
        capacity = inf if self.gib is None else self.gib * GIB * groups // size
        if not capacity:
            raise ConfigError(
                f"{where}.gib={self.gib:g}: must hold a {item}, which takes {size / GIB:.3g} GiB"
            )
        read, write = (
            Way(self.latency_us * 1e-6, inf if gb_s is None else gb_s * 1e9 * groups)
            for gb_s in (self.read_gb_s, self.write_gb_s)
        )
        store = Store(Link(read, write), size, capacity)
        if self.shared:
            stores[where] = store
        return store

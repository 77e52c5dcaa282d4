"""How long reads and writes of a store below the GPU take: a disk, or a pool over a network."""

from __future__ import annotations

from dataclasses import dataclass


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

"""Why a server does not even try a request."""

from __future__ import annotations

from pagedsim.core import PagedsimError


class Overloaded(PagedsimError):
    """The queue is full."""

    def __init__(self, text: str, retry_after: int) -> None:
        super().__init__(text)
        self.retry_after = retry_after
        """Seconds in which it is likely to have room."""


class Closing(PagedsimError):
    """The server takes no requests any more."""


class EngineDead(PagedsimError):
    """The engine's thread has ended, and serves nobody."""

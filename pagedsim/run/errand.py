"""What an experiment does that compares no arms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path


class Errand(ABC):
    """An experiment that says itself what came out of it."""

    reads: tuple[str, ...] | None = None
    """The keys that it reads, where these are few: of others it is said that they do nothing."""

    @abstractmethod
    def perform(self, folder: Path) -> None:
        """Do it, print what came out, and leave files in `folder`; raises what went wrong."""

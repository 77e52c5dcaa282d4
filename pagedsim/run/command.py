"""What was typed, as it is told to whoever wants to do the same."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from hydra.core.hydra_config import HydraConfig


def typed(*left_out: str) -> list[str]:
    """The overrides of this run, but for those that begin with one of these."""
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    return [word for word in words if not word.startswith(left_out)]


def command(words: Iterable[str]) -> str:
    """The line that gives these overrides."""
    return shlex.join(["python", "-m", "pagedsim", *words])

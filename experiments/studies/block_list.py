"""Block sizes as a study lists them."""

from __future__ import annotations

from collections.abc import Sequence

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_whole


def require_sizes(key: str, sizes: Sequence[int], least: int = 1) -> None:
    """Raise ConfigError unless these are `least` or more different whole numbers above 0."""
    if not isinstance(sizes, (list, tuple)):
        raise ConfigError(f"{key}={sizes}: must be a list such as [8, 16]")
    for size in sizes:
        require_whole(key, size, 1)
    if len(sizes) < least or len(set(sizes)) < len(sizes):
        raise ConfigError(f"{key}={list(sizes)}: must be {least} or more that differ")

"""What must hold of pools of blocks, whoever owns them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pagedsim.core.errors import IntegrityError


def check_pool(name: str, total: int, free: list[int], owners: Counter[int]) -> None:
    """Raise IntegrityError unless each of `total` blocks is either free, once, or owned."""
    if len(set(free)) != len(free):
        raise IntegrityError(f"{name} pool: a block is in the free list twice")
    if both := owners.keys() & set(free):
        raise IntegrityError(f"{name} pool: blocks {sorted(both)} are free and in use")
    if lost := set(range(total)) - owners.keys() - set(free):
        raise IntegrityError(f"{name} pool: blocks {sorted(lost)} leaked: not free, not in use")
    if len(owners) + len(free) != total:
        raise IntegrityError(f"{name} pool: {len(owners)} used + {len(free)} free != {total}")


def check_shared(shared: Mapping[int, int], saved: int, owners: Counter[int]) -> None:
    """Raise IntegrityError unless owners beyond the first of each block are counted as they are."""
    for block, count in owners.items():
        if (counted := 1 + shared.get(block, 0)) != count:
            raise IntegrityError(f"block {block} counts {counted} references, {count} exist")
    if stray := shared.keys() - owners.keys():
        raise IntegrityError(f"references are counted for unused blocks {sorted(stray)}")
    if (total := sum(shared.values())) != saved:
        raise IntegrityError(f"{total} owners beyond the first, {saved} are counted")

"""What attention loses to small blocks."""

from __future__ import annotations


def slowdown(block_size: int, block_tokens: float) -> float:
    """How many times longer decodes attend than if a sequence's keys and values lay in one piece.

    Finding a block takes as long as reading `block_tokens` tokens, however large the block is: an
    entry of the table, a branch, a read that begins anew.

    >>> slowdown(16, 4.0)
    1.25
    """
    return 1.0 + block_tokens / block_size

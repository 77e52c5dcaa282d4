"""Prompts of workloads: they share what they should, and nothing else."""

import numpy as np

from pagedsim.workload import BlockPrompts, PrefixedPrompts


def test_prefixed_prompts_share_their_prefix_and_nothing_else() -> None:
    prefix, lengths = np.array([0, -1, 0], np.int32), np.array([40, 30, 20], np.int32)
    prompts = PrefixedPrompts(prefix, np.array([32, 0, 32], np.int32), lengths)
    assert [len(prompts[row]) for row in range(3)] == [40, 30, 20]
    assert prompts[0][:16] == prompts[2][:16]  # the third is cut within its prefix
    assert prompts[0][32:40] != prompts[1][:8]


def test_pieces_are_plain_numbers() -> None:
    prompts = BlockPrompts(np.arange(3), np.array([0, 3]), np.array([10], np.int32), 4)
    assert repr(prompts[0][0:8]) == "((0, 0, 4), (1, 0, 4))"

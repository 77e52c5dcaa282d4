"""CUDA graphs over ranks: all capture and replay the same sizes, and tokens are handed out first.

Without a GPU what is replayed is the work itself, and the other rank is a thread.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedsim.core import ConfigError
from pagedsim.engine import runner as runner_module
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.engine_args import Arguments
from tests.engine.architectures import CONFIGS
from tests.engine.parallel.together import OneProcess, groups, shards
from tests.engine.test_equality import BLOCK, BLOCKS, GREEDY, LONGEST, PROMPTS, TOKENS, served
from tests.engine.test_graphs import SIZES, Replayer

SETTINGS: dict[str, Any] = {
    "device": "cpu", "block_size": BLOCK, "blocks": BLOCKS, "cpu_blocks": BLOCKS,
    "max_model_len": LONGEST + TOKENS, "max_seqs": SIZES[-1], "max_batched_tokens": 32,
    "preemption": "swap",
}  # fmt: skip


def tokens(engine: LLMEngine) -> list[Any]:
    outputs = served(engine, GREEDY)
    return [outputs[i].outputs[0].token_ids for i in range(PROMPTS)]


@pytest.mark.parametrize("ahead", [False, True])
def test_ranks_replay_the_same_sizes(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["qwen3"]()
    config.initializer_range = 0.3
    alone = tokens(LLMEngine(model=config, **SETTINGS))
    recorders: dict[int, Replayer] = {}

    def recorder_of(device: torch.device) -> Replayer:
        return recorders.setdefault(len(recorders), Replayer())

    monkeypatch.setattr(runner_module, "recorder_of", recorder_of)
    with groups(2) as made:
        ranks = OneProcess(config, made)
        settings = {**SETTINGS, "async_scheduling": ahead, "tensor_parallel": 2}
        engine = LLMEngine(Arguments.of(model=ranks.model, **settings))
        assert tokens(engine) == alone
        engine.close()
        ranks.close()
    one, other = recorders.values()
    assert one.recorded == other.recorded == len(SIZES)
    assert one.replayed == other.replayed and len(set(one.replayed)) > 1


def test_a_rank_without_graphs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "recorder_of", lambda device: Replayer(waits_at=0))
    with groups(1) as made:
        (model,) = shards(CONFIGS["llama"](), made)
        with pytest.raises(ConfigError, match="give enforce_eager=True"):
            LLMEngine(Arguments.of(model=model, **SETTINGS))

"""What a combination of settings cannot do, said at the start."""

from __future__ import annotations

from pagedsim.core.errors import ConfigError, require_flag, require_whole
from pagedsim.core.memory import Memory
from pagedsim.core.places import Limits
from pagedsim.core.policy import Policy, Preemption, overrides
from pagedsim.core.policy_validation import refuse_renamed, refuse_slips


def refuse_misfits(limits: Limits, memory: Memory, policy: Policy, preemption: Preemption) -> None:
    """Raise ConfigError for what this combination cannot do."""
    require_whole("max_model_len", limits.max_model_len, 1)
    require_whole("max_batched_tokens", limits.max_batched_tokens, 1)
    refuse_slips(policy)
    refuse_renamed(preemption, Preemption)
    require_flag(f"{type(preemption).__name__}.swaps", preemption.swaps)
    if policy.displacing is False and overrides(policy, "may_preempt"):
        raise ConfigError(
            f"{type(policy).__name__} overrides displaces, which is never asked: "
            "set displacing = True"
        )
    if overrides(policy, "pin_prefix_for") and not memory.can_guard:
        raise ConfigError(
            f"{type(policy).__name__} keeps what requests leave in a prefix cache, which "
            f"{type(memory).__name__} has not: choose memory=prefix"
        )
    if limits.max_model_len > memory.longest:
        raise ConfigError(
            f"max_model_len={limits.max_model_len}: memory of {memory.total} blocks × "
            f"{memory.block_size} tokens holds no request longer than {memory.longest}; "
            "lower max_model_len or give more blocks"
        )
    if preemption.swaps and not memory.can_swap:
        raise ConfigError(
            f"preemption that swaps needs paged memory: {type(memory).__name__} "
            "keeps what it reserved until the end; choose preemption=recompute"
        )
    if preemption.swaps and not memory.cpu_total:
        raise ConfigError("preemption that swaps needs cpu_blocks: at least 1, not 0")

"""Whether a policy will wait: what lets a driver skip steps in which it could decide nothing."""

from __future__ import annotations

from pagedsim.core.policy import Policy, overrides


def patient(policy: Policy, displacing: bool) -> bool:
    """Whether a policy that could admit nobody will not change its mind while the batch decodes.

    Memory and seats only become scarcer then, so only an order or an answer that changes by
    itself could let somebody in.
    """
    if overrides(policy, "admit") or overrides(policy, "sheds"):
        return False
    if displacing and overrides(policy, "displaces"):
        return False
    if not overrides(policy, "rank") or policy.rank_changes == "never":
        return True
    return policy.rank_changes in ("while running", "while decoding") and not displacing

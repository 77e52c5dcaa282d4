"""What a policy needs of the requests, or else it is another policy without a word."""

from __future__ import annotations

import numpy as np

from pagedsim.core import Around, ConfigError, Policy
from pagedsim.workload import Workload


def refuse_unmet(policy: Policy, workload: Workload) -> None:
    """Raise ConfigError where the requests lack what a policy goes by."""
    while isinstance(policy, Around):
        _refuse(policy, workload)
        policy = policy.of
    _refuse(policy, workload)


def _refuse(policy: Policy, workload: Workload) -> None:
    needs, name = policy.needs, f"policy: {type(policy).__name__}"
    if "predictor" in needs and np.isnan(workload.predicted_len).all():
        raise ConfigError(
            f"{name} goes by predicted lengths, and nobody predicts any; "
            "choose predictor=oracle, noisy, bucket or rank"
        )
    if "deadline" in needs and np.isnan(workload.deadline).all():
        raise ConfigError(
            f"{name} goes by deadlines, and no request has one; set workload.deadline=, in seconds"
        )
    if "prompts" in needs and workload.prompts is None:
        raise ConfigError(
            f"{name} goes by what prompts have in common, and these have no contents; "
            "set workload.prefixes, or take a trace with them"
        )

"""What a policy needs of the requests, or else it is another policy without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from pagedsim.core import Around, ConfigError, Policy
from pagedsim.core.policy import Need
from pagedsim.workload import Workload

LACKS: Mapping[Need, tuple[Callable[[Workload], bool], str]] = {
    "predictor": (
        lambda workload: bool(np.isnan(workload.predicted_len).all()),
        "goes by predicted lengths, and nobody predicts any; "
        "choose predictor=oracle, noisy, bucket or rank",
    ),
    "deadline": (
        lambda workload: bool(np.isnan(workload.deadline).all()),
        "goes by deadlines, and no request has one; set workload.deadline=, in seconds",
    ),
    "prompts": (
        lambda workload: workload.prompts is None,
        "goes by what prompts have in common, and these have no contents; "
        "set workload.prefixes, or take a trace with them",
    ),
    "client": (
        lambda workload: len(np.unique(workload.client)) < 2,
        "goes by clients, and all requests are of one; set workload.client=, or "
        "workload.client_column= of a trace",
    ),
    "priority": (
        lambda workload: len(np.unique(workload.priority)) < 2,
        "goes by priorities, and all requests have the same; set "
        "workload.priority=, or workload.priority_column= of a trace",
    ),
}
"""Whether a workload lacks what a word of `Policy.needs` means, and what to say of it."""
_REFUSED: tuple[Need, ...] = ("predictor", "deadline", "prompts")
"""Of one client, or one priority, a policy is still itself."""


def refuse_unmet(policy: Policy, workload: Workload) -> None:
    """Raise ConfigError where the requests lack what a policy goes by."""
    for need, reason in unmet(policy, workload):
        if need in _REFUSED:
            raise ConfigError(f"policy: {reason}")


def unmet(policy: Policy, workload: Workload) -> Iterator[tuple[Need, str]]:
    """What the requests lack that a policy goes by, or one that it stands around; and why."""
    for need in policy.needs:
        lacks, reason = LACKS[need]
        if lacks(workload):
            yield need, f"{type(policy).__name__} {reason}"
    if isinstance(policy, Around):
        yield from unmet(policy.of, workload)

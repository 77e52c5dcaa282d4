"""The objects of one run, built from its configuration."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagedsim.backends.base import BackendRun
from pagedsim.core import ConfigError, Policy, PolicyWrapper, Scheduler
from pagedsim.core.errors import unknown_client
from pagedsim.core.policy import Need
from pagedsim.metrics.slo import Reader, Slo, validate_clients
from pagedsim.policies.fairness import DRR, VTC
from pagedsim.policies.slo import SLO
from pagedsim.policies.victims import VictimRule
from pagedsim.spec.run import RunSpec, Settings
from pagedsim.workload import Workload


class Refusal(NamedTuple):
    """How many requests no server of a run could ever serve."""

    refused: int
    of: int
    reason: str
    """That of the shortest of them; empty if there is none."""

    @property
    def whole(self) -> bool:
        """Whether it is all of them."""
        return self.refused == self.of

    def __str__(self) -> str:
        text = f"{self.refused:,} of {self.of:,} requests can never be served"
        return f"{text}; the shortest: {self.reason}"


@dataclass(frozen=True)
class Parts:
    """The objects of one run."""

    workload: Workload
    run: BackendRun
    slo: Slo | None
    reader: Reader
    drawn: bool
    """Whether anything in the run depends on its seed."""

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the run; None for a server elsewhere."""
        return self.run.scheduler if self.run.ours else None

    def refusal(self) -> Refusal:
        """The requests that are too much for every server at which they may arrive, alone and with
        an empty memory. Of those that ask for the same, all above some length are."""
        workload, entries = self.workload, self.run.entries
        count, reason = 0, ""
        if not entries:
            return Refusal(count, len(workload), reason)

        def refused(row: int) -> str | None:
            reasons = [scheduler.infeasible(workload.request(row)) for scheduler in entries]
            return reasons[0] if all(reasons) else None

        for which in np.unique(workload.sampling):
            rows = np.flatnonzero(workload.sampling == which)
            rows = rows[np.argsort(workload.prompt_len[rows], kind="stable")].tolist()
            fitting = bisect_left(rows, True, key=lambda row: refused(row) is not None)
            if fitting < len(rows):
                count += len(rows) - fitting
                reason = reason or refused(rows[fitting]) or ""
        return Refusal(count, len(workload), reason)


def build(settings: Settings, seed: int, workload: Workload | None = None) -> Parts:
    """All that a run is built of, in order; a `workload` given is used instead of its own."""
    spec = RunSpec(settings, seed)
    slo, reader = spec.slo, spec.reader
    backend = spec.backend
    if not backend.fleets:
        refuse_fleet(spec, "this backend is one server; backend=sim simulates many")
    if not backend.elsewhere and spec.fleet.alone:
        spec.server  # noqa: B018  # its policy, preemption, batching and memory
    run = backend.prepare(spec)  # model, hardware, costs and replicas, as far as it has them
    # Last, since a long trace takes longest to read.
    longest = max((entry.max_model_len for entry in run.entries), default=None)
    workload = workload or spec.workload(longest)
    run.refuse(workload)
    for policy in run.policies:
        refuse_unmet(policy, workload)
    if slo is not None:
        validate_clients(slo, workload.clients)
    return Parts(workload, run, slo, reader, workload.drawn or run.draws_for(workload))


def refuse_fleet(config: RunSpec, why: str) -> None:
    """Raise ConfigError for several replicas where there must be one server."""
    settings = config.settings.get("fleet")
    if settings and not config.fleet.alone:
        key = "pools" if settings.get("pools") else "replicas"
        raise ConfigError(f"fleet.{key}={settings[key]}: {why}")


# -- what a policy requires of the requests --------------------------------------------------------

LACKS: Mapping[Need, tuple[Callable[[Workload], bool], str]] = {
    "predictor": (
        lambda workload: bool(np.isnan(workload.predicted_len).all()),
        "goes by predicted lengths, and none are predicted; "
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
    "session": (
        lambda workload: workload.turns is None,
        "goes by sessions, and no request is of one; take workload=chat_sessions or agents, or a "
        "trace with sessions",
    ),
    "client": (
        lambda workload: len(np.unique(workload.client)) < 2,
        "goes by clients, and all requests are of one; set workload.client=, or "
        "workload.columns.client= of a trace",
    ),
    "priority": (
        lambda workload: len(np.unique(workload.priority)) < 2,
        "goes by priorities, and all requests have the same; set "
        "workload.priority=, or workload.columns.priority= of a trace",
    ),
}
"""Whether a workload lacks what a word of `Policy.needs` means, and what to say of it."""
_REFUSED: tuple[Need, ...] = ("predictor", "deadline", "prompts", "session")
"""Of one client, or one priority, a policy is still itself."""


def refuse_unmet(policy: Policy, workload: Workload) -> None:
    """Raise ConfigError where the requests lack what a policy goes by, or a client it weighs."""
    for need, reason in unmet(policy, workload):
        if need in _REFUSED:
            raise ConfigError(f"policy: {reason}")
    known = set(workload.clients)
    for where, part in _with_key(policy):
        for client in part.weights if isinstance(part, (VTC, DRR)) else ():
            if not client or client not in known:
                raise unknown_client(f"{where}.weights.{client}", client, known)


def remarks(policy: Policy, workload: Workload) -> Iterator[str]:
    """What a reader must know of a policy that found little to go by."""
    for need, reason in unmet(policy, workload):
        if need not in _REFUSED:
            lacks, _, instead = reason.partition("; ")
            yield f"{lacks}: alone it is first come, first served; {instead}"
    for where, part in _with_key(policy):
        if isinstance(part, SLO) and (beyond := int((workload.priority > max(part.targets)).sum())):
            levels = ", ".join(f"{level:g}" for level in part.targets)
            yield (
                f"{beyond:,} of {len(workload):,} requests have no target, since their priority is "
                f"beyond those of {where}.targets ({levels}): they go last"
            )


def unmet(policy: Policy, workload: Workload) -> Iterator[tuple[Need, str]]:
    """What the requests lack that a policy goes by, or one that it stands around; and why."""
    for need in policy.needs:
        lacks, reason = LACKS[need]
        if lacks(workload):
            yield need, f"{type(policy).__name__} {reason}"
    if isinstance(policy, PolicyWrapper):
        yield from unmet(policy.inner, workload)


def _with_key(policy: Policy, key: str = "policy") -> Iterator[tuple[str, Policy]]:
    """A policy and those that it stands around, each with the key of its settings."""
    yield key, policy
    if isinstance(policy, PolicyWrapper):
        yield from _with_key(policy.inner, key if isinstance(policy, VictimRule) else f"{key}.of")

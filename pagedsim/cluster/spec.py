"""The configuration of a fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pagedsim.cluster.autoscale import Autoscale
from pagedsim.cluster.dispatcher import MAX_RETRIES
from pagedsim.cluster.failures import Failures, failures_of
from pagedsim.cluster.kv_migration import AFTER_DEATH, RESEND
from pagedsim.cluster.link import Network
from pagedsim.cluster.prefix_fetch import FETCHES, NEVER
from pagedsim.core import ConfigError
from pagedsim.core.errors import (
    choices,
    refuse_settings,
    require_number,
    require_whole,
    shown,
    unknown,
)

ROLES = ("both", "prefill", "decode")
"""Phases that a replica serves."""
MAX_REPLICAS = 10_000
"""A larger number is taken for a mistake."""


@dataclass(frozen=True)
class Pool:
    """Identical replicas."""

    replicas: int = 1
    role: str = "both"
    set: Any = ()
    """Overrides of the configuration, in command-line syntax."""

    def __post_init__(self) -> None:
        require_whole("replicas", self.replicas, 1, MAX_REPLICAS)
        if self.role not in ROLES:
            raise ConfigError(f"role={self.role}: unknown; {choices(str(self.role), ROLES)}")
        if not isinstance(self.set, Sequence) or isinstance(self.set, str):
            raise ConfigError(
                f'set={shown(self.set)}: must be a list of overrides, such as ["hardware=h100"]'
            )


@dataclass(frozen=True)
class FleetSpec:
    """The replicas of a fleet, and how they are connected, fail and scale."""

    replicas: int = 1
    pools: Any = None
    """Pools of different replicas by name, in place of `replicas`."""
    staleness: float = 0.0
    """Maximum age of the counts that a router reads, in seconds."""
    link: Network | None = None
    """The network for KV-cache migration and fetches of prefixes; None: there is none."""
    fetch: str = NEVER
    """Whether a replica gets a prefix that another one has over the network: `never`; `sooner`,
    where that is sooner than to compute it; `always`."""
    on_receiver_death: str = RESEND
    """When the target of a migration fails: `resend` the KV cache to another replica, or
    `recompute` it."""
    max_retries: int = MAX_RETRIES
    """A request set back by more replica failures is rejected."""
    failures: Any = None
    """Failure injection: see `failures.py`."""
    autoscale: Autoscale | None = None
    """Autoscaling; None: all replicas are up all the time."""

    def __post_init__(self) -> None:
        require_whole("replicas", self.replicas, 1, MAX_REPLICAS)
        require_number("staleness", self.staleness, 0)
        if self.pools is not None and self.replicas != 1:
            raise ConfigError(
                f"replicas={self.replicas}: says nothing beside pools; set pools.NAME.replicas"
            )
        if not isinstance(self.link, Network | None):
            raise ConfigError(f"link={shown(self.link)}: must be settings with a _target_, or null")
        require_whole("max_retries", self.max_retries, 0)
        if self.on_receiver_death not in AFTER_DEATH:
            raise unknown("on_receiver_death", str(self.on_receiver_death), AFTER_DEATH)
        if self.fetch not in FETCHES:
            raise unknown("fetch", str(self.fetch), FETCHES)
        self._refuse_unpaired_roles()
        _ = self.dying  # validates it
        if self.autoscale is not None:
            counts = Counter[str]()
            for pool in self.kinds.values():
                counts[pool.role] += pool.replicas
            self.autoscale.refuse_small(counts)

    @cached_property
    def kinds(self) -> Mapping[str, Pool]:
        """The pools by name; "" for identical replicas."""
        if self.pools is None:
            return {"": Pool(self.replicas)}
        if not isinstance(self.pools, Mapping) or not self.pools:
            raise ConfigError(
                f"pools={shown(self.pools)}: must be a mapping of names to settings, such as "
                '{fast: {replicas: 2, set: ["hardware=h100"]}}'
            )
        return {str(name): _pool(str(name), settings) for name, settings in self.pools.items()}

    @property
    def alone(self) -> bool:
        """Whether it is a single server, without routing, failures or autoscaling."""
        return self.pools is None and self.replicas == 1 and not self.changes

    @property
    def changes(self) -> bool:
        """Whether replicas fail, start or stop."""
        return self.failures is not None or self.autoscale is not None

    @cached_property
    def dying(self) -> Failures | None:
        """The validated setting `failures`."""
        replicas = sum(pool.replicas for pool in self.kinds.values())
        return None if self.failures is None else failures_of(self.failures, replicas)

    def _refuse_unpaired_roles(self) -> None:
        """Raise ConfigError for prefill replicas without decode replicas, or the reverse."""
        roles = {pool.role for pool in self.kinds.values()}
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            if role in roles and not roles & {other, "both"}:
                raise ConfigError(
                    f"pools: role={role} has no counterpart; another pool must have role={other} "
                    "or role=both"
                )


def _pool(name: str, settings: Any) -> Pool:
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"pools.{name}={shown(settings)}: must be settings, such as {{replicas: 2}}"
        )
    given = {str(key): value for key, value in settings.items()}
    refuse_settings("a pool", given, Pool, f"pools.{name}")
    try:
        return Pool(**given)
    except ConfigError as error:
        raise ConfigError(f"pools.{name}.{error}") from error

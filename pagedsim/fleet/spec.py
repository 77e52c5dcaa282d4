"""A fleet, as a configuration describes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import (
    choices,
    refuse_settings,
    require_number,
    require_whole,
    shown,
    unknown,
)
from pagedsim.fleet.autoscale import Autoscale, autoscale_of
from pagedsim.fleet.failures import Failures, failures_of
from pagedsim.fleet.front import MAX_RETRIES
from pagedsim.fleet.handover import AFTER_DEATH, RESEND
from pagedsim.fleet.link import Network

ROLES = ("both", "prefill", "decode")
"""What a replica may do."""
MOST = 10_000
"""Replicas: more is a slip."""


@dataclass(frozen=True)
class Pool:
    """Replicas that are alike."""

    replicas: int = 1
    role: str = "both"
    set: Any = ()
    """What differs from the rest of the configuration, in the words of the command line."""

    def __post_init__(self) -> None:
        require_whole("replicas", self.replicas, 1, MOST)
        if self.role not in ROLES:
            raise ConfigError(f"role={self.role}: unknown; {choices(str(self.role), ROLES)}")
        if not isinstance(self.set, Sequence) or isinstance(self.set, str):
            raise ConfigError(
                f'set={shown(self.set)}: must be a list of overrides, such as ["hardware=h100"]'
            )


@dataclass(frozen=True)
class FleetSpec:
    """How many replicas there are, and how they differ."""

    replicas: int = 1
    """Where all are alike."""
    pools: Any = None
    """By name, where they are not; `replicas` then says nothing."""
    staleness: float = 0.0
    """A router sees a replica as it was, at most so many seconds ago."""
    link: Network | None = None
    """What replicas send keys and values over; None: each keeps its own."""
    on_receiver_death: str = RESEND
    """`resend`: keys and values that were on their way to a replica that died are sent to another
    one; `recompute`: they are computed again."""
    max_retries: int = MAX_RETRIES
    """A request under which replicas died more often than this is rejected."""
    failures: Any = None
    """Which replicas die, and when: see `failures.py`."""
    autoscale: Any = None
    """When replicas start and stop: see `autoscale.py`."""

    def __post_init__(self) -> None:
        require_whole("replicas", self.replicas, 1, MOST)
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
        self._refuse_lonely_roles()
        self._refuse_changes_that_cannot_be()

    @cached_property
    def kinds(self) -> Mapping[str, Pool]:
        """The pools by name; "" where all are alike."""
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
        """Whether it is one server, for which nothing of a fleet is needed."""
        return self.pools is None and self.replicas == 1 and not self.changes

    @property
    def changes(self) -> bool:
        """Whether replicas come and go."""
        return self.failures is not None or self.autoscale is not None

    @cached_property
    def dying(self) -> Failures | None:
        """Which replicas die, and when."""
        return failures_of(self.failures, self._count)

    @cached_property
    def scaling(self) -> Autoscale | None:
        """When replicas start and stop."""
        counts = Counter[str]()
        for pool in self.kinds.values():
            counts[pool.role] += pool.replicas
        return autoscale_of(self.autoscale, counts)

    @property
    def _count(self) -> int:
        return sum(pool.replicas for pool in self.kinds.values())

    def _refuse_changes_that_cannot_be(self) -> None:
        """Raise ConfigError for failures, or a rule, of replicas that there are not."""
        _ = self.dying, self.scaling

    def _refuse_lonely_roles(self) -> None:
        """Raise ConfigError where prompts or decodes have nobody to compute them."""
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

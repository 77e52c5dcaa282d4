"""Static batching: a batch is formed, and runs until its last request has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedsim.core.batching.prefill_first import PrefillFirst
from pagedsim.core.errors import ConfigError

if TYPE_CHECKING:
    from pagedsim.core.scheduler import Scheduler


class Static(PrefillFirst):
    """FasterTransformer's way: nobody joins while anybody runs."""

    displaces_by_default = False

    def refuse_misfits(self, scheduler: Scheduler) -> None:
        super().refuse_misfits(scheduler)
        if scheduler.policy.displacing:
            raise ConfigError(
                f"{type(scheduler.policy).__name__} displaces running requests: "
                "a static batch runs to its end; choose another batching or displace=false"
            )

    def _admits(self, scheduler: Scheduler) -> bool:
        return not scheduler.running and super()._admits(scheduler)

    def _resumes(self, scheduler: Scheduler) -> bool:
        return not scheduler.running and super()._resumes(scheduler)

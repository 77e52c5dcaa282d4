"""Early rejection in an overloaded prefill/decode fleet, compared with Mooncake."""

from __future__ import annotations

from dataclasses import dataclass

from pagedsim.core import ConfigError
from pagedsim.experiments.papers.study import Figures
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs


@dataclass(frozen=True, kw_only=True)
class Rejection(Figures):
    """Figures of a fleet that may refuse a request between prefill and decode."""

    def next_runs(self, runs: Runs) -> list[Arm]:
        pools = runs.config["fleet"]["pools"] or {}
        if not {"prefill", "decode"} <= {pool.get("role") for pool in pools.values()}:
            raise ConfigError(
                f"fleet={runs.command.choices.get('fleet')}: must have prefill and decode apart, "
                "as fleet=prefill_decode has: requests are refused between them"
            )
        return super().next_runs(runs)

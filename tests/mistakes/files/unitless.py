"""A plugin whose metric has a unit that no table knows."""

from typing import Any

import pagedsim as ps
from pagedsim.metrics.metric import LESS


@ps.metric.group("Mine", "tokens", LESS)  # type: ignore[arg-type]
def mine(group: Any) -> int:
    return 1

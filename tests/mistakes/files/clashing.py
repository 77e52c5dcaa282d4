"""A plugin whose metric has a name that pagedsim has."""

from typing import Any

import pagedsim as ps
from pagedsim.metrics.metric import LESS


@ps.metric.group("Mine", "count", LESS)
def ttft(group: Any) -> int:
    return 1

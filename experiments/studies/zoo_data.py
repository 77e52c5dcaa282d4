"""The numbers of a zoo, as result.json has them, and what a reader must know of its requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import keys_of
from pagedsim.metrics.compare import estimate, groups_of, values_of
from pagedsim.metrics.notice import Notice, of_one_kind
from pagedsim.metrics.pareto import Standing
from pagedsim.report.pareto import Plane

_NAMED = 4
"""So many arms are named."""


def data_of(standing: Standing, planes: Sequence[Plane]) -> dict[str, Any]:
    """Means by group and arm, and how the arms stand."""
    arms = standing.arms
    return {
        "means": {group or "all": _means(arms, group) for group in groups_of(arms)},
        "frontiers": [
            {"of": [one.key for one in plane], "arms": standing.frontier(*plane)}
            for plane in planes
        ],
        "best": {
            one.label: {"arm": standing.best(one), "not surely worse": standing.as_good(one)}
            for one in standing.criteria
        },
        "beaten": {
            arm: {"by": one.by, "surely": one.surely} for arm, one in standing.beaten().items()
        },
    }


def _means(arms: Arms, group: str | None) -> Mapping[str, Mapping[str, float]]:
    keys = keys_of(arms.metrics)
    found = {
        arm: {key: list(values_of(arms, arm, key, group).values()) for key in keys}
        for arm in arms.arms
    }
    return {
        arm: {key: estimate(values).mean for key, values in one.items() if values}
        for arm, one in found.items()
    }


def gathered(arms: Arms) -> Iterator[str]:
    """What is to be known of the runs, a line each thing, with in which arm most and least."""
    told = [(run.arm, one) for run in arms.runs for one in run.summary.get("notices", ())]
    counts: dict[str, dict[str, int]] = {}
    every = of_one_kind(Notice(**record) for _, record in told)
    for (arm, _), one in zip(told, every, strict=True):
        of_arm = counts.setdefault(one.what, {})
        of_arm[arm] = of_arm.get(arm, 0) + one.count
    for what, by_arm in counts.items():
        least, most = min(by_arm, key=by_arm.__getitem__), max(by_arm, key=by_arm.__getitem__)
        whose = _whose(list(by_arm), arms)
        if not by_arm[most]:
            yield f"{whose}{what}"
        elif by_arm[least] == by_arm[most]:
            yield f"{whose}{by_arm[most]:,} {what}"
        else:
            yield f"{whose}{by_arm[least]:,} ({least}) to {by_arm[most]:,} ({most}) {what}"


def _whose(some: Sequence[str], arms: Arms) -> str:
    """Which arms, where it is not all of them."""
    if len(some) == len(arms.arms):
        return ""
    if len(some) > _NAMED:
        return f"in {len(some)} of the arms: "
    return f"{', '.join(some)}: "

"""Report of a zoo: finding, tables, data and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.studies.zoo_arms import guessed
from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import keys_of, scale_of, text_of
from pagedsim.metrics.compare import Comparison, estimate, groups_of, values_of
from pagedsim.metrics.finding import finding, in_words, sureness
from pagedsim.metrics.notice import Notice, of_one_kind
from pagedsim.metrics.pareto import Criterion, Standing
from pagedsim.metrics.result import Listing
from pagedsim.report.numbers import signed
from pagedsim.report.pareto import Plane
from pagedsim.report.table import Section, sections

HOLDS = (
    "who wins holds for these requests on this server: memory, preemption and load decide how many "
    "wait and who is preempted, and others may win with other memory.blocks=, preemption= and "
    "workload.rate="
)
COUNTED_APART = (
    "memory=prefix keeps a beginning that requests share once, and these count it for each who has "
    "it, so that they let in fewer than would fit"
)
_NAMED = 4
"""Maximum number of arms named in a list."""
_FRONT = 10
"""Maximum number of arms named of a Pareto front."""


def sentences(standing: Standing, planes: Sequence[Plane], predictors: Sequence[str]) -> list[str]:
    """Pareto fronts, best arms, dominated arms, effect of predictors, and caveats."""
    if len(standing.arms.arms) < 2 or not standing.arms.finished:
        return finding(standing.arms)
    axes = dict.fromkeys(one for plane in planes for one in plane)
    return [
        *(_front(standing, plane) for plane in planes),
        *(_best(standing, one) for one in axes),
        *_beaten(standing),
        *(line for one in list(axes)[:1] for line in _guesses(standing, one, predictors)),
        *_same(standing),
        *_selective(standing),
        *sureness(standing.arms),
    ]


def _front(standing: Standing, plane: Plane) -> str:
    front = standing.frontier(*plane)
    return f"Pareto front of {plane[0].label} and {plane[1].label}: {_some(front, _FRONT)}."


def _best(standing: Standing, one: Criterion) -> str:
    best = standing.best(one)
    assert best is not None
    value = text_of(one.key, standing.mean(best, one))
    alike = standing.as_good(one)
    doubt = f"; not surely behind it: {_some(alike)}" if alike else ""
    if best == standing.baseline:
        return f"{one.label}: best with {best} ({value}){doubt}."
    gain = standing.compared(best, standing.baseline, one)
    told = f"against {standing.baseline} it {in_words(gain)}" if gain else value
    told += "" if gain is None or gain.sure else ", which is not sure"
    return f"{one.label}: best with {best}; {told}{doubt}. {_price(standing, best)}"


def _price(standing: Standing, arm: str) -> str:
    cost = standing.price(arm)
    if cost is None:
        return "It costs nothing that is sure."
    return f"What it costs most: it {in_words(cost)}."


def _beaten(standing: Standing) -> Iterator[str]:
    found = standing.beaten()
    arms = len(standing.arms.arms)
    if not found:
        yield f"None of {arms} arms is behind another by every criterion."
        return
    told = ", ".join(f"{arm} (by {one.by})" for arm, one in found.items())
    yield (
        f"{len(found)} of {arms} arms are nowhere better than another one, and somewhere surely "
        f"worse: {told}."
    )


def _guesses(standing: Standing, one: Criterion, predictors: Sequence[str]) -> Iterator[str]:
    """The effect of other predictors than the first."""
    first, *others = predictors
    for other in others:
        told = []
        for arm in standing.arms.arms:
            name = arm.removesuffix(guessed("", other))
            if name != arm and guessed(name, first) in standing.arms.arms:
                found = standing.compared(arm, guessed(name, first), one)
                told += [f"{name} {_change(found)}"] if found else []
        if told:
            yield (
                f"{one.label} with predictor={other} in the place of {first}, in brackets where "
                f"not sure: {', '.join(told)}."
            )


def _change(one: Comparison) -> str:
    text = signed(one.ratio.mean - 1)
    return text if one.sure else f"({text})"


def _same(standing: Standing) -> Iterator[str]:
    if same := standing.same():
        yield f"Here the same as {standing.baseline} in every number: {', '.join(same)}."


def _selective(standing: Standing) -> Iterator[str]:
    if left := standing.selective:
        told = ", ".join(f"{arm} ({count:,})" for arm, count in left.items())
        yield (
            f"Fewer requests than others finished {told}: their latencies are of those alone, and "
            "are compared with no other arm's."
        )


# -- tables ----------------------------------------------------------------------------------------


def listings(standing: Standing) -> list[Listing]:
    """All tables."""
    if len(standing.arms.arms) < 2 or not standing.arms.finished:
        return []
    return [_winners(standing), *_losers(standing), *_classes(standing)]


def _winners(standing: Standing) -> Listing:
    """The best arm by each criterion, those not significantly worse, and the best arm's costs."""
    rows = []
    for one in standing.criteria:
        if (best := standing.best(one)) is None:
            continue
        gain, cost = standing.compared(best, standing.baseline, one), standing.price(best)
        rows.append(
            [
                one.label,
                best,
                text_of(one.key, standing.mean(best, one)),
                "" if best == standing.baseline or gain is None else _ratio(gain),
                _some(standing.as_good(one)),
                "" if cost is None else f"{_name(cost)} {_ratio(cost)}",
            ]
        )
    baseline = f"against {standing.baseline}"
    head = ["", "best", "", baseline, "not surely worse", "what the best costs most"]
    note = (
        f"Of the best mean over the seeds. Costs are against {standing.baseline}, too: what is "
        "surely worse (95 %), and in proportion the most. Changes in brackets are not sure."
    )
    return Listing("Which one wins where", head, rows, note)


def _losers(standing: Standing) -> list[Listing]:
    """Dominated arms."""
    found = standing.beaten()
    if not found:
        return []
    rows = [
        [arm, one.by, f"{one.surely} of {len(standing.criteria)}"] for arm, one in found.items()
    ]
    note = "As good or better in the mean by every criterion; surely better by so many of them."
    return [Listing("Nowhere better than another", ["", "beaten by", "surely"], rows, note)]


def _classes(standing: Standing) -> list[Listing]:
    """One table per class of requests."""
    return [
        Listing(part.title, ["", *part.labels], _rows(part), "Means over the seeds.")
        for part in sections(standing.arms)
        if part.client is not None
    ]


def _rows(part: Section) -> list[list[str]]:
    return [[arm, *(cell.text for cell in cells)] for arm, cells in part.rows.items()]


def _ratio(one: Comparison) -> str:
    """The change, in brackets if not significant."""
    ratio = one.ratio.mean
    if not ratio > 0:
        scale = scale_of(one.key, (one.ours, one.theirs))
        return f"{scale.text(one.theirs)} → {scale.text(one.ours)}"
    text = f"×{ratio:.1f}" if ratio >= 2 else signed(ratio - 1)
    return text if one.sure else f"({text})"


def _name(one: Comparison) -> str:
    return Criterion(one.key, one.client).label


def _some(arms: Sequence[str], most: int = _NAMED) -> str:
    """The first arms, and the number of further ones."""
    more = f" and {len(arms) - most} more" if len(arms) > most else ""
    return ", ".join(arms[:most]) + more


def data_of(standing: Standing, planes: Sequence[Plane]) -> dict[str, Any]:
    """Means by group and arm, Pareto fronts, best and dominated arms, for result.json."""
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
    """Notices of the runs, one line each, with the arms of smallest and largest counts."""
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
    """A prefix that names the arms, if not all."""
    if len(some) == len(arms.arms):
        return ""
    if len(some) > _NAMED:
        return f"in {len(some)} of the arms: "
    return f"{', '.join(some)}: "

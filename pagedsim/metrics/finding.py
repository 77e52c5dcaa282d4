"""What a comparison shows, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.catalogue import keys_of, label_of, metric_of, scale_of, text_of
from pagedsim.metrics.compare import (
    Column,
    Comparison,
    baseline_of,
    column_of,
    compare,
    groups_of,
    values_of,
)
from pagedsim.metrics.result import added_up
from pagedsim.metrics.variation import Cell, are_numbers, ascending, said

FEW = 4
"""Maximum number of arms with a sentence each."""
_WAYS = ("better", True), ("worse", False)
_MOST = 3
"""Sentences for each arm along a condition, of the metrics with the largest effects."""


def finding(study: Arms) -> list[str]:
    """Sentences that answer the study's question, most important first."""
    arms = study.arms
    if not arms:
        return ["No run was completed."]
    if not study.finished:
        why = added_up([run.summary for run in study.runs])
        return [": ".join(["No request finished", *why[:1]]) + "."]
    return [*_turned_away(study), *_answers(study)]


def _turned_away(study: Arms) -> Iterator[str]:
    """That most of the requests are not in any figure, if so."""
    shares = {arm: _rejected(study.of(arm)) for arm in study.arms}
    if most := [f"{_percent(share)} % of {arm}" for arm, share in shares.items() if share > 0.5]:
        yield (
            f"Most requests were rejected ({join(most)}), and all figures are of the others alone."
        )


def _rejected(runs: Sequence[Run]) -> float:
    """The share of all requests that were rejected."""
    every = sum(run.summary.get("requests", 0) for run in runs)
    return sum(run.summary.get("rejected", 0) for run in runs) / every if every else 0.0


def _answers(study: Arms) -> list[str]:
    arms = study.arms
    if len(arms) == 1:
        return [_alone(study, arms[0])]
    if study.variation.conditions:
        return [*courses(study), *sureness(study)]
    if study.swept or len(arms) > FEW:
        return [*_extremes(study), *sureness(study)]
    comparisons = compare(study)
    others = {arm: [change for change in comparisons if change.arm == arm] for arm in arms}
    del others[baseline_of(study)]
    sentences = [
        sentence(some, study)
        if some
        else f"There is nothing to compare {arm} with {baseline_of(study)} by: no seed has a value "
        f"of {_named(study)} under both."
        for arm, some in others.items()
    ]
    return [*sentences, *sureness(study)]


def sentence(comparisons: Sequence[Comparison], study: Arms) -> str:
    """Gains and costs of one arm against the baseline."""
    arm, baseline = comparisons[0].arm, comparisons[0].baseline
    told = [change for change in comparisons if telling(change, study)]
    sure = [change for change in told if change.sure or not change.difference.known]
    gains, costs = (_strongest([c for c in sure if c.gain is way]) for way in (True, False))
    if not gains and not costs:
        if not told:
            return f"{arm} and {baseline} do not differ in any metric of this study."
        return (
            f"No difference between {arm} and {baseline} is sure: "
            "every 95 % confidence interval includes zero change."
        )
    clauses = [join(list(map(in_words, changes))) for changes in (gains, costs) if changes]
    versus = f"Against {baseline}, {arm} {clauses[0]}; "
    if len(clauses) == 2:
        return f"{versus}it {clauses[1]}."
    other = "loses" if gains else "gains"
    if any(change.gain is not bool(gains) for change in told):
        return f"{versus}nothing that it {other} is sure."
    return f"{versus}it {other} in nothing."


def in_words(comparison: Comparison) -> str:
    """One comparison as a predicate: "cuts the interactive TTFT P99 by 87 % (95 % CI …)"."""
    key, ratio = comparison.key, comparison.ratio
    whose = "" if comparison.client is None else f"{comparison.client} "
    name = f"the {whose}{in_sentence(key)}"
    theirs, ours = text_of(key, comparison.theirs), text_of(key, comparison.ours)
    values = f"{theirs} to {ours}"
    if comparison.ours == comparison.theirs:
        return f"leaves {name} as it is ({ours})"
    if math.isnan(ratio.mean) or ratio.mean <= 0:
        return f"takes {name} from {values}"
    if ratio.mean >= 2:
        interval = f"; 95 % CI {ratio.low:.1f}–{ratio.high:.1f}" if ratio.known else ""
        return f"raises {name} {ratio.mean:.1f}-fold ({values}{interval})"
    sizes = sorted(abs(bound - 1) for bound in (ratio.low, ratio.high))
    known = ratio.known and comparison.sure
    interval = f"; 95 % CI {'–'.join(map(_percent, sizes))}" if known else ""
    verb = "cuts" if ratio.mean < 1 else "raises"
    return f"{verb} {name} by {_percent(abs(ratio.mean - 1))} % ({values}{interval})"


def _percent(share: float) -> str:
    """Percent, with a decimal below 10 and above 99."""
    whole = 0.1 <= share < 0.99 or share >= 1
    return f"{share * 100:.0f}" if whole else f"{min(share * 100, 99.9 if share < 1 else 1e9):.1f}"


def telling(change: Comparison, study: Arms) -> bool:
    """Whether to report a comparison: with several clients, latencies per client, else overall.

    A difference of 0.0 % is not reported.
    """
    several = len(groups_of(study)) > 1
    if several and metric_of(change.key).latency == (change.client is None):
        return False
    if change.gain is None:
        return False
    return change.ours == change.theirs or _percent(abs(change.ratio.mean - 1)) != "0.0"


def _strongest(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The largest effect of each group, at most three, in descending order."""
    ranked = sorted(comparisons, key=strength, reverse=True)
    first: dict[str | None, Comparison] = {}
    for change in ranked:
        first.setdefault(change.client, change)
    return list(first.values())[:3]


def strength(change: Comparison) -> float:
    """The size of a change, whatever its direction."""
    ratio = change.ratio.mean
    return abs(math.log(ratio)) if ratio > 0 else math.inf if ratio == 0 else 0.0


def _alone(study: Arms, arm: str) -> str:
    parts = []
    for key in keys_of(study.metrics):
        value = column_of(study, key).mean(arm)
        if not math.isnan(value):
            parts.append(f"{in_sentence(key)} {text_of(key, value)}")
    if not parts:
        return f"{arm}: nothing to tell of these requests by {_named(study)}."
    return f"{arm}: {', '.join(parts)}."


def _named(study: Arms) -> str:
    return ", ".join(map(label_of, keys_of(study.metrics)))


def absent(study: Arms) -> list[str]:
    """The study's metrics, by label, of which no run has a value."""
    keys = keys_of(study.metrics)
    return [label_of(key) for key in keys if not any(values_of(study, a, key) for a in study.arms)]


def _extremes(study: Arms) -> list[str]:
    sentences = []
    for key in keys_of(study.metrics):
        way = metric_of(key).better
        column = column_of(study, key)
        means = {arm: column.mean(arm) for arm in study.arms if arm in column.arms}
        if len(means) < 2 or (key.endswith("_p99") and metric_of(key).latency):
            continue
        if len(set(means.values())) == 1:
            same = text_of(key, next(iter(means.values())))
            sentences.append(f"{label_of(key)}: the same for all ({same}).")
            continue
        scale = scale_of(key, means.values())
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        best, worst = (high, low) if way > 0 else (low, high)
        if scale.text(means[low]) == scale.text(means[high]):
            sentences.append(f"{label_of(key)}: alike for all ({scale.text(means[low])}).")
            continue
        apart = column.compare(best, worst)
        if apart is not None and apart.difference.known and not apart.sure:
            sentences.append(
                f"{label_of(key)}: no sure difference, not even between {best} "
                f"({scale.text(means[best])}) and {worst} ({scale.text(means[worst])})."
            )
            continue
        words = ("best", "worst") if way else ("lowest", "highest")
        doubt = _doubt(column, best, means) if way else ""
        at = f"{study.swept_key} {best}".lstrip()
        sentences.append(
            f"{label_of(key)}: {words[0]} with {at} ({scale.text(means[best])}{doubt}), "
            f"{words[1]} with {worst} ({scale.text(means[worst])})."
        )
    if study.metrics and len(absent(study)) == len(keys_of(study.metrics)):
        return [f"There is nothing to compare by: no run has a value of {_named(study)}."]
    return sentences


def _doubt(column: Column, best: str, means: Mapping[str, float]) -> str:
    """The closest arm that is not significantly worse than the best, as a clause; or nothing."""
    others = [arm for arm in means if arm != best]
    for other in sorted(others, key=lambda arm: abs(means[arm] - means[best])):
        change = column.compare(best, other)
        if change is None or (change.difference.known and not (change.sure and change.gain)):
            return f", not surely better than {other}"
        if means[other] == means[best]:
            return f", as with {other}"
    return ""


def sureness(study: Arms) -> list[str]:
    """A caveat if there is one seed."""
    seeds = {len(study.of(arm)) for arm in study.arms}
    if max(seeds) == 1:
        return ["One seed gives no confidence interval: how sure this is cannot be said."]
    return []


# -- along a condition -----------------------------------------------------------------------------


def courses(study: Arms) -> Iterator[str]:
    """What each arm gains and loses against the baseline, and from which value of the sweep on.
    Nothing is said of a metric in which no difference is sure."""
    changes = [change for change in compare(study) if _sure(change, study)]
    variation = study.variation
    groups: dict[tuple[str, Cell, str | None, str], list[Comparison]] = {}
    for change in changes:
        facet = variation.cell_of(change.arm)[1:]
        name = variation.series[change.arm]
        groups.setdefault((name, facet, change.client, change.key), []).append(change)
    by_arm: dict[tuple[str, Cell], list[list[Comparison]]] = {}
    for (name, facet, *_), some in groups.items():
        by_arm.setdefault((name, facet), []).append(some)
    for (name, facet), metrics in by_arm.items():
        whose = ", ".join(filter(None, (name, variation.at(facet))))
        ranked = _telling_first(metrics)
        for some in ranked[:_MOST]:
            yield f"{whose}: {_course(some, study)}."
        if ranked[_MOST:]:
            others = [f"{_whose_metric(some[0])} {_ways(some)}" for some in ranked[_MOST:]]
            yield f"{whose}: also {join(others)}."
    if not changes and len(set(variation.series.values())) > 1:
        yield "No difference between the arms is sure, at any value."


def _telling_first(metrics: Sequence[list[Comparison]]) -> list[list[Comparison]]:
    """Metrics in which an arm is better here and worse there, then the largest gain and the largest
    loss, then the rest by size."""
    ranked = sorted(metrics, key=lambda some: -max(map(strength, some)))
    gain, loss = (
        next((some for some in ranked if {change.gain for change in some} == {way}), None)
        for way in (True, False)
    )
    crossing = [some for some in ranked if len({change.gain for change in some}) > 1]
    first = [*crossing, *(some for some in (gain, loss) if some is not None)]
    return [*first, *(some for some in ranked if not any(some is other for other in first))]


def _whose_metric(change: Comparison) -> str:
    client = "" if change.client is None else f"{change.client} "
    return f"{client}{in_sentence(change.key)}"


def _ways(changes: Sequence[Comparison]) -> str:
    gains = {change.gain for change in changes}
    return " and ".join(word for word, way in _WAYS if way in gains)


def overloads(study: Arms) -> Iterator[str]:
    """A note on what is overloaded along a condition."""
    variation, where = study.variation, dict[tuple[str, Cell], list[object]]()
    if not variation.conditions:
        return
    name = variation.conditions[0].rpartition(".")[2]
    values = ascending(value for value, *_ in study.cells)
    for arm in study.arms:
        value, *_ = cell = variation.cell_of(arm)
        if not study.keeps_up(arm):
            where.setdefault((variation.series[arm], cell[1:]), []).append(value)
    stretches = [
        ", ".join(filter(None, (series, variation.at(facet)))) + f" {_stretch(values, some, name)}"
        for (series, facet), some in where.items()
    ]
    if stretches:
        yield f"the backlog, and with it latencies, grow with a run's length: {join(stretches)}"


def _sure(change: Comparison, study: Arms) -> bool:
    return (
        telling(change, study)
        and change.gain is not None
        and (change.sure or not change.difference.known)
    )


def _course(changes: Sequence[Comparison], study: Arms) -> str:
    """Where along the sweep an arm is better and where worse, and by how much at the most."""
    variation = study.variation
    name = variation.conditions[0].rpartition(".")[2]
    values = ascending(value for value, *_ in study.cells)
    gains = {variation.cell_of(change.arm)[0]: change.gain for change in changes}
    words = [
        f"{word} {_stretch(values, [value for value in values if gains.get(value) is gain], name)}"
        for word, gain in _WAYS
        if gain in gains.values()
    ]
    most = max(changes, key=strength)
    at = f"at {said(variation.cell_of(most.arm)[0])} " if len(changes) > 1 else ""
    return f"{_whose_metric(most)} {' and '.join(words)}; {at}it {in_words(most)}"


def _stretch(values: Sequence[object], some: Sequence[object], name: str) -> str:
    """A part of the values of a sweep: "from rate 4 on", "up to rate 2", "at rate 2 and 4"."""
    places = sorted(values.index(value) for value in some)
    some = [values[place] for place in places]
    whole = are_numbers(values) and places == list(range(places[0], places[-1] + 1))
    if len(some) == len(values):
        return f"at every {name}"
    if whole and places[-1] == len(values) - 1 and len(some) > 1:
        return f"from {name} {some[0]} on"
    if whole and places[0] == 0 and len(some) > 1:
        return f"up to {name} {some[-1]}"
    return f"at {name} {join(list(map(said, some)))}"


# -- words -----------------------------------------------------------------------------------------


def in_sentence(key: str) -> str:
    """The label of a metric, in lower case unless it is an abbreviation."""
    label = label_of(key)
    first = label.split()[0]
    abbreviated = first.isupper() or not first[1:].islower()  # such as TTFT, E2E and QoE
    return label if abbreviated else label[0].lower() + label[1:]


def join(parts: Sequence[str]) -> str:
    """A list in words: "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"

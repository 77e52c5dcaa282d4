"""A study's finding as sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import keys_of, label_of, metric_of, scale_of, text_of
from pagedsim.metrics.compare import (
    Comparison,
    baseline_of,
    compare,
    compare_two,
    estimate,
    groups_of,
    values_of,
)

FEW = 4
"""Maximum number of arms with a sentence each."""


def finding(study: Arms) -> list[str]:
    """Sentences that answer the study's question, most important first."""
    arms = study.arms
    if not arms:
        return ["No run was completed."]
    if not study.finished:
        return ["No request finished."]
    if len(arms) == 1:
        return [_alone(study, arms[0])]
    if study.swept or len(arms) > FEW:
        return [*_extremes(study), *sureness(study)]
    found = compare(study)
    others = {arm: [one for one in found if one.arm == arm] for arm in arms}
    del others[baseline_of(study)]
    sentences = [
        sentence(some, study)
        if some
        else f"There is nothing to compare {arm} with {baseline_of(study)} by."
        for arm, some in others.items()
    ]
    return [*sentences, *sureness(study)]


def sentence(found: Sequence[Comparison], study: Arms) -> str:
    """Gains and costs of one arm against the baseline."""
    arm, baseline = found[0].arm, found[0].baseline
    telling = [one for one in found if _telling(one, study)]
    sure = [one for one in telling if one.sure or not one.difference.known]
    gains, costs = (_strongest([one for one in sure if one.gain is way]) for way in (True, False))
    if not gains and not costs:
        if not telling:
            return f"{arm} and {baseline} do not differ in any metric of this study."
        return (
            f"No difference between {arm} and {baseline} is sure: "
            "every 95 % interval includes none at all."
        )
    said = [_join([in_words(one) for one in some]) for some in (gains, costs) if some]
    versus = f"Against {baseline}, {arm} "
    if len(said) == 2:
        return f"{versus}{said[0]}; it {said[1]}."
    other = "loses" if gains else "gains"
    if any(one.gain is not bool(gains) for one in telling):
        return f"{versus}{said[0]}; nothing that it {other} is sure."
    return f"{versus}{said[0]}; it {other} in nothing."


def in_words(one: Comparison) -> str:
    """One comparison as a predicate: "cuts the interactive TTFT P99 by 87 % (95 % CI …)"."""
    whose = "" if one.client is None else f"{one.client} "
    name = f"the {whose}{_in_sentence(one.key)}"
    values = f"{text_of(one.key, one.theirs)} to {text_of(one.key, one.ours)}"
    ratio = one.ratio
    if one.ours == one.theirs:
        return f"leaves {name} as it is ({text_of(one.key, one.ours)})"
    if math.isnan(ratio.mean) or ratio.mean <= 0:
        return f"takes {name} from {values}"
    if ratio.mean >= 2:
        interval = f"; 95 % CI {ratio.low:.1f}–{ratio.high:.1f}" if ratio.known else ""
        return f"raises {name} {ratio.mean:.1f}-fold ({values}{interval})"
    sizes = sorted(abs(bound - 1) for bound in (ratio.low, ratio.high))
    interval = f"; 95 % CI {'–'.join(map(_percent, sizes))}" if ratio.known and one.sure else ""
    verb = "cuts" if ratio.mean < 1 else "raises"
    return f"{verb} {name} by {_percent(abs(ratio.mean - 1))} % ({values}{interval})"


def _percent(share: float) -> str:
    """Percent, with a decimal below 10 and above 99."""
    whole = 0.1 <= share < 0.99 or share >= 1
    return f"{share * 100:.0f}" if whole else f"{min(share * 100, 99.9 if share < 1 else 1e9):.1f}"


def _telling(one: Comparison, study: Arms) -> bool:
    """Whether to report it: with several clients, latencies per client and the rest overall.

    A difference of 0.0 % is not reported.
    """
    several = len(groups_of(study)) > 1
    if several and metric_of(one.key).latency == (one.client is None):
        return False
    return one.gain is not None and not _unseen(one)


def _unseen(one: Comparison) -> bool:
    """Whether two values differ but would be printed as equal."""
    alike = text_of(one.key, one.ours) == text_of(one.key, one.theirs)
    return alike and one.ours != one.theirs and _percent(abs(one.ratio.mean - 1)) == "0.0"


def _strongest(found: Sequence[Comparison]) -> list[Comparison]:
    """The largest effect of each group, at most three, in descending order."""
    ranked = sorted(found, key=_strength, reverse=True)
    first: dict[str | None, Comparison] = {}
    for one in ranked:
        first.setdefault(one.client, one)
    return list(first.values())[:3]


def _strength(one: Comparison) -> float:
    ratio = one.ratio.mean
    return abs(math.log(ratio)) if ratio > 0 else math.inf if ratio == 0 else 0.0


def _alone(study: Arms, arm: str) -> str:
    parts = []
    for key in keys_of(study.metrics):
        value = estimate(list(values_of(study, arm, key).values())).mean
        if not math.isnan(value):
            parts.append(f"{_in_sentence(key)} {text_of(key, value)}")
    if not parts:
        names = ", ".join(map(label_of, keys_of(study.metrics)))
        return f"{arm}: nothing to tell of these requests by {names}."
    return f"{arm}: {', '.join(parts)}."


def _extremes(study: Arms) -> list[str]:
    """The best and the worst arm in each metric."""
    what = study.swept.rpartition(".")[2] if study.swept else ""
    sentences = []
    for key in keys_of(study.metrics):
        way = metric_of(key).better
        means = {a: estimate(list(values_of(study, a, key).values())).mean for a in study.arms}
        means = {arm: mean for arm, mean in means.items() if not math.isnan(mean)}
        if len(means) < 2 or (key.endswith("_p99") and metric_of(key).latency):
            continue
        if len(set(means.values())) == 1:
            sentences.append(f"{label_of(key)}: the same for all ({_one(key, means)}).")
            continue
        scale = scale_of(key, means.values())
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        best, worst = (high, low) if way > 0 else (low, high)
        words = ("best", "worst") if way else ("lowest", "highest")
        at = f"{what} " if what else ""
        doubt = _doubt(study, key, best, means) if way else ""
        sentences.append(
            f"{label_of(key)}: {words[0]} with {at}{best} ({scale.text(means[best])}{doubt}), "
            f"{words[1]} with {worst} ({scale.text(means[worst])})."
        )
    return sentences


def _doubt(study: Arms, key: str, best: str, means: Mapping[str, float]) -> str:
    """The closest arm that is not significantly worse than the best, as a clause; or nothing."""
    others = [arm for arm in means if arm != best]
    for other in sorted(others, key=lambda arm: abs(means[arm] - means[best])):
        one = compare_two(study, best, other, key)
        if one is None or (one.difference.known and not (one.sure and one.gain)):
            return f", not surely better than {other}"
        if means[other] == means[best]:
            return f", as with {other}"
    return ""


def _one(key: str, means: dict[str, float]) -> str:
    return text_of(key, next(iter(means.values())))


def sureness(study: Arms) -> list[str]:
    """A caveat if there is one seed."""
    seeds = {len(study.of(arm)) for arm in study.arms}
    if max(seeds) == 1:
        return ["One seed gives no confidence interval: how sure this is cannot be said."]
    return []


def _in_sentence(key: str) -> str:
    label = label_of(key)
    first = label.split()[0]
    own = first.isupper() or not first[1:].islower()  # such as TTFT, E2E and QoE
    return label if own else label[0].lower() + label[1:]


def _join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"

"""The settings in which arms differ by their overrides, and short names of an arm's settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pagedsim.metrics.variation import Value
from pagedsim.spec.given import Given
from pagedsim.spec.objects import flat
from pagedsim.spec.study import NOT_OF_A_RUN, StudySpec
from pagedsim.spec.words import Change, changes_of, group_of, text_of

_CLASS = "._target_"
Patches = Mapping[str, Sequence[str | Change]]
"""Overrides, by arm."""


def factors_of(
    spec: StudySpec, overrides: Patches, conditions: Sequence[str] = ()
) -> dict[str, dict[str, Value]]:
    """By arm, the value of each setting that any arm overrides and that is not the same in all, and
    those of the `conditions`.

    The option of a group is the value of the group, and so is the name of a class. An arm that
    overrides nothing of a setting has the study's own value.
    """
    values = _by_arm(spec, overrides)
    varied = [
        key
        for key in dict.fromkeys(key for of in values.values() for key in of)
        if key in conditions or len({repr(of[key]) for of in values.values()}) > 1
    ]
    return {arm: {key: of[key] for key in varied} for arm, of in values.items()}


def labels_of(spec: StudySpec, overrides: Patches) -> dict[str, dict[str, Value]]:
    """By arm, the option of each group, and every setting that was typed or that an arm overrides.

    A setting of a group goes by its last word, such as `rate` for `workload.rate`, unless another
    setting or a group does, too.
    """
    typed = [word for word in changes_of(spec.words) if group_of(word) not in NOT_OF_A_RUN]
    values = _by_arm(spec, overrides, (_key_of(change) for change in typed))
    names = _short({key for of in values.values() for key in of}, spec.choices)
    labels: dict[str, dict[str, Value]] = {}
    for arm, words in overrides.items():
        patch = _patch(spec, words)
        chosen = {
            group: option
            for group, option in spec.composed.choices_after(patch).items()
            if option is not None and group not in NOT_OF_A_RUN
        }
        classes = {_key_of(change) for change in [*typed, *patch] if _CLASS in change.key}
        others = {
            names[key]: value
            for key, value in values[arm].items()
            if key not in chosen or key in classes
        }
        labels[arm] = {**chosen, **others}
    return labels


def _short(keys: Iterable[str], groups: Iterable[str]) -> dict[str, str]:
    """The last word of each key of a group, where no other key and no group is called so."""
    last = {key: key.partition(".")[2] if key.count(".") == 1 else key for key in keys}
    taken = Counter([*last.values(), *groups])
    return {key: word if taken[word] == 1 else key for key, word in last.items()}


def _by_arm(
    spec: StudySpec, overrides: Patches, more: Iterable[str] = ()
) -> dict[str, dict[str, Value]]:
    """The values of every setting that any arm overrides, and of `more`."""
    objects: dict[str, list[str]] = {}
    typed = {arm: _values(_patch(spec, words), objects) for arm, words in overrides.items()}
    classes = [change for change in changes_of(spec.words) if _CLASS in change.key]
    base = {**flat(spec.config), **spec.choices, **_values(classes, objects)}
    keys = dict.fromkeys([*(key for of in typed.values() for key in of), *more])
    return {
        arm: {key: of[key] if key in of else _value(base.get(key), objects) for key in keys}
        for arm, of in typed.items()
    }


def _patch(spec: StudySpec, words: Sequence[str | Change]) -> list[Change]:
    return changes_of(spec.patches.get(str(word), word) for word in words)


def _key_of(change: Change) -> str:
    return change.key.removesuffix(_CLASS)


def _values(changes: Iterable[Change], objects: dict[str, list[str]]) -> dict[str, Value]:
    return {
        _key_of(change): _value(change.value, objects, of_a_class=_CLASS in change.key)
        for change in changes
        if change.kind != "delete"
    }


def _value(value: object, objects: dict[str, list[str]], of_a_class: bool = False) -> Value:
    """`objects` are those that had a value before, by class: further ones are numbered."""
    if isinstance(value, Given):
        alike = objects.setdefault(value.name, [])
        if str(value) not in alike:
            alike.append(str(value))
        number = alike.index(str(value)) + 1
        return value.name if number == 1 else f"{value.name} {number}"
    if of_a_class:
        return str(value).rpartition(".")[2]
    return value if value is None or isinstance(value, str | int | float) else text_of(value)

"""The settings in which arms differ by their overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedsim.metrics.variation import Value
from pagedsim.spec.given import Given
from pagedsim.spec.objects import flat
from pagedsim.spec.study import StudySpec
from pagedsim.spec.words import Change, changes_of, text_of

_CLASS = "._target_"


def factors_of(
    spec: StudySpec, overrides: Mapping[str, Sequence[str | Change]], conditions: Sequence[str] = ()
) -> dict[str, dict[str, Value]]:
    """By arm, the value of each setting that any arm overrides and that is not the same in all, and
    those of the `conditions`.

    The option of a group is the value of the group, and so is the name of a class. An arm that
    overrides nothing of a setting has the study's own value.
    """
    objects: dict[str, list[str]] = {}
    typed = {arm: _values(spec, words, objects) for arm, words in overrides.items()}
    keys = dict.fromkeys(key for of in typed.values() for key in of)
    base = {**flat(spec.config), **spec.choices}
    values = {
        arm: {key: of[key] if key in of else _value(base.get(key), objects) for key in keys}
        for arm, of in typed.items()
    }
    varied = [
        key
        for key in keys
        if key in conditions or len({repr(of[key]) for of in values.values()}) > 1
    ]
    return {arm: {key: of[key] for key in varied} for arm, of in values.items()}


def _values(
    spec: StudySpec, words: Sequence[str | Change], objects: dict[str, list[str]]
) -> dict[str, Value]:
    changes = changes_of(spec.patches.get(str(word), word) for word in words)
    return {
        change.key.removesuffix(_CLASS): _value(
            change.value, objects, of_a_class=_CLASS in change.key
        )
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

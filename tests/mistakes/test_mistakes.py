"""Every mistake of the lists ends in a line that names what is wrong and what is allowed.

The lines may be worded otherwise than in the lists: `python -m tests.mistakes.record --check` shows
them side by side.
"""

from __future__ import annotations

import os
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest

from tests.mistakes.record import LISTS, Mistake, printed, read, text_of

MISTAKES = [mistake for path in LISTS for mistake in read(path)]


def faults(mistake: Mistake, lines: tuple[str, ...]) -> list[str]:
    """What is wrong with the lines that a mistake is answered with; the first is its exit code."""
    code, *told = lines
    text = "\n".join(told)
    return [
        *([] if code == "exit 1" else [code]),
        *([] if 1 <= len(told) <= 3 else [f"{len(told)} lines"]),
        *(line for line in told if line.startswith(("Traceback", "  File "))),
        *(f"does not name {name}" for name in mistake.names if name not in text),
    ]


def cases() -> list[Any]:
    return [
        pytest.param(
            mistake,
            id=mistake.typed[-1],
            marks=pytest.mark.skipif(
                not hasattr(os, "fork") or not all(map(find_spec, mistake.needs)),
                reason="forks, or an extra is not installed",
            ),
        )
        for mistake in MISTAKES
    ]


@pytest.mark.parametrize("mistake", cases())
def test_the_answer_names_what_is_wrong(mistake: Mistake) -> None:
    lines = printed(mistake)
    assert not faults(mistake, lines), "\n".join(lines)


def test_the_lists_are_as_they_are_recorded() -> None:
    for path in LISTS:
        assert path.read_text() == text_of(read(path))
    for mistake in MISTAKES:
        assert mistake.names and not faults(mistake, mistake.printed), str(mistake)
    typed = Counter((mistake.section, mistake.typed) for mistake in MISTAKES)
    assert typed.most_common(1)[0][1] == 1


def test_a_worse_answer_is_a_fault() -> None:
    mistake = MISTAKES[0]
    code, line = mistake.printed
    assert not faults(mistake, (code, line.replace("cannot be read", "is nothing")))
    assert faults(mistake, ("exit 0", line))
    assert faults(mistake, (code, line.replace("'serve'", "").replace("serve", "")))
    assert faults(mistake, (code, "Traceback (most recent call last):", line))
    assert faults(mistake, (code,))

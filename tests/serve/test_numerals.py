"""Where texts occur in " 1 2 3 …" is what a search of the text itself finds."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.engine.detokenizer import first_stop
from pagedsim.serve.numerals import first_end, position
from pagedsim.serve.sim_output import said

MOST = 2200
TEXT = said(range(1, MOST + 1))
ENDS = [position(number) for number in range(MOST + 1)]


def searched(text: str, least: int, most: int) -> tuple[int, int] | None:
    found = first_stop(TEXT[: ENDS[most]], [text], ENDS[least - 1])
    if found is None:
        return None
    end = found[1] + len(text)
    return bisect_left(ENDS, end), end


BOUNDS = st.tuples(st.integers(1, MOST), st.integers(1, MOST)).map(sorted)
PIECES = st.tuples(st.integers(0, position(MOST)), st.integers(1, 14)).map(
    lambda cut: TEXT[cut[0] : cut[0] + cut[1]] or "7"
)
TEXTS = PIECES | st.text("0123456789 ", min_size=1, max_size=6) | st.text(min_size=1, max_size=3)


@given(text=TEXTS, bounds=BOUNDS)
def test_it_is_where_a_search_finds_it(text: str, bounds: list[int]) -> None:
    least, most = bounds
    assert first_end(text, least, most) == searched(text, least, most)


@pytest.mark.parametrize("least", [1, 2, 9, 10, 11, 99, 100, 101, 110, 999, 1000, 1010])
def test_short_texts_are_found_from_every_bound(least: int) -> None:
    for number in (*range(130), *range(990, 1020)):
        for text in (str(number), f" {number}", f"{number} ", f"0{number}", f"{number} {number}"):
            assert first_end(text, least, MOST) == searched(text, least, MOST), text
    for first in range(25):
        for second in range(25):
            text = f"{first} {second}"
            assert first_end(text, least, MOST) == searched(text, least, MOST), text


def test_a_text_longer_than_any_number_is_not_there() -> None:
    assert first_end("1" * 10_000, 1, 10**6) is None
    assert first_end("1 " * 10_000, 1, 10**6) is None

"""Keys of blocks: equal exactly where all tokens up to the end of the block are."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.core import Request
from pagedsim.core.memory.prefix import add_keys, known_to_others, own_keys
from pagedsim.core.symbolic_prompt import SymbolicPrompt

RUNS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=6).map(
    lambda runs: SymbolicPrompt([(9, 1), *runs])
)
LISTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def keys_of(request: Request, size: int, tokens: int | None = None) -> list[Hashable]:
    keys: list[Hashable] = []
    add_keys(keys, request, (tokens or request.prompt_len) // size, size)
    return keys


@pytest.mark.parametrize("texts", [RUNS, LISTS], ids=["runs", "lists"])
@given(st.data())
def test_keys_are_equal_exactly_where_all_tokens_up_to_there_are(
    texts: st.SearchStrategy[Sequence[int]], data: st.DataObject
) -> None:
    one, two, size = data.draw(texts), data.draw(texts), data.draw(st.integers(1, 5))
    ours, theirs = keys_of(Request(1, one), size), keys_of(Request(2, two), size)
    assert (len(ours), len(theirs)) == (len(one) // size, len(two) // size)
    for i, our in enumerate(ours):
        for j, their in enumerate(theirs):
            begin, other = list(one)[: (i + 1) * size], list(two)[: (j + 1) * size]
            assert (our == their) is (begin == other)


@given(RUNS, st.integers(1, 5))
def test_made_in_parts_they_are_the_same(text: SymbolicPrompt, size: int) -> None:
    request = Request(1, text)
    whole = keys_of(request, size)
    for part in range(len(whole)):
        keys = whole[:part]
        add_keys(keys, request, len(whole), size)
        assert keys == whole


@given(RUNS, RUNS, st.integers(1, 5), st.integers(0, 9))
def test_a_prompt_that_quotes_an_answer_has_its_keys(
    asked: SymbolicPrompt, more: SymbolicPrompt, size: int, said: int
) -> None:
    answer = SymbolicPrompt([(7, 1000)])
    asking = Request(1, asked, answer=answer)
    quoting = Request(2, asked + SymbolicPrompt([(7, said)]) + more)
    both = len(asked) + said
    assert keys_of(asking, size, both) == keys_of(quoting, size)[: both // size]
    assert keys_of(asking, size, both + size)[-1] not in keys_of(quoting, size)


@given(RUNS, LISTS, LISTS)
def test_told_tokens_go_on_from_runs(text: SymbolicPrompt, one: list[int], two: list[int]) -> None:
    ours, theirs = Request(1, text), Request(2, text)
    ours.outputs, theirs.outputs = [one], [two]
    mine = keys_of(ours, 1, len(text) + len(one))
    others = keys_of(theirs, 1, len(text) + len(two))
    for at, (our, their) in enumerate(zip(mine, others, strict=False)):
        told = at + 1 - len(text)
        assert (our == their) is (told <= 0 or one[:told] == two[:told])


def test_numbers_of_numpy_are_numbers() -> None:
    number: Any = np.int64
    theirs = keys_of(Request(2, SymbolicPrompt([(3, 20), (4, 20)])), 16)
    for text in (
        SymbolicPrompt([(number(3), number(20)), (number(4), number(20))]),
        SymbolicPrompt.blocks([number(3), number(4)], number(20), number(40)),
    ):
        assert {type(one) for one in (*text.streams, *text.ends)} == {int}
        assert keys_of(Request(1, text), 16) == theirs


def test_blocks_of_other_sizes_have_other_keys() -> None:
    request = Request(1, SymbolicPrompt([(0, 64), (1, 64)]))
    assert not set(keys_of(request, 16)) & set(keys_of(request, 32))


def test_unknown_tokens_have_keys_of_their_own() -> None:
    request = Request(1, [1, 2, 3, 4])
    made = [*keys_of(request, 2), *own_keys(object(), range(2, 4)), *own_keys(object(), range(2))]
    assert len(set(made)) == 6
    assert [known_to_others(key) for key in made] == [True] * 2 + [False] * 4

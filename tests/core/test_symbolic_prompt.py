"""Tokens as runs: equal tokens are equal pieces, at any length and for little work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.core import Request
from pagedsim.core.symbolic_prompt import SymbolicPrompt

RUNS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=6)


def ids(runs: SymbolicPrompt, start: int, stop: int) -> list[int]:
    return [runs[i] for i in range(*slice(start, stop).indices(len(runs)))]


@given(RUNS, RUNS, st.integers(0, 40), st.integers(0, 40), st.integers(0, 20))
def test_two_slices_are_equal_exactly_where_their_tokens_are(
    one: list[tuple[int, int]], two: list[tuple[int, int]], i: int, j: int, size: int
) -> None:
    a, b = SymbolicPrompt(one), SymbolicPrompt(two)
    same = ids(a, i, i + size) == ids(b, j, j + size)
    assert (a[i : i + size] == b[j : j + size]) is same
    if same:
        assert hash(a[i : i + size]) == hash(b[j : j + size])


@given(RUNS, st.integers(-40, 40), st.integers(-40, 40))
def test_a_slice_covers_what_it_says(runs: list[tuple[int, int]], i: int, j: int) -> None:
    prompt = SymbolicPrompt(runs)
    assert len(prompt) == sum(length for _, length in runs)
    assert sum(piece[2] for piece in prompt[i:j]) == len(range(*slice(i, j).indices(len(prompt))))
    assert [prompt[k] for k in range(-len(prompt), 0)] == list(prompt)


def test_tokens_are_numbered_within_their_stream() -> None:
    prompt = SymbolicPrompt([(3, 2), (0, 1)])
    assert list(prompt) == [3 << 32, (3 << 32) + 1, 0]
    long = SymbolicPrompt([(0, 200_000), (1, 10)])  # longer than the context of any model
    assert long[199_999] < long[200_000] == 1 << 32
    with pytest.raises(IndexError):
        prompt[3]
    with pytest.raises(ValueError, match="steps of 1"):
        prompt[::2]


def test_a_prompt_is_a_value() -> None:
    assert SymbolicPrompt([(1, 4), (2, 0)]) == SymbolicPrompt([(1, 4)])
    assert len({SymbolicPrompt([(1, 4)]), SymbolicPrompt([(1, 4)]), SymbolicPrompt([(1, 5)])}) == 2
    assert eval(repr(SymbolicPrompt([(1, 4), (2, 3)]))) == SymbolicPrompt([(1, 4), (2, 3)])


def test_blocks_are_runs_and_the_last_may_be_shorter() -> None:
    assert SymbolicPrompt.blocks([5, 6, 7], 4, 10) == SymbolicPrompt([(5, 4), (6, 4), (7, 2)])
    assert SymbolicPrompt.blocks([5, 6, 7], 4, 8) == SymbolicPrompt([(5, 4), (6, 4)])


def test_the_core_takes_a_prompt_of_runs_and_asks_for_its_blocks() -> None:
    request = Request(0, SymbolicPrompt([(0, 20), (9, 20)]))
    assert request.prompt_len == 40
    assert request.tokens(16, 32) == ((0, 16, 4), (9, 0, 12))


@given(RUNS, RUNS)
def test_runs_added_are_tokens_one_after_another(
    one: list[tuple[int, int]], two: list[tuple[int, int]]
) -> None:
    assert list(SymbolicPrompt(one) + SymbolicPrompt(two)) == [
        *SymbolicPrompt(one),
        *SymbolicPrompt(two),
    ]

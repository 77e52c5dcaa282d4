"""Stop strings, however the text is cut into tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.core import SamplingParams
from pagedsim.engine.detokenizer import Text, ends_of, first_stop, held_back
from tests.engine.sampling.fake import Words


def said(pieces: list[str], *stops: str, include: bool = False) -> tuple[str, str | None, int]:
    """The text, the stop string, and how many pieces were taken."""
    text = Text(lambda: Words(pieces), stops, include_stop=include)
    for token in range(len(pieces)):
        if found := text.push(token):
            return text.text, found, token + 1
    text.finish()
    return text.text, None, len(pieces)


@pytest.mark.parametrize(
    ("pieces", "stops", "want"),
    [
        (["one ", "two"], ("three",), ("one two", None, 2)),
        (["one ", "two ", "three"], ("two",), ("one ", "two", 2)),
        (["a", "b", "c", "d"], ("bcd",), ("a", "bcd", 4)),
        (["abcdef"], ("d", "bc"), ("a", "bc", 1)),  # complete first
        (["xabcy"], ("bc", "abc"), ("x", "abc", 1)),  # complete at once: the longest
        (["ab", "ab", "c"], ("abc",), ("ab", "abc", 3)),
        (["\n", "\n"], ("\n\n",), ("", "\n\n", 2)),
    ],
)
def test_the_text_is_cut_before_the_stop_string(
    pieces: list[str], stops: tuple[str, ...], want: tuple[str, str | None, int]
) -> None:
    assert said(pieces, *stops) == want


def test_the_stop_string_may_be_included() -> None:
    assert said(["one, ", "two"], ", t", include=True) == ("one, t", ", t", 2)


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_clear() -> None:
    text = Text(lambda: Words(["say <", "/", "b", "> <"]), ("</a>",))
    shown = []
    for token in range(4):
        text.push(token)
        shown.append(text.shown)
    assert shown == ["say ", "say ", "say </b", "say </b> "]
    text.finish()
    assert text.shown == "say </b> <"


def test_unwatched_text_does_not_stop() -> None:
    text = Text(lambda: Words(["stop", " and ", "stop"]), ("stop",))
    assert text.push(0, watch=False) is None
    assert text.push(1) is None
    assert (text.push(2), text.text) == ("stop", "stop and ")


def test_catching_up_takes_each_token_once() -> None:
    text = Text(lambda: Words(["a", "b", "c"]))
    text.catch_up([0, 1])
    text.catch_up([0, 1, 2])
    assert (text.text, text.tokens) == ("abc", 3)


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_where_tokens_are_cut_makes_no_difference(
    whole: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)))) | {0, len(whole)})
    pieces = [whole[a:b] for a, b in pairwise(cuts)]
    assert said(pieces, *stops)[:2] == said(list(whole), *stops)[:2]
    text, found, _ = said(pieces, *stops)
    assert not any(stop in text for stop in stops)
    assert whole.startswith(text + (found or ""))


@given(st.text("ab", max_size=9), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_held_back_is_the_longest_beginning(text: str, stops: list[str]) -> None:
    beginnings = {stop[:size] for stop in stops for size in range(len(stop))} | {""}
    sizes = [size for size in range(len(text) + 1) if text[len(text) - size :] in beginnings]
    assert held_back(text, stops) == max(sizes)


def test_only_what_ends_after_the_known_text_is_found() -> None:
    assert first_stop("stop stop", ("stop",)) == ("stop", 0)
    assert first_stop("stop stop", ("stop",), known=4) == ("stop", 5)
    assert first_stop("stop stop", ("stop",), known=9) is None


def test_ends_are_stop_tokens_and_the_models_own() -> None:
    params = SamplingParams(stop_token_ids=(5, 6))
    assert ends_of(params, (1,)) == {1, 5, 6}
    assert ends_of(SamplingParams(stop_token_ids=(5,), ignore_eos=True), (1,)) == {5}

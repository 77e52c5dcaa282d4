"""Prompts on the wire: of the right length, shared where the workload shares, the same again."""

from __future__ import annotations

from pagedsim.core import Request
from pagedsim.core.symbolic_prompt import SymbolicPrompt
from pagedsim.run.http.load import FIRST_ID, LAST_ID, Contents

SYSTEM = (7, 40)


def request(id: int, *runs: tuple[int, int]) -> Request:
    return Request(id, SymbolicPrompt(runs) if runs else 60)


def common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def test_a_shared_beginning_is_shared_and_nothing_more() -> None:
    contents = Contents(3)
    one, other, alone = (
        contents.ids(request(0, SYSTEM, (1, 20))),
        contents.ids(request(1, SYSTEM, (2, 25))),
        contents.ids(request(2, (3, 60))),
    )
    assert [len(ids) for ids in (one, other, alone)] == [60, 65, 60]
    assert 40 <= common(one, other) < 43 and common(one, alone) < 3
    assert all(FIRST_ID <= token <= LAST_ID for token in one + other + alone)
    assert len(set(one)) > 30


def test_words_are_shared_as_ids_are() -> None:
    contents = Contents(3)
    one, other = (
        contents.text(request(0, SYSTEM, (1, 20))),
        contents.text(request(1, SYSTEM, (2, 25))),
    )
    assert (len(one.split()), len(other.split())) == (60, 65)
    assert one.split()[:40] == other.split()[:40] and one.split()[40:50] != other.split()[40:50]


def test_a_seed_gives_the_same_prompts_and_another_gives_others() -> None:
    shared = request(0, SYSTEM, (1, 20))
    for given in (shared, request(5)):
        assert Contents(1).ids(given) == Contents(1).ids(given)
        assert common(Contents(1).ids(given), Contents(2).ids(given)) < 3


def test_prompts_without_contents_have_nothing_in_common() -> None:
    contents = Contents(0)
    assert common(contents.ids(request(0)), contents.ids(request(1))) < 3


def test_token_ids_of_a_request_keep_what_they_share() -> None:
    contents = Contents(0)
    one, other = Request(0, [9, 8, 7, 6]), Request(1, [9, 8, 1, 2])
    assert common(contents.ids(one), contents.ids(other)) >= 2

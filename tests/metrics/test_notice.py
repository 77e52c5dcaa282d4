from __future__ import annotations

from typing import Any

from pagedsim.metrics.notice import Notice, added_up, as_records, notice_of, of_one_kind


def summary(*notices: Notice, requests: int = 40) -> dict[str, Any]:
    return {"requests": requests, "notices": as_records(notices)}


def test_counts_are_read_from_a_line() -> None:
    assert notice_of("1,204 of 40,000 requests were cut") == Notice(
        "requests were cut", 1204, 40_000
    )
    assert notice_of("3 rows were left out") == Notice("rows were left out", 3)
    assert notice_of("the file is old") == Notice("the file is old")


def test_seeds_are_added_up() -> None:
    cut = Notice("answers were cut", 1, 40)
    seeds = [summary(cut), summary(), summary(cut, Notice("rows were left out", 2)), summary()]
    assert added_up([*seeds, summary(Notice("answers were cut", 2, 40)), summary()]) == [
        "4 of 240 answers were cut (in 3 of 6 seeds)",
        "2 rows were left out (in 1 of 6 seeds)",
    ]


def test_what_only_a_later_seed_has_is_said() -> None:
    rejected = Notice("requests were rejected", 1, 40, "the first, 7: too long")
    assert added_up([summary(), summary(rejected)]) == [
        "1 of 80 requests were rejected (in 1 of 2 seeds); the first, 7: too long"
    ]


def test_one_seed_needs_no_number_of_seeds() -> None:
    assert added_up([summary(Notice("answers were cut", 3, 40))]) == ["3 of 40 answers were cut"]
    assert added_up([summary(Notice("the file is old"))]) == ["the file is old"]
    assert added_up([summary(Notice("the file is old"))] * 2) == [
        "the file is old (in all 2 seeds)"
    ]


def test_what_differs_in_numbers_alone_is_one_line() -> None:
    guesses = [Notice(f"lengths are off by {off}% in all; tau is {tau}") for off, tau in
               ((31, -0.5), (9, 0.62), (31, 0.7))]  # fmt: skip
    assert added_up([summary(one) for one in guesses]) == [
        "lengths are off by 9% to 31% in all; tau is -0.5 to 0.7 (in all 3 seeds)"
    ]
    assert added_up([summary(guesses[0])]) == ["lengths are off by 31% in all; tau is -0.5"]


def test_what_is_counted_keeps_its_words() -> None:
    told = [Notice("rows come after 3 s", 2), Notice("rows come after 4 s", 1)]
    assert of_one_kind(told) == told


def test_names_and_settings_are_no_numbers() -> None:
    told = [Notice("hardware=a10, at max_len=2"), Notice("hardware=a100, at max_len=4")]
    assert of_one_kind(told) == told

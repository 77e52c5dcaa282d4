from __future__ import annotations

from typing import Any

from pagedsim.metrics.notice import Notice, added_up, as_records, notice_of


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

"""One long context costs the steps of the others nothing."""

from __future__ import annotations

import pytest

from experiments.benchmarks import tables


def test_a_long_context_adds_no_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--running 1 3 --blocks 400 --steps 32 --rounds 1"
    tables.main(words.split())
    _, head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.split(" | ")[1:3] == ["blocks of a long one", "bytes a step"]
    sent = [[cell.strip() for cell in row.split("|")[1:4]] for row in rows]
    assert [one[:2] for one in sent] == [["1", "–"], ["1", "400"], ["3", "–"], ["3", "400"]]
    assert sent[0][2] == sent[1][2] and sent[2][2] == sent[3][2]

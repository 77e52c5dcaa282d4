"""Trace files: what each format says, slices, scaling and clipping."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.core.symbolic_prompt import SymbolicPrompt
from pagedsim.workload import Workload, trace
from pagedsim.workload.traces import read
from pagedsim.workload.traces.jsonlines import TOKENS, Field, JsonLines, is_number
from pagedsim.workload.traces.rows import Chunk, Clock, Options
from tests.workload.files import (
    BURSTGPT,
    EVERY,
    LENGTHS,
    MOONCAKE,
    PLAIN,
    SHAREGPT,
    TURNS,
    packed,
    written,
)


def rows(made: Workload) -> list[tuple[float, int, int]]:
    columns = (made.arrival, made.prompt_len, made.output_len)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_burstgpt_leaves_out_failures_when_asked(tmp_path: Path) -> None:
    path = written(tmp_path, BURSTGPT)
    made = trace(path=path, drop_empty=True, columns={"client": "Session ID"})
    assert rows(made) == [(0.0, 906, 446), (51.0, 36, 29), (90.0, 70, 8)]
    assert [made.clients[i] for i in made.client] == ["a", "b", "c"]
    assert (made.dropped, made.notices) == (1, ("1 rows without tokens were left out",))
    with pytest.raises(ConfigError, match=r"csv:4: Response tokens=0: .*drop_empty=true"):
        trace(path=path)
    assert trace(path=path, drop_empty=True, requests=2).dropped == 0


def test_rows_of_a_csv_may_be_filtered(tmp_path: Path) -> None:
    path = written(tmp_path, BURSTGPT)
    made = trace(path=path, where={"Model": "GPT-4", "Log Type": "API log"}, drop_empty=True)
    assert rows(made) == [(90.0, 70, 8)]
    with pytest.raises(ConfigError, match="no row has Model=GPT-5"):
        trace(path=path, where={"Model": "GPT-5"})


def test_mooncake_blocks_become_shared_prefixes(tmp_path: Path) -> None:
    made = trace(path=written(tmp_path, MOONCAKE))
    assert rows(made) == [(0.0, 1100, 5), (0.25, 1000, 6), (3.0, 1536, 7)]
    assert made.prompts is not None
    assert made.prompts[0] == SymbolicPrompt([(0, 512), (1, 512), (2, 76)])
    first, second, third = (request for request, _ in made.requests())
    assert first.tokens(0, 1024) == third.tokens(0, 1024)
    assert first.tokens(0, 512) == second.tokens(0, 512)
    assert first.tokens(512, 1000) != second.tokens(512, 1000)


def test_mooncake_keeps_its_prompts_through_slices_and_cuts(tmp_path: Path) -> None:
    made = trace(path=written(tmp_path, MOONCAKE), start=0.2, max_len=806)
    assert made.arrival.tolist() == pytest.approx([0.05, 2.8])
    assert made.prompt_len.tolist() == [800, 799]
    assert made.prompts is not None
    assert made.prompts[0] == SymbolicPrompt([(0, 512), (1, 288)])
    assert made.prompts[1] == SymbolicPrompt([(0, 512), (2, 287)])


def test_sharegpt_counts_tokens_of_the_first_two_turns(tmp_path: Path) -> None:
    path = written(tmp_path, SHAREGPT, "chat.json")
    made = trace(path=path, arrivals="burst", tokenizer=str.split)
    assert rows(made) == [(0.0, 3, 2), (0.0, 2, 4)]
    assert rows(trace(path=path, arrivals="burst", tokenizer=len)) == [(0, 13, 9), (0, 3, 7)]


def test_lengths_need_arrivals(tmp_path: Path) -> None:
    path = written(tmp_path, LENGTHS)
    made = trace(path=path, arrivals="fixed", rate=2.0)
    assert rows(made) == [(0.0, 100, 10), (0.5, 200, 20), (1.0, 300, 30)]
    closed = trace(path=path, arrivals="closed", users=2)
    assert (closed.mode, closed.users) == ("closed", 2)
    with pytest.raises(ConfigError, match="has lengths but no times: set arrivals="):
        trace(path=path)


@pytest.mark.parametrize("format", EVERY)
def test_every_format_is_recognised_packed_or_not(tmp_path: Path, format: str) -> None:
    settings: dict[str, Any] = {"arrivals": "burst", "drop_empty": True, "in_turns": False}
    if format == "sharegpt":
        settings["tokenizer"] = str.split
    plain = rows(trace(path=written(tmp_path, EVERY[format]), **settings, format=format))
    for text in ("\ufeff" + EVERY[format], "\r\n\n" + EVERY[format].replace("\n", "\r\n")):
        assert rows(trace(path=written(tmp_path, text), **settings)) == plain
        assert rows(trace(path=packed(tmp_path, text), **settings)) == plain


def test_slices(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN)
    assert rows(trace(path=path, start=1.0)) == [(0.0, 200, 20), (0.0, 300, 30), (2.5, 400, 40)]
    assert rows(trace(path=path, start=1.0, window=2.5)) == [(0.0, 200, 20), (0.0, 300, 30)]
    assert rows(trace(path=path, start=1.0, requests=1)) == [(0.0, 200, 20)]
    with pytest.raises(ConfigError, match=r"no request is left of 4 rows, of 3.5 s"):
        trace(path=path, start=99)


def test_reading_stops_where_the_slice_ends(tmp_path: Path) -> None:
    rows_ = "".join(f"{i}.0,5,5\n" for i in range(70_000))
    path = written(tmp_path, PLAIN.splitlines()[0] + "\n" + rows_ + "nonsense,1,1\n")
    assert len(trace(path=path, requests=100)) == 100
    assert len(trace(path=path, window=50)) == 50
    with pytest.raises(ConfigError, match=":70002: arrived_at='nonsense': must be a finite number"):
        trace(path=path)


def test_time_0_is_that_of_the_file_whatever_rows_are_wanted(tmp_path: Path) -> None:
    header, *lines = BURSTGPT.splitlines()
    wanted: dict[str, Any] = {"where": {"Log Type": "API log"}, "drop_empty": True}
    ordered = written(tmp_path, BURSTGPT)
    assert rows(trace(path=ordered, **wanted)) == [(90.0, 70, 8)]
    assert rows(trace(path=ordered, start=85, **wanted)) == [(5.0, 70, 8)]
    turned = written(tmp_path, "\n".join([header, *lines[::-1]]), "turned.csv")
    assert rows(trace(path=turned, sort=True, start=85, **wanted)) == [(5.0, 70, 8)]
    with pytest.raises(ConfigError, match="csv:3: Timestamp is 8 s before the row above"):
        trace(path=turned, where={"Session ID": "b"})
    many = [f"{i},s,1,{'A' if i < 69_000 else 'B'},5,5,10,x" for i in range(70_000)]
    far = trace(
        path=written(tmp_path, "\n".join([header, *many])), where={"Model": "B"}, requests=2
    )
    assert far.arrival.tolist() == [69_000, 69_001]


def test_rates(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN)
    assert trace(path=path, rate_scale=2.0).arrival.tolist() == [0.25, 0.5, 0.5, 1.75]
    assert trace(path=path).rate == 1.0
    assert trace(path=path, rate=4.0).rate == pytest.approx(4.0)
    drawn = trace(path=path, arrivals="poisson", rate=4.0, seed=1)
    assert drawn.prompt_len.tolist() == [100, 200, 300, 400]
    assert (np.diff(drawn.arrival) > 0).all()


def test_labels_and_columns(tmp_path: Path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens,who,urgency\n0,5,5,z,2\n1,5,5,y,-1.5\n"
    path = written(tmp_path, text)
    made = trace(path=path, columns={"client": "who", "priority": "urgency"}, deadline=2.0)
    requests = [request for request, _ in made.requests()]
    assert [(r.client, r.priority, r.deadline) for r in requests] == [("z", 2, 2), ("y", -1.5, 3)]
    drawn = trace(path=path, client={"a": 1.0}, priority=3)
    assert [(r.client, r.priority) for r, _ in drawn.requests()] == [("a", 3)] * 2


OWN = "when,in,out\n{},5,6\n{},7,8\n"
COLUMNS = {"arrival": "when", "prompt": "in", "output": "out"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1700000000", "1700000002.5"),
        ("2026-01-01 10:00:00", "2026-01-01 10:00:02.5"),
        ("2026-01-01T10:00:00+00:00", "2026-01-01T12:00:02.5+02:00"),
    ],
)
def test_columns_of_one_s_own(tmp_path: Path, first: str, second: str) -> None:
    path = written(tmp_path, OWN.format(first, second))
    for format in ("auto", "plain"):
        made = trace(path=path, columns=COLUMNS, format=format)
        assert rows(made) == [(0.0, 5, 6), (2.5, 7, 8)]


@pytest.mark.parametrize(
    ("extra", "first"),
    [
        (["tenant", "who"], {"tenant": "a", "who": "x"}),
        ({"adapter": "tenant"}, {"adapter": "a"}),
        (None, {}),
    ],
)
def test_columns_that_requests_carry(tmp_path: Path, extra: Any, first: dict[str, str]) -> None:
    head, *lines = PLAIN.splitlines()
    rows = [f"{head},tenant,who", *(f"{line},{t},x" for line, t in zip(lines, "aaba", strict=True))]
    made = trace(path=written(tmp_path, "\n".join(rows)), columns={"extra": extra}, requests=3)
    found = [request.extra for request, _ in made.requests()]
    assert found[0] == found[1] == first and (found[2] != first) is bool(extra)
    assert found[0] is found[1]  # memory for each that differs alone
    with pytest.raises(TypeError):
        found[0]["more"] = 1  # type: ignore[index]


def test_objects_of_json_lines_that_requests_carry(tmp_path: Path) -> None:
    one, two, *more = MOONCAKE.splitlines()
    carried = '"extra": {"tenant": "a", "tags": [1, {"b": null}]}}'
    lines = [one.replace("}", f", {carried}"), two.replace("}", ', "extra": null}'), *more]
    made = trace(path=written(tmp_path, "\n".join(lines)))
    found = [request.extra for request, _ in made.requests()]
    assert found == [{"tenant": "a", "tags": [1, {"b": None}]}, {}, {}]
    assert trace(path=written(tmp_path, MOONCAKE, "b")).extra is None


class Gateway(JsonLines):
    """JSON lines of other fields."""

    name = "gateway"
    time, prompt, output = "at", "sent", "answered"
    options = ()
    fields: ClassVar[Mapping[str, Field]] = {
        time: (is_number, "a number of seconds"),
        prompt: TOKENS,
        output: TOKENS,
    }

    def chunk(self, path: Path, lines: list[int], rows: list[Any], options: Options) -> Chunk:
        at, sent, answered = (np.array([row[name] for row in rows]) for name in self.fields)
        return Chunk(lines, Clock(lines, at), at, sent, answered)


def test_a_format_of_json_lines_is_its_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "FORMATS", {**read.FORMATS, "gateway": Gateway()})
    lines = '{"at": 0.5, "sent": 9, "answered": 2}\n{"at": 1.0, "sent": 8, "answered": 3}\n'
    assert rows(trace(path=written(tmp_path, lines))) == [(0.5, 9, 2), (1.0, 8, 3)]
    assert len(trace(path=written(tmp_path, MOONCAKE))) == 3
    with pytest.raises(ConfigError, match=r":1: no field 'answered' \(format gateway\)"):
        trace(path=written(tmp_path, lines.replace('"answered"', '"took"', 1)))


# -- sessions --------------------------------------------------------------------------------------


def turns(made: Workload) -> list[tuple[str | None, int, list[int]]]:
    """Session, turn, and the rows for which it waits, of each row."""
    assert made.turns is not None
    waits = map(made.turns.after, range(len(made)))
    known = ((one.session, one.turn) for one, _ in made.requests())
    return [(*one, after) for one, after in zip(known, waits, strict=True)]


def test_turns_begin_with_all_that_was_said_if_they_are_long_enough(tmp_path: Path) -> None:
    made = trace(path=written(tmp_path, TURNS))
    assert made.arrival.tolist() == [0.0, 0.5, 4.0, 9.0]
    assert turns(made) == [("0", 1, []), ("1", 1, []), ("0", 2, [0]), ("0", 3, [2])]
    first, _, second, third = (made.prompts[row].runs for row in range(4))  # type: ignore[index]
    said = made.prompts.answer(0).runs  # type: ignore[union-attr]
    assert second == (*first, (said[0][0], 10), (second[2][0], 20))
    assert third[0][0] != first[0][0]


def test_a_column_of_a_csv_file_may_say_whose_turn_it_is(tmp_path: Path) -> None:
    path = written(tmp_path, BURSTGPT)
    made = trace(path=path, columns={"session": "Session ID"}, drop_empty=True)
    assert [session for session, *_ in turns(made)] == ["0", "1", "2"]
    whole = trace(path=path, columns={"session": "Log Type"}, drop_empty=True)
    assert turns(whole) == [("0", 1, []), ("0", 2, [0]), ("1", 1, [])]


def test_turns_do_not_wait_where_configured(tmp_path: Path) -> None:
    path = written(tmp_path, TURNS)
    made = trace(path=path, in_turns=False, arrivals="burst")
    assert turns(made) == [("0", 1, []), ("1", 1, []), ("0", 2, []), ("0", 3, [])]
    with pytest.raises(ConfigError, match="arrivals=burst: must be trace for turns of sessions"):
        trace(path=path, arrivals="burst")

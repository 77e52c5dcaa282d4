"""Other formats of whole sessions (TraceLab, OpenTelemetry, agentic Mooncake), and bad files."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pagedsim.workload import trace
from tests.core.refusals import refusal
from tests.workload.files import packed, written
from tests.workload.test_agents import call, pauses, played, runs, saved, subagent, waits


def lines(folder: Path, *rows: dict[str, Any], name: str = "a.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# -- TraceLab --------------------------------------------------------------------------------------


def date(seconds: float) -> str:
    return datetime.fromtimestamp(1e9 + seconds, UTC).isoformat().replace("+00:00", "Z")


def round_of(
    session: str, number: int, sent: float, ended: float, total: int, prefix: int, **more: Any
) -> dict[str, Any]:
    events = [
        {"event_type": "user_message", "timestamp": date(sent)},
        {"event_type": "text", "timestamp": date(ended)},
    ]
    return {
        "session_id": session, "round_index": number, "input_tokens_total": total,
        "prefix_tokens": prefix, "newly_append_tokens": total - prefix, "output_tokens": 7,
        "timing_events": events, "user": "u", "project": "p",
    } | more  # fmt: skip


def task(begin: float, end: float, kind: str = "Task") -> dict[str, Any]:
    return {"tool_name": kind, "emitted_at": date(begin), "result_at": date(end)}


def rounds(folder: Path) -> str:
    """A session, whose sub-agent is a session of its own, and another user's at the same time."""
    return lines(
        folder,
        round_of("root", 0, 0, 2, 100, 0, tools=[task(2, 40)]),
        round_of("root", 1, 41, 45, 150, 90, reasoning_output_tokens=3),
        round_of("other", 0, 11, 12, 60, 0, user="v"),
        round_of("child", 0, 10, 12, 60, 0),
        round_of("child", 1, 20, 30, 80, 60, model="small"),
        round_of("root", 2, 1, 1, 9, 0, timing_events=[]),
    )


def test_tracelabs_rounds_continue_what_was_cached_of_the_round_before(tmp_path: Path) -> None:
    made = trace(path=rounds(tmp_path), arrivals="burst")
    assert made.prompt_len.tolist() == [100, 60, 80, 150, 60]
    assert made.output_len.tolist() == [7, 7, 7, 10, 7]
    assert runs(made, 3) == [(runs(made, 0)[0][0], 90), (runs(made, 3)[1][0], 60)]
    assert runs(made, 2)[0] == (runs(made, 1)[0][0], 60)
    assert "1 calls were left out, since nothing says when they were" in made.notices


def test_tracelabs_subagents_lie_within_a_call_of_a_tool(tmp_path: Path) -> None:
    made = trace(path=rounds(tmp_path), arrivals="burst")
    assert waits(made) == [[], [0], [1], [0, 2], []]
    assert pauses(made) == [0, 8, 8, 11, 0]
    assert trace(path=rounds(tmp_path)).arrival.tolist() == [0, 10, 11, 20, 41]
    short = task(9.5, 19)  # too short for one
    apart = trace(path=lines(
        tmp_path, round_of("root", 0, 0, 2, 100, 0, tools=[short]),
        round_of("child", 0, 10, 12, 60, 0),
    ))  # fmt: skip
    assert waits(apart) == [[], []]


def test_codex_begins_and_waits_for_subagents_by_separate_calls(tmp_path: Path) -> None:
    tools = [task(2, 2.1, "spawn_agent"), task(3, 20, "wait_agent")]
    path = lines(
        tmp_path, round_of("root", 0, 0, 2, 100, 0, tools=tools),
        round_of("child", 0, 5, 12, 60, 0), round_of("root", 1, 22, 23, 120, 100),
    )  # fmt: skip
    assert waits(trace(path=path)) == [[], [0], [0, 1]]


# -- OpenTelemetry ---------------------------------------------------------------------------------


def span(
    name: str, parent: str, begin: float, end: float, operation: str, **usage: int
) -> dict[str, Any]:
    held: dict[str, dict[str, Any]] = {"gen_ai.operation.name": {"stringValue": operation}}
    for key, tokens in usage.items():
        where = "cache_read.input_tokens" if key == "cached" else f"{key}_tokens"
        held[f"gen_ai.usage.{where}"] = {"intValue": str(tokens)}
    return {
        "traceId": "t", "spanId": name, "parentSpanId": parent,
        "startTimeUnixNano": str(int(1e18 + begin * 1e9)),
        "endTimeUnixNano": str(int(1e18 + end * 1e9)),
        "attributes": [{"key": key, "value": value} for key, value in held.items()],
    }  # fmt: skip


def spans(*made: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(made)}]}]}


AGENTS = (
    span("agent", "", 0, 100, "invoke_agent"),
    span("1", "agent", 1, 3, "chat", input=100, output=10),
    span("tool", "agent", 4, 20, "execute_tool"),
    span("nested", "tool", 5, 20, "invoke_agent"),
    span("2", "nested", 6, 8, "chat", input=50, output=5),
    span("3", "nested", 10, 15, "chat", input=70, output=0),
    span("4", "agent", 22, 30, "chat", input=130, output=1, cached=64),
)


@pytest.mark.parametrize("split", [False, True], ids=["one object", "lines"])
def test_spans_become_a_session_with_a_subagent(tmp_path: Path, split: bool) -> None:
    path = lines(tmp_path, *([spans(one) for one in AGENTS] if split else [spans(*AGENTS)]))
    made = trace(path=path, arrivals="burst")
    assert made.prompt_len.tolist() == [100, 50, 70, 130]
    assert made.output_len.tolist() == [10, 5, 1, 1]
    assert (waits(made), pauses(made)) == ([[], [0], [1], [0, 2]], [0, 3, 2, 7])
    assert runs(made, 2)[0] == (runs(made, 1)[0][0], 50), "all of the prompt before it"
    assert runs(made, 3)[0] == (runs(made, 0)[0][0], 64), "what was read from the cache"


def test_a_conversation_may_go_on_in_another_trace(tmp_path: Path) -> None:
    made = []
    for number, begin in (("t", 0), ("u", 50)):
        one = span("1", "", begin, begin + 2, "chat", input=40 + begin, output=3)
        name = {"key": "gen_ai.conversation.id", "value": {"stringValue": "talk"}}
        made.append(one | {"traceId": number, "attributes": [*one["attributes"], name]})
    read = trace(path=lines(tmp_path, spans(*made)), arrivals="burst")
    assert (waits(read), pauses(read)) == ([[], [0]], [0, 48])


# -- agentic Mooncake ------------------------------------------------------------------------------


def row(tokens: int, *ids: int, **more: Any) -> dict[str, Any]:
    return {"input_length": tokens, "output_length": 4, "hash_ids": list(ids), **more}


def test_lines_of_a_session_follow_one_another_by_their_delays(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        row(8, 1, 2, session_id="a", timestamp=1000),
        row(4, 1, session_id="b", timestamp=1500),
        row(12, 1, 2, 3, session_id="a", delay=2500),
        row(10, 1, 2, session_id="a", delay=500.5),
    )
    made = trace(path=path, block_tokens=4)
    assert made.arrival.tolist() == [1, 1, 1, 1.5]
    assert (waits(made), pauses(made)) == ([[], [0], [1], []], [0, 2.5, 0.5005, 0])
    assert runs(made, 3)[0][0] == runs(made, 0)[0][0], "hashes are of the whole file"
    assert [length for _, length in runs(made, 2)] == [8, 2]
    assert sum(played(path, block_tokens=4, block_size=4)["cached_tokens"].to_pylist()) == 16


def test_lines_may_name_those_that_they_wait_for(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        row(
            4, 1, request_id="end", session_id="a", wait_for=["x", "y"], tool_wait_ms=2000, delay=1
        ),
        row(4, 1, request_id="start", session_id="a", timestamp=0),
        row(4, 5, request_id="x", session_id="x", wait_for=["start"]),
        row(4, 6, request_id="y", session_id="y", wait_for=["start"], delay=700),
    )
    made = trace(path=path, block_tokens=4, arrivals="closed", users=1)
    assert (waits(made), pauses(made)) == ([[], [0], [0], [1, 2]], [0, 0, 0.7, 2.001])
    assert made.turns is not None and made.turns.count == 1


def test_lines_without_hashes_go_on_from_the_line_before(tmp_path: Path) -> None:
    one = {"session_id": "a", "input_length": 100, "output_length": 4}
    path = lines(tmp_path, one | {"timestamp": 0}, one | {"delay": 5, "input_length": 130})
    made = trace(path=path)
    assert runs(made, 1)[0] == runs(made, 0)[0]


# -- bad files -------------------------------------------------------------------------------------

Maker = Callable[[Path], Any]
NEGATIVE = call(1, 4, [1], think_time=-2)
CYCLE = (
    span("1", "2", 0, 1, "chat", input=3, output=1),
    span("2", "1", 0, 1, "invoke_agent"),
)
LOOP = [row(4, 1, request_id=one, wait_for=[other]) for one, other in ("ab", "ba")]


def other_files(folder: Path) -> str:
    lines(folder, {"hello": "world"}, name="a.json")
    return str(folder)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda f: saved(f, call(0, 4, [1]), NEGATIVE), "requests[1]: think_time=-2 | from 0"),
        (
            lambda f: saved(f, call(0, 9, [1])),
            "requests[0]: hash_ids has 1 block for 9 tokens | 4",
        ),
        (lambda f: saved(f, call(0, 4, [1, 2])), "hash_ids has 2 blocks for 4 tokens | (1)"),
        (lambda f: saved(f, call(0, 4, ["x"])), "hash_ids=['x'] | whole numbers"),  # type: ignore[list-item]
        (lambda f: saved(f, call(0, 0, [])), "requests[0]: in=0 | from 1"),
        (lambda f: saved(f, call(-1, 4, [1])), "requests[0]: t=-1 | from 0"),
        (lambda f: saved(f, {"t": 0, "type": "x"}), "type='x' | n, s, subagent"),
        (lambda f: saved(f), "holds no calls"),
        (
            lambda f: saved(f, call(0, 4, [1]), subagent(1, call(0, 4, [1], api_time="slow"))),
            "requests[1]: requests[0]: api_time='slow' | a number",
        ),
        (lambda f: saved(f, call(0, 4, [1]), hash_id_scope="global"), "'global' | 'local'"),
        (lambda f: saved(f, call(0, 4, [1]), block_size=0), "block_size=0 | from 1"),
        (lambda f: saved(f, {"t": 0, "type": "subagent"}, call(0, 4, [1])), ""),
        (lambda f: lines(f, row(4, 1, session_id="a", delay=-5)), ":1: delay=-5 | from 0"),
        (
            lambda f: lines(f, row(4, 1, request_id="a"), row(4, 1, wait_for=["b"])),
            ":2: wait_for='b': no line has this request_id",
        ),
        (lambda f: lines(f, *LOOP), "wait_for: a cycle of calls: | after b after"),
        (lambda f: lines(f, spans(AGENTS[1])), "parentSpanId='agent': there is no such span"),
        (lambda f: lines(f, spans(*CYCLE)), "a cycle of spans"),
        (lambda f: lines(f, spans(AGENTS[0])), "holds no calls"),
        (
            lambda f: lines(f, round_of("a", 0, 1, 2, 3, 0, timing_events=[{"timestamp": "noon"}])),
            ":1: timing_events[0]: timestamp='noon' | a date",
        ),
        (str, "is a folder without traces of sessions (.json, .jsonl, .json.gz, .jsonl.gz)"),
        (other_files, "path= | a.json is no trace of sessions | agents, tracelab, otel, agentic"),
        (lambda f: [], "path: must name a trace file"),
        (lambda f: [f / "none.json"], "none.json: there is no such file"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, make: Maker, named: str) -> None:
    path = make(tmp_path)
    if not named:
        assert len(trace(path=path, block_tokens=4)) == 1
        return
    refusal(lambda: trace(path=path, block_tokens=4), named)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"replay": {"plays": 0}}, "replay.plays=0 | from 1"),
        ({"replay": {"plays": 2}}, "replay.plays=2: must be 1 with arrivals=trace"),
        ({"replay": {"playz": 2}}, "replay.playz: no such setting | plays"),
        ({"replay": [1]}, "replay=[1]: must be a mapping"),
        ({"replay": {"delays": "thinking"}}, "replay.delays='thinking' | think"),
        ({"replay": {"begin": [0, 1]}}, "replay.begin=[0, 1]: only with arrivals=closed"),
        (
            {"replay": {"begin": [0.5, 0.2]}},
            "replay.begin=[0.5, 0.2]: must have the lower share first",
        ),
        ({"replay": {"begin": 0.5}}, "replay.begin=0.5: must be two shares, [0, 1]"),
        ({"replay": {"max_idle": -1}}, "replay.max_idle=-1 | at least 0"),
        ({"replay": {"bust": "yes"}}, "replay.bust='yes': must be true or false"),
        ({"arrivals": "closed", "users": 3}, "users=3 | sessions to play, 1 | replay.plays"),
        ({"arrivals": "closed", "users": 1, "replay": {"delays": "clock"}}, "delays=clock"),
        ({"in_turns": False, "arrivals": "burst"}, "in_turns=false: only with replay.delays=clock"),
        (
            {"max_len": 7},
            "more than 7 tokens, of 9 at least: take a model= with | workload.max_len=",
        ),
        ({"requests": 5}, "requests=5: format agents holds sessions, not rows"),
        ({"columns": {"client": "who"}}, "columns | format agents holds sessions"),
        ({"rate": 3}, "rate=3: a trace has its own arrivals: set arrivals="),
        ({"format": "mooncake", "replay": {}}, "no field 'timestamp' (format mooncake)"),
        ({"format": "agent"}, "unknown format 'agent': did you mean 'agents'?"),
        ({"format": "plain", "replay": {"bust": True}}, "replay: only formats of whole sessions"),
    ],
)
def test_a_setting_that_cannot_be_is_named(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    path = saved(tmp_path, call(0, 4, [1]))
    refusal(lambda: trace(path=path, **settings), named)


def test_calls_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    calls = [call(at, 4, [at + 1]) for at in (0, 5, 9)]
    tables = [trace(path=saved(tmp_path, *some)) for some in (calls, calls[::-1])]
    prompts = [
        workload.prompts and [workload.prompts[row].streams for row in range(3)]
        for workload in tables
    ]
    assert prompts[0] == prompts[1]
    assert tables[0].arrival.tolist() == tables[1].arrival.tolist()


MADE: list[Callable[[Path], str]] = [
    lambda folder: saved(folder, call(0, 4, [1]), call(3, 4, [1])),
    rounds,
    lambda folder: lines(folder, *map(spans, AGENTS)),
    lambda folder: lines(folder, *LOOP[:1], row(4, 1, request_id="b", timestamp=5)),
]


@pytest.mark.parametrize("make", MADE, ids=["agents", "tracelab", "otel", "agentic"])
def test_every_format_of_sessions_is_recognised_packed_or_not(tmp_path: Path, make: Maker) -> None:
    text = Path(make(tmp_path)).read_text()
    plain = trace(path=str(tmp_path), block_tokens=4).arrival.tolist()
    for way in (text, "\ufeff" + text, "\r\n" + text.replace("\n", "\r\n")):
        for path in (packed(tmp_path, way), written(tmp_path, way)):
            assert trace(path=path, block_tokens=4).arrival.tolist() == plain

"""Recorded sessions of coding agents: what is read, when calls come, and what is found of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.workload import Workload, trace
from tests.sim.harness import Constant, run
from tests.workload.hashes import Cache, calls, loaded

FOLDER = Path(__file__).parent / "agents"
FILES = sorted(FOLDER.glob("*.gz"))


def call(t: float, tokens: int, ids: Sequence[int], out: int = 5, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": out, "hash_ids": list(ids), **more}


def subagent(t: float, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "requests": list(requests), **more}


def saved(folder: Path, *requests: dict[str, Any], name: str = "a.json", **more: Any) -> str:
    """The path of a session in blocks of 4 tokens."""
    session = {"id": name, "block_size": 4, "hash_id_scope": "local", "requests": list(requests)}
    path = folder / name
    path.write_text(json.dumps(session | more))
    return str(path)


def waits(made: Workload) -> list[list[int]]:
    assert made.turns is not None
    return [made.turns.after(row) for row in range(len(made))]


def pauses(made: Workload) -> list[float]:
    assert made.turns is not None
    return [round(pause, 6) for pause in made.turns.pauses.tolist()]


def runs(made: Workload, row: int) -> list[tuple[int, int]]:
    assert made.prompts is not None
    return list(made.prompts[row].runs)


def played(
    path: Any, step: float = 1e-3, block_size: int = 16, blocks: int = 200_000, **settings: Any
) -> pa.Table:
    """The requests of a replay by a server that forgets nothing."""
    memory = make_memory("prefix", blocks=blocks, block_size=block_size)
    scheduler = make_scheduler(batching="unified", memory=memory, max_batched_tokens=1 << 20)
    made = trace(path=path, **settings)
    return run(scheduler, made, Constant(step=step))[0]  # type: ignore[arg-type]


# -- what is found ---------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [16, 48, 64, 100])
@pytest.mark.parametrize("way", [{"arrivals": "closed", "users": 1}, {}], ids=["closed", "open"])
def test_a_memory_that_forgets_nothing_finds_what_the_hashes_allow(
    block_size: int, way: dict[str, Any]
) -> None:
    table = played(FOLDER, block_size=block_size, **way)
    cache = Cache(block_size)
    for path in FILES:
        for one in calls(loaded(path)):
            cache.ask(one["hash_ids"], one["in"], path)
    assert sum(table["prompt_tokens"].to_pylist()) == cache.prompts
    assert sum(table["cached_tokens"].to_pylist()) == cache.found > 0.8 * cache.prompts


@pytest.mark.parametrize("bust", [False, True])
def test_a_play_of_its_own_finds_of_others_the_tools_and_the_system_prompt(bust: bool) -> None:
    path = FOLDER / "trace_0242.json.gz"
    table = played(
        str(path), arrivals="closed", users=1, replay={"plays": 3, "bust": bust}, block_size=64
    )
    session, cache = loaded(path), Cache(64)
    common = (session["tool_tokens"] + session["system_tokens"]) // 64
    found = []
    for play in range(3):
        for one in calls(session):
            ids = [
                (name, place >= common and bust and play)
                for place, name in enumerate(one["hash_ids"])
            ]
            found.append(cache.ask(ids, one["in"], 0))  # type: ignore[arg-type]
    assert table["cached_tokens"].to_pylist() == found
    assert found[3] == (common * 64 if bust else (len(calls(session)[0]["hash_ids"])) * 64)


def test_sessions_share_tools_and_system_prompts_of_equal_length_if_asked_to(
    tmp_path: Path,
) -> None:
    for name, ids, system in (("a", (1, 2, 3, 4), 4), ("b", (5, 6, 7, 8), 4), ("c", (1, 2, 3), 3)):
        saved(
            tmp_path, call(0, 4 * len(ids) + 1, ids), name=f"{name}.json",
            tool_tokens=8, system_tokens=system,
        )  # fmt: skip
    apart, together = (trace(path=tmp_path, replay={"shared": shared}) for shared in (False, True))
    assert len({stream for row in range(3) for stream, _ in runs(apart, row)}) == 4 + 4 + 3
    first, second, third = (runs(together, row) for row in range(3))
    assert first[:2] == second[:2] and first[2] != second[2]
    assert [length for _, length in first] == [8, 4, 4, 1]
    assert third[0] == first[0] and third[1] != first[1], "the tools are the same, no more"


def test_tokens_behind_the_named_blocks_are_a_prompts_own(tmp_path: Path) -> None:
    made = trace(path=saved(tmp_path, call(0, 11, [1, 2]), call(1, 11, [1, 2]), call(2, 9, [])))
    assert [[length for _, length in runs(made, row)] for row in range(3)] == [[8, 3], [8, 3], [9]]
    assert runs(made, 0)[0] == runs(made, 1)[0] and runs(made, 0)[1] != runs(made, 1)[1]
    assert "1 calls have no hash_ids: their prompts are unlike all others" in made.notices


def test_a_last_block_that_is_cut_may_have_a_name(tmp_path: Path) -> None:
    made = trace(path=saved(tmp_path, call(0, 6, [9, 4]), call(1, 8, [9, 4])))
    assert runs(made, 0)[0] == runs(made, 1)[0]
    assert [length for _, length in runs(made, 0)] == [4, 2]


def test_names_of_blocks_may_be_hashes_of_any_size(tmp_path: Path) -> None:
    names = [(1 << 70) + 5, -3, 12]
    made = trace(path=saved(tmp_path, call(0, 12, names), call(1, 16, [*names, 7])))
    assert runs(made, 0) == [(runs(made, 1)[0][0], 12)]
    assert [length for _, length in runs(made, 1)] == [16]


# -- sub-agents ------------------------------------------------------------------------------------


def nested(folder: Path, shift: float = 0.0) -> str:
    """A sub-agent with one of its own, and one beside it; times within count from `shift`."""
    inner = subagent(3, call(shift / 3, 4, [8]), duration_ms=1500)
    return saved(
        folder,
        call(0, 4, [1], api_time=2),
        subagent(
            10,
            call(shift, 4, [5], api_time=1),
            inner | {"t": 3 + shift, "requests": [call(0, 4, [8], api_time=1)]},
            call(5 + shift, 4, [5], api_time=1),
            duration_ms=6000,
        ),
        subagent(11, call(shift and shift + 1, 4, [6], api_time=2), duration_ms=2000),
        call(20, 8, [1, 2], think_time=18),
    )


@pytest.mark.parametrize("shift", [0.0, 10.0], ids=["relative", "absolute"])
def test_subagents_begin_at_their_markers_and_hold_their_parent(
    tmp_path: Path, shift: float
) -> None:
    path = nested(tmp_path, shift)
    closed = trace(path=path, arrivals="closed", users=1)
    # root, the sub-agent, the other one, what is nested, the sub-agent again, root
    assert closed.prompts is not None and len(closed) == 6
    assert waits(closed) == [[], [0], [0], [1], [1, 3], [0, 2, 4]]
    assert pauses(closed) == [0, 8, 9, 2, 1, 4]
    assert trace(path=path).arrival.tolist() == [0, 10, 11, 13, 15, 20]


def test_a_subagent_without_a_call_before_it_is_left_out(tmp_path: Path) -> None:
    path = saved(tmp_path, subagent(0, call(0, 4, [9])), call(3, 4, [1]))
    made = trace(path=path)
    assert (made.arrival.tolist(), len(made)) == ([3], 1)
    assert made.notices[0].startswith("1 sub-agents were left out, since no call of their parent")


def test_a_subagent_without_a_call_after_it_holds_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path, call(0, 4, [1]), subagent(1, call(0, 4, [9]), call(2, 4, [9])))
    assert waits(trace(path=path)) == [[], [0], [1]]


def test_a_subagent_that_runs_beside_its_parent_holds_what_comes_after_its_end(
    tmp_path: Path,
) -> None:
    beside = subagent(1, call(0, 4, [9], api_time=4), status="async_launched", duration_ms=None)
    path = saved(tmp_path, call(0, 4, [1]), beside, call(3, 8, [1, 2]), call(9, 12, [1, 2, 3]))
    assert waits(trace(path=path)) == [[], [0], [0], [1, 2]]


def test_markers_may_be_those_of_returns(tmp_path: Path) -> None:
    """As they are in the sessions that kv-cache-tester publishes."""
    path = str(FOLDER / "trace_0277.json.gz")
    begin, end = (trace(path=path, replay={"markers": markers}) for markers in ("start", "end"))
    assert any("replay.markers=end takes markers for returns" in note for note in begin.notices)
    assert not any("markers" in note for note in end.notices)
    turns = end.turns
    assert turns is not None
    first = [row for row in range(len(end)) if turns.after(row) == [0]]
    # Three sub-agents begin together, 0.7 s after the answer to the first call.
    assert end.arrival[first].tolist() == pytest.approx([19.5] * 3, abs=0.05)


# -- when calls come -------------------------------------------------------------------------------


def test_an_agents_times_may_be_missing_and_its_answers_empty(tmp_path: Path) -> None:
    path = saved(tmp_path, call(0, 4, [1], out=0), call(7, 8, [1, 2], api_time=None, ttft=None))
    made = trace(path=path, arrivals="closed", users=1)
    assert (pauses(made), made.output_len.tolist()) == ([0, 7], [1, 5])


@pytest.mark.parametrize(
    ("replay", "expected"),
    [
        ({}, [0, 5, 30]),
        ({"delays": "answer", "max_delay": 9}, [0, 5, 9]),
        ({"delays": "think"}, [0, 4, 29]),
        ({"delays": "none"}, [0, 0, 0]),
    ],
)
def test_delays_count_from_answers(
    tmp_path: Path, replay: dict[str, Any], expected: list[float]
) -> None:
    path = saved(
        tmp_path,
        call(0, 4, [1], api_time=2, think_time=0),
        call(7, 8, [1, 2], api_time=3, think_time=4),
        call(40, 8, [1, 2], think_time=29),
    )
    table = played(path, arrivals="closed", users=1, replay=replay)
    arrival, finished = (np.array(table[name]) for name in ("arrival", "finished"))
    assert (arrival[1:] - finished[:-1]).tolist() == pytest.approx(expected[1:])


def test_recorded_times_wait_for_answers_unless_they_are_not_to(tmp_path: Path) -> None:
    path = saved(tmp_path, call(0, 4, [1], out=9), call(3, 8, [1, 2], out=1))
    held, free = (played(path, step=1.0, in_turns=in_turns) for in_turns in (True, False))
    assert (held["arrival"].to_pylist(), free["arrival"].to_pylist()) == ([0, 9], [0, 3])
    assert trace(path=path, rate_scale=2).arrival.tolist() == [0, 1.5]


def test_sessions_may_begin_by_a_process_of_their_own(tmp_path: Path) -> None:
    for name in "abc":
        saved(tmp_path, call(0, 4, [1]), call(3, 8, [1, 2]), name=f"{name}.json")
    made = trace(path=tmp_path, arrivals="fixed", rate=0.5, replay={"plays": 2})
    assert made.arrival.tolist() == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10]
    assert pauses(made)[:2] == [0, 3]
    clocked = trace(path=tmp_path, arrivals="fixed", rate=0.5, replay={"delays": "clock"})
    assert clocked.arrival.tolist() == [0, 2, 3, 4, 5, 7]


def lanes(folder: Path, count: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        requests = [call(10 * n, 4 * n + 4, range(n + 1), api_time=1) for n in range(5)]
        saved(folder, *requests, name=f"{number}.json")
    return folder


def test_lanes_play_one_session_after_another(tmp_path: Path) -> None:
    table = played(lanes(tmp_path), arrivals="closed", users=2)
    begin, end = dict[str, float](), dict[str, float]()
    for row in table.to_pylist():
        begin.setdefault(row["session"], row["arrival"])
        end[row["session"]] = row["finished"]
    assert begin["0"] == begin["1"] == 0
    assert sorted([begin["2"], begin["3"]]) == sorted([end["0"], end["1"]])


def test_lanes_begin_together_after_a_warmup(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"arrivals": "closed", "users": 2, "seed": 3}
    settings["replay"] = {"begin": [0.3, 0.7]}
    made = trace(path=lanes(tmp_path), **settings)
    turns = made.turns
    assert turns is not None and turns.warmup == 2
    assert made.output_len[:3].tolist() == [1, 1, 5]
    table = played(tmp_path, step=0.5, **settings)
    arrival, finished = (np.array(table[name]) for name in ("arrival", "finished"))
    first = [row for row in range(2, len(made)) if turns.after(row) == [0, 1]]
    assert len(first) == 2
    there = []  # when the lanes reach their instants in the warm-up
    for lane, row in enumerate(first):
        asked, warmed = turns.turn[row], turns.turn[lane]
        assert asked == warmed + 1
        instant = 10 * (asked - 1) - turns.pause(row)
        assert 12 <= instant <= 28 and 0 <= turns.pause(row) <= 10
        assert arrival[row] == max(finished[:2]) + turns.pause(row)
        there.append(arrival[lane] + instant - 10 * (warmed - 1))
    assert there == pytest.approx([there[0]] * 2) and min(arrival[:2]) == 0 < max(arrival[:2])
    others = trace(path=tmp_path, **settings | {"seed": 4})
    assert others.turns is not None
    assert others.turns.pauses.tolist() != turns.pauses.tolist()


def test_the_warmup_asks_again_what_each_agent_asked_last(tmp_path: Path) -> None:
    path = nested(tmp_path)
    rows = trace(path=path, arrivals="closed", users=1, replay={"begin": [0.7, 0.7]})
    turns = rows.turns  # at 14 s the sub-agent waits for the one within it, the root for both
    assert turns is not None and turns.warmup == 2
    assert rows.prompt_len.tolist() == [4, 4, 4, 8]
    assert waits(rows) == [[], [], [0, 1], [2]]
    assert pauses(rows) == [0, 10, 1, 4]  # the last of each was asked 14 and 4 s before


def test_the_whole_system_is_not_idle_for_long(tmp_path: Path) -> None:
    saved(tmp_path, call(0, 4, [1]), call(100, 4, [1]), name="a.json")
    saved(tmp_path, call(0, 4, [1]), call(130, 4, [1]), name="b.json")
    settings: dict[str, Any] = {"arrivals": "closed", "users": 2, "step": 1.0}
    for idle, expected in ((None, [105, 135]), (10, [15, 30]), (20, [25, 50])):
        table = played(tmp_path, replay={"max_idle": idle}, **settings)
        assert sorted(table["arrival"].to_pylist())[2:] == expected


def test_nothing_is_sent_after_the_duration(tmp_path: Path) -> None:
    table = played(lanes(tmp_path), arrivals="closed", users=2, replay={"duration": 25})
    assert max(table["arrival"].to_pylist()) < 25 < max(table["finished"].to_pylist()) + 10
    assert set(table["state"].to_pylist()) == {"finished"} and table.num_rows == 6


def test_one_lane_that_is_over_does_not_end_another(tmp_path: Path) -> None:
    saved(tmp_path, call(0, 4, [1], out=1), call(900, 4, [1]), name="a.json")
    saved(tmp_path, *(call(10 * n, 4, [1], out=20) for n in range(4)), name="b.json")
    table = played(
        tmp_path, step=0.1, arrivals="closed", users=2, replay={"duration": 30, "max_idle": 40}
    )
    assert table["arrival"].to_pylist() == pytest.approx([0, 0, 12, 24])


# -- which sessions --------------------------------------------------------------------------------


def test_sessions_beyond_the_context_are_left_out_whole(tmp_path: Path) -> None:
    saved(tmp_path, call(0, 4, [1]), call(1, 40, range(10)), name="long.json")
    saved(tmp_path, call(0, 4, [1]), name="short.json")
    made = trace(path=tmp_path, max_len=44)
    assert (made.prompt_len.tolist(), made.longest) == ([4], 9)
    note = "left out, since they have calls of more than 44 tokens: 1 of 2 sessions"
    assert made.notices == (note,)
    both = trace(path=[tmp_path / "short.json", tmp_path / "long.json"])
    assert len(both) == 3
    assert both.notices[0].startswith("all 2 sessions begin at once")
    assert "workload.arrivals=poisson" in both.notices[0]
    assert not trace(path=tmp_path, arrivals="poisson", rate=1).notices
    assert len(trace(path=tmp_path, replay={"sessions": 1})) == 2


def test_calls_carry_the_model_that_they_name(tmp_path: Path) -> None:
    path = saved(tmp_path, call(0, 4, [1], model="big"), call(1, 4, [1], model="small"))
    made = trace(path=path)
    assert [request.extra["model"] for request, _ in made.requests()] == ["big", "small"]
    assert "calls of 2 models are all served by the one that is simulated" in made.notices

"""Whatever another seed changes says that it draws, so that no seed is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagedsim.backends.base import StoppableRecorder
from pagedsim.build import AUTOSCALERS
from pagedsim.run.parts import build
from pagedsim.spec.conf import Conf
from tests.run.studies import settings_of

GROUPS = ("policy", "router", "predictor", "preemption", "batching", "memory", "stack", "server")
"""Groups whose options decide how given requests are served."""
_FLEET = ["fleet.replicas=3"]
_WITH = {"policy=continuum": ["memory=prefix"], "policy=dfs_weight": ["server=sglang-0.5"]}
_APART = ["fleet=prefill_decode", "batching=unified"]


def components() -> Iterator[tuple[str, list[str]]]:
    for group in GROUPS:
        for name in Conf().options_of(group):
            choice = f"{group}={name}"
            yield choice, [choice, *_WITH.get(choice, _FLEET if group == "router" else ())]
    for rule in AUTOSCALERS:
        bounds = "up: 1, down: 2" if rule == "freeness" else "up: 2, down: 1"
        yield f"autoscale={rule}", [*_FLEET, f"fleet.autoscale={{rule: {rule}, {bounds}}}"]
    yield "samples", ["workload.n=3"]
    yield "beams", ["workload.beam=3"]
    yield "beams of a fleet", [*_FLEET, "workload.beam=3"]
    yield "beams that go on", ["workload.beam=3", "backend.beam_turnover=0"]
    yield "outages", [*_FLEET, "fleet.failures={mean_between: 2, mean_repair: 1}"]
    yield "listed outages", [*_FLEET, "fleet.failures=[{replica: 0, at: 1, for: 1}]"]
    yield "transfers", _APART
    yield "lossy transfers", [*_APART, "fleet.link.failure_rate=0.5"]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of turns with common prompts, so that every policy finds what it goes by."""
    draw, rows, at = Random(7), [], 0.0
    for number in range(48):
        at += draw.expovariate(20)
        before = number - 3 if number % 4 and number > 3 else -1
        blocks = draw.randrange(2, 12)
        shared = [1000 * (number % 3) + block for block in range(blocks)]
        lengths = {"input_length": 16 * blocks, "output_length": draw.randrange(4, 60)}
        ids = {"chat_id": number, "parent_chat_id": before, "timestamp": at}
        rows.append(json.dumps({**ids, **lengths, "hash_ids": shared}))
    path = tmp_path_factory.mktemp("trace") / "bailian.jsonl"
    path.write_text("\n".join(rows))
    return path


def outcomes(words: list[str]) -> list[tuple[bool, dict[str, Any]]]:
    """Whether anything is drawn, and what became of each request, under two seeds."""
    settings, served = settings_of(*words), []
    for seed in (0, 1):
        parts, recorder = build(settings, seed), StoppableRecorder()
        parts.run.run(parts.workload, recorder)
        served.append((parts.drawn, recorder.requests_table().to_pydict()))
    return served


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in components()])
def test_what_another_seed_changes_is_drawn(words: list[str], sessions: Path) -> None:
    given = ["experiment=single", "workload=bailian", f"workload.path={sessions}", "model=tiny"]
    given += ["workload.deadline=5", "server.max_seqs=8", "memory.blocks=128"]
    if not any(word.startswith("predictor=") for word in words):
        given.append("predictor=oracle")
    first, second = outcomes([*given, *words])
    assert first[0] == second[0]
    assert first[0] or repr(first[1]) == repr(second[1])  # NaN is not itself


def test_only_what_draws_is_served_under_each_seed(sessions: Path) -> None:
    given = ["experiment=single", "workload=bailian", f"workload.path={sessions}"]
    given += ["model=tiny", "memory.blocks=128"]
    cases = dict(components())
    drawn = ("beams", "beams of a fleet", "outages", "lossy transfers", "router=random")
    for name in (*drawn, "samples", "beams that go on", "listed outages", "transfers"):
        (made, _), _ = outcomes([*given, *cases[name]])
        assert made == (name in drawn), name

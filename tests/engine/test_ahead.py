"""Steps that are planned and dispatched before the last one's tokens are known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from pagedsim.core import SamplingParams, Scheduler
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.inputs import feed
from pagedsim.engine.models.native.decoder import Native
from pagedsim.engine.output import RequestOutput
from tests.engine.test_engine import GREEDY, engine, run

ASKED = {
    "greedy": SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=12, ignore_eos=True, top_p=0.9, top_k=40, min_p=0.01),
    "seeded": SamplingParams(max_tokens=12, ignore_eos=True, seed=5),
    "logprobs": SamplingParams(max_tokens=7, ignore_eos=True, logprobs=3),
    "one token": SamplingParams(temperature=0, max_tokens=1),
    "until it ends": SamplingParams(temperature=0, stop_token_ids=tuple(range(0, 97, 3))),
    "not too soon": SamplingParams(stop_token_ids=tuple(range(0, 97, 2)), min_tokens=5),
    "to the end": SamplingParams(temperature=0, ignore_eos=True),
    "penalised": SamplingParams(max_tokens=9, presence_penalty=1.0, repetition_penalty=1.3),
    "several": SamplingParams(n=3, max_tokens=8, stop_token_ids=tuple(range(0, 97, 5))),
    "beams": SamplingParams(n=2, best_of=3, beam_search=True, max_tokens=6),
}

PLAIN = [name for name, params in ASKED.items() if not params.looks_back]
SCARCE = {"blocks": 18, "max_seqs": 6}

SETTINGS: dict[str, dict[str, Any]] = {
    "plenty": {},
    "recompute": SCARCE,
    "swap": {**SCARCE, "preemption": "swap", "cpu_blocks": 40},
    "unified": {**SCARCE, "batching": "unified", "max_batched_tokens": 12},
    "unified, swap": {
        **SCARCE,
        **{"batching": "unified", "max_batched_tokens": 12},
        **{"preemption": "swap", "cpu_blocks": 40},
    },
    "prefix, scarce": {**SCARCE, "memory": "prefix", "preemption": "swap", "cpu_blocks": 9},
}


def asked(server: LLMEngine, names: Sequence[str]) -> dict[Any, RequestOutput]:
    """All of these, in two waves with prompts that begin alike."""
    found: dict[Any, RequestOutput] = {}
    for number, name in enumerate(names):
        if number == len(names) // 2:
            for _ in range(3):
                found |= {output.request_id: output for output in server.step()}
        prompt = [7, 3, 7, 3, 7, 3, *range(number, 2 * number + 3)]
        server.add_request(name, prompt, ASKED[name])
    return found | run(server)


@cache
def wanted(*names: str) -> dict[Any, RequestOutput]:
    """Of an engine that plans each step when the last is complete, in plenty of memory."""
    return asked(engine(max_model_len=48), names)


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        *((PLAIN, settings) for settings in ("plenty", "swap", "unified", "prefix, scarce")),
        *((list(ASKED), settings) for settings in ("recompute", "unified, swap")),
    ],
    ids=lambda one: one if isinstance(one, str) else f"{len(one)} of {len(ASKED)}",
)
def test_answers_are_the_same(settings: str, names: list[str]) -> None:
    server = engine(async_scheduling=True, **{"max_model_len": 48, **SETTINGS[settings]})
    found = asked(server, names)
    assert found.keys() == set(names)
    for name in names:
        assert said(found[name]) == said(wanted(*names)[name]), name
    if settings in ("recompute", "swap"):
        assert sum(output.metrics.preemptions for output in found.values())


def said(output: RequestOutput) -> list[tuple[object, ...]]:
    """Batches differ, and with them the last digits of log-probabilities."""
    return [
        (
            *(list(line.token_ids), line.finish_reason, line.stop_reason),
            line.cumulative_logprob and pytest.approx(line.cumulative_logprob, abs=1e-4),
            [list(best) for best in line.logprobs or ()],
        )
        for line in output.outputs
    ]


class Order:
    """The order in which plans were made and completed."""

    def __init__(self, server: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        for name in ("plan", "complete"):
            monkeypatch.setattr(server.scheduler, name, self._noting(server.scheduler, name))

    def _noting(self, scheduler: Scheduler, name: str) -> Any:
        call = getattr(scheduler, name)

        def noting(*args: Any) -> Any:
            result = call(*args)
            plan = result if name == "plan" else args[0]
            self.events.append((name, plan.number))
            return result

        return noting


def test_each_step_is_planned_before_the_last_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    server = engine(async_scheduling=True)
    order = Order(server, monkeypatch)
    server.add_request("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=3))
    run(server)
    # The third token is its last by max_tokens: no fourth step.
    made = [("plan", 0), ("plan", 1), ("complete", 0), ("plan", 2)]
    assert order.events == [*made, ("complete", 1), ("complete", 2)]


def test_what_looks_back_is_served_a_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    server = engine(async_scheduling=True)
    order = Order(server, monkeypatch)
    server.add_request("a", [5, 6, 7], SamplingParams(max_tokens=2, frequency_penalty=0.5))
    run(server)
    assert order.events == [("plan", 0), ("complete", 0), ("plan", 1), ("complete", 1)]


def test_nothing_goes_on_from_tokens_that_never_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where steps take off when they are planned."""
    server = engine(async_scheduling=True)
    server._defers = False
    carry_out, calls = server.runner.carry_out, iter(range(100))

    def fails_once(*work: Any) -> Any:
        if next(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        return carry_out(*work)

    monkeypatch.setattr(server.runner, "carry_out", fails_once)
    seen: list[int] = []
    original = Native.forward

    def watched(self: Any, ids: torch.Tensor, *more: Any) -> torch.Tensor:
        seen.append(int(ids.min()))
        return original(self, ids, *more)

    monkeypatch.setattr(Native, "forward", watched)
    server.add_request("a", [5, 6, 7], GREEDY)
    assert run(server)["a"].outputs[0].finish_reason == "error"
    server.add_request("b", [5, 6, 7], GREEDY)
    assert run(server)["b"].outputs[0].finish_reason == "length"
    assert server.failure == "OutOfMemoryError: no room"
    assert min(seen) >= 0


def test_tokens_that_only_the_device_knows() -> None:
    for told, wanted in (
        ([5, 6, 7], [5, 6, 7]),
        ([~0, ~1, ~2], [70, 71, 72]),
        ([~2, 8, ~0], [72, 8, 70]),
        ([], []),
    ):
        ids = torch.tensor(told, dtype=torch.int64)
        feed(ids, np.array(told, dtype=np.int64), torch.tensor([70, 71, 72]))
        assert ids.tolist() == wanted
    with pytest.raises(ValueError, match="has picked no tokens"):  # those of a step that failed
        feed(torch.tensor([5, ~0]), np.array([5, ~0]), None)

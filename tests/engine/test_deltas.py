"""A stream of deltas has every token once, whatever happens to the request meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from transformers import LlamaConfig

from pagedsim.core import SamplingParams
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.output import CompletionOutput, RequestOutput
from tests.engine.architectures import SHAPE, build

WAYS: list[dict[str, Any]] = [
    {"batching": "prefill_first", "preemption": "recompute", "memory": "prefix"},
    {"batching": "unified", "preemption": "swap", "cpu_blocks": 40, "async_scheduling": True},
]
Asked = list[tuple[str, SamplingParams]]


@cache
def model() -> LoadedModel:
    return load_model(build(LlamaConfig(**SHAPE | {"vocab_size": 512, "eos_token_id": 257})))


def engine(**settings: Any) -> LLMEngine:
    small = {"block_size": 4, "blocks": 28, "max_model_len": 96, "max_seqs": 12, "seed": 3}
    return LLMEngine(model=model(), tokenizer="tiny", device="cpu", **{**small, **settings})


def stream(server: LLMEngine, asked: Asked, **how: bool) -> dict[int, list[RequestOutput]]:
    """All outputs of each request, in the order in which they came."""
    for name, (prompt, params) in enumerate(asked):
        server.add_request(name, prompt, params, **how)
    outputs: dict[int, list[RequestOutput]] = {name: [] for name in range(len(asked))}
    while server.has_unfinished_requests():
        for output in server.step():
            outputs[int(output.request_id)].append(output)
    return outputs


def joined(outputs: list[RequestOutput], width: int) -> list[CompletionOutput]:
    """The sequences that deltas add up to."""
    whole = [CompletionOutput(index, "", []) for index in range(width)]
    for delta in (one for output in outputs for one in output.outputs):
        before = whole[delta.index]
        assert before.finish_reason is None, "something came after its end"
        logprobs = None if delta.logprobs is None else [*(before.logprobs or ()), *delta.logprobs]
        whole[delta.index] = replace(
            delta,
            text=before.text + delta.text,
            token_ids=[*before.token_ids, *delta.token_ids],
            logprobs=logprobs,
        )
    return whole


def drawn(rng: random.Random) -> tuple[str, SamplingParams]:
    params = SamplingParams(
        n=rng.choice((1, 1, 3)),
        temperature=rng.choice((0.0, 1.0)),
        top_k=rng.choice((0, 20)),
        max_tokens=rng.randint(1, 24),
        min_tokens=rng.choice((0, 1)),
        repetition_penalty=rng.choice((1.0, 1.3)),
        logprobs=rng.choice((None, None, 0, 2)),
        ignore_eos=rng.random() < 0.5,
        include_stop_str_in_output=rng.random() < 0.5,
        stop_token_ids=tuple(rng.sample(range(512), rng.choice((0, 0, 40)))),
    )
    return "".join(rng.choices("abc dé", k=rng.randint(1, 20))), params


def with_stops(rng: random.Random, asked: Asked, said: list[list[CompletionOutput]]) -> Asked:
    """Most requests with stop strings, pieces of what they say without them."""
    stopped = []
    for (prompt, params), outputs in zip(asked, said, strict=True):
        text = outputs[0].text
        places = [rng.randrange(len(text)) for _ in range(rng.randint(0, 2)) if text]
        stops = tuple(text[place : place + rng.randint(1, 4)] for place in places)
        stopped.append((prompt, replace(params, stop=stops)))
    return stopped


@pytest.mark.parametrize("way", WAYS)
def test_deltas_add_up_to_the_answer(way: dict[str, Any]) -> None:
    rng = random.Random(0)
    asked = [drawn(rng) for _ in range(12)]
    first = stream(engine(**way), asked)
    asked = with_stops(rng, asked, [first[name][-1].outputs for name in range(12)])
    whole = stream(engine(**way), asked)
    deltas = stream(engine(**way), asked, stream=True, delta=True)
    for name, (_, params) in enumerate(asked):
        assert joined(deltas[name], params.n) == whole[name][0].outputs
        *before, last = deltas[name]
        assert not any(output.finished for output in before)
        assert last.finished and last.metrics.finished is not None
        assert list(last.prompt_token_ids) == whole[name][0].prompt_token_ids
    assert sum(one[-1].metrics.preemptions for one in deltas.values()) > 0
    stopped = [o for (_, p), one in zip(asked, whole.values(), strict=True) if p.stop for o in one]
    assert any(type(one.stop_reason) is str for o in stopped for one in o.outputs)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=1, best_of=3, max_tokens=6, seed=2),
        SamplingParams(n=2, best_of=3, beam_search=True, max_tokens=6),
    ],
)
def test_what_is_ranked_at_the_end_is_one_output(params: SamplingParams) -> None:
    whole = stream(engine(), [("Once", params)])[0]
    (only,) = stream(engine(), [("Once", params)], stream=True, delta=True)[0]
    assert only.finished and only.outputs == whole[0].outputs
    assert len(stream(engine(), [("Once", params)], stream=True)[0]) > 1


def test_an_arrival_that_the_caller_gives_is_kept() -> None:
    server = engine()
    params = SamplingParams(temperature=0, max_tokens=2)
    came = server.now - 5.0
    server.add_request("a", "Once", params, arrival=came)
    while server.has_unfinished_requests():
        outputs = server.step()
    metrics = outputs[0].metrics
    assert metrics.arrival == came
    assert metrics.first_token is not None and metrics.first_token - came > 5.0

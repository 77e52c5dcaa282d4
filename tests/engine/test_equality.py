"""Whatever the scheduler does to a request, its tokens are those of transformers' generate."""

from __future__ import annotations

import random
from copy import deepcopy
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from pagedsim.core import SamplingParams
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.output import RequestOutput
from tests.engine.architectures import CONFIGS, VOCAB, made

PROMPTS, LONGEST, TOKENS = 8, 14, 16
BLOCKS, BLOCK = 10, 4
"""Hardly more than one request at its full length takes."""
NATIVE = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")
BOTH = [
    *((name, "transformers") for name in CONFIGS if name != "deepseek_v3"),
    *((name, "native") for name in NATIVE),
]
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)


@cache
def model(name: str) -> Any:
    return made(name)


@cache
def prompts() -> list[list[int]]:
    rng = random.Random(7)
    common = [rng.randrange(3, VOCAB) for _ in range(6)]  # for the prefix cache to find
    return [
        common[: rng.choice((0, 6))]
        + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, LONGEST - 6))]
        for _ in range(PROMPTS)
    ]


@cache
def wanted(name: str) -> list[list[int]]:
    """What transformers generates for each prompt by itself."""
    answers = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        whole = model(name).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


def served(
    engine: LLMEngine, params: SamplingParams = GREEDY, arrivals: int = 2
) -> dict[Any, RequestOutput]:
    """Serve all prompts, of which a few arrive with every step."""
    waiting = list(enumerate(prompts()))
    outputs = {}
    while waiting or engine.has_unfinished_requests():
        for number, prompt in waiting[:arrivals]:
            engine.add_request(number, prompt, params, priority=-number)
        waiting = waiting[arrivals:]
        for output in engine.step():
            outputs[output.request_id] = output
        engine.scheduler.check()
    return outputs


def small(name: str, **settings: Any) -> LLMEngine:
    return LLMEngine(
        model=deepcopy(model(name)),
        device="cpu",
        block_size=BLOCK,
        blocks=BLOCKS,
        cpu_blocks=BLOCKS,
        max_model_len=LONGEST + TOKENS,
        **{"max_seqs": 4, "max_batched_tokens": 32, **settings},
    )


WAYS = [*product(("prefill_first", "unified", "static"), ("recompute", "swap"))]
EVERY = [
    pytest.param(*model, *way, marks=() if quick else pytest.mark.slow)
    for (number, model), (which, way) in product(enumerate(BOTH), enumerate(WAYS))
    for quick in [model[0] == "llama" or number % len(WAYS) == which]
]
"""Every model goes every way; one of them all quickly, the others one each."""


@pytest.mark.parametrize(("name", "model_impl", "batching", "preemption"), EVERY)
def test_greedy_tokens(name: str, model_impl: str, batching: str, preemption: str) -> None:
    engine = small(name, model_impl=model_impl, batching=batching, preemption=preemption)
    outputs = served(engine)
    assert [outputs[i].outputs[0].token_ids for i in range(PROMPTS)] == wanted(name)
    metrics = [outputs[i].metrics for i in range(PROMPTS)]
    assert sum(one.preemptions for one in metrics) > 0
    if preemption == "swap":
        assert sum(one.swapped_blocks for one in metrics) > 0
    assert engine.scheduler.memory.free == BLOCKS


@pytest.mark.parametrize(
    ("name", "model_impl"),
    [
        *((name, "transformers") for name in ("llama", "mistral", "gpt2")),
        *((name, "native") for name in ("mistral", "qwen3", "deepseek_v3")),
    ],
)
@pytest.mark.parametrize("memory", ["paged", "prefix"])
@pytest.mark.parametrize("budget", [5, 8, 64])
def test_chunks_and_a_prefix_cache_change_no_token(
    name: str, model_impl: str, memory: str, budget: int
) -> None:
    engine = small(
        name, model_impl=model_impl, batching="unified", memory=memory,
        max_batched_tokens=budget,
    )  # fmt: skip
    first, again = served(engine), served(engine)
    for outputs in (first, again):
        assert [outputs[i].outputs[0].token_ids for i in range(PROMPTS)] == wanted(name)
    cached = sum(again[i].metrics.cached_tokens for i in range(PROMPTS))
    assert (cached > 0) == (memory == "prefix")


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_a_prefix_cache_that_is_preempted(name: str, batching: str) -> None:
    for preemption in ("recompute", "swap"):
        engine = small(
            name, model_impl="native", batching=batching, preemption=preemption, memory="prefix"
        )
        outputs = served(engine)
        assert [outputs[i].outputs[0].token_ids for i in range(PROMPTS)] == wanted(name)
        assert sum(outputs[i].metrics.preemptions for i in range(PROMPTS)) > 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_sampled_tokens_depend_on_neither_batch_nor_preemption(policy: str) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=TOKENS, seed=5)
    found = []
    for batching, preemption, seqs in product(
        ("prefill_first", "unified"), ("recompute", "swap"), (1, 4)
    ):
        engine = small(
            "llama", batching=batching, preemption=preemption, policy=policy, max_seqs=seqs
        )
        outputs = served(engine, params)
        found.append([outputs[i].outputs[0].token_ids for i in range(PROMPTS)])
    assert all(one == found[0] for one in found)
    assert found[0] != wanted("llama")

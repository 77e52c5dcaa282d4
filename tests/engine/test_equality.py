"""Whatever scheduler and policy do to a request, its tokens are those of transformers' generate."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from pagedsim.build import BATCHINGS, POLICIES, accepts, make_batching, make_policy
from pagedsim.core import SamplingParams
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.output import RequestOutput
from pagedsim.engine.runner import Runner
from tests.engine.architectures import VOCAB, loaded, reference

PROMPTS, LONGEST, TOKENS = 8, 14, 16
BLOCKS, BLOCK = 10, 4
"""Hardly more than one request at its full length takes."""
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
Outputs = dict[Any, RequestOutput]


@pytest.fixture(autouse=True, params=["eager", pytest.param("graphs", marks=pytest.mark.slow)])
def launched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test with steps launched kernel by kernel, and with each of them as one graph."""
    if request.param == "eager":
        yield
        return
    request.getfixturevalue("replayer")
    runners: list[Runner] = []
    warm_up = Runner.warm_up

    def noted(runner: Runner, *given: Any, **named: Any) -> None:
        runners.append(runner)
        warm_up(runner, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "warm_up", noted)
        yield
    assert runners and all(one.launched["graph"] and not one.launched["eager"] for one in runners)


@cache
def prompts() -> list[list[int]]:
    rng = random.Random(7)
    common = [rng.randrange(3, VOCAB) for _ in range(6)]  # for the prefix cache to find
    return [
        common[: rng.choice((0, 6))]
        + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, LONGEST - 6))]
        for _ in range(PROMPTS)
    ]


def generated(model: Any) -> list[list[int]]:
    """What transformers generates for each prompt by itself."""
    answers = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


@cache
def wanted(name: str) -> list[list[int]]:
    return generated(reference(name))


def served(engine: LLMEngine, params: SamplingParams = GREEDY, times: int = 1) -> Outputs:
    """Serve all prompts, each some times, of which two arrive with every step."""
    waiting = [(i, prompt) for i, prompt in enumerate(prompts()) for _ in range(times)]
    waiting = [(i + n % times * PROMPTS, prompt) for n, (i, prompt) in enumerate(waiting)]
    outputs = {}
    while waiting or engine.has_unfinished_requests():
        for number, prompt in waiting[:2]:
            engine.add_request(
                number, prompt, params, priority=-number, client="ab"[number % 2],
                deadline=1e9 - number, predicted_len=float(number * 7 % 16),
            )  # fmt: skip
        waiting = waiting[2:]
        for output in engine.step():
            outputs[output.request_id] = output
        engine.scheduler.check()
    assert engine.scheduler.memory.free == engine.scheduler.memory.total
    return outputs


def tokens(outputs: Outputs) -> list[list[int]]:
    """Those of each prompt's first sequence."""
    return [list(outputs[i].outputs[0].token_ids) for i in range(PROMPTS)]


def total(outputs: Outputs, metric: str) -> int:
    return sum(getattr(outputs[i].metrics, metric) for i in range(PROMPTS))


def small(name: str, model_impl: str = "auto", **settings: Any) -> LLMEngine:
    given = {
        "block_size": BLOCK, "blocks": BLOCKS, "cpu_blocks": BLOCKS, "max_seqs": 4,
        "max_model_len": LONGEST + TOKENS, "max_batched_tokens": 32,
    }  # fmt: skip
    return LLMEngine(model=loaded(name, model_impl), device="cpu", **{**given, **settings})


TWELVE = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3"),
    *("gemma2", "phi3", "gpt2", "opt", "gpt-neox"),
)
WAYS = [*product(("prefill_first", "unified", "static"), ("recompute", "swap"))]


EVERY = [
    pytest.param(*model, *way, mode, marks=() if quick else pytest.mark.slow)
    for number, model in enumerate(
        [*((name, "auto") for name in TWELVE), ("llama", "transformers")]
    )
    for its in [number % len(WAYS)]
    for which, way in enumerate(WAYS)
    for mode in [("eager", "graphs")[(which + which // 2 + its + its // 2) % 2]]
    for quick in [model == ("llama", "auto") or which == its]
]
"""Every model goes every way; one of them all quickly, the others one each. With each batching it
preempts in one way step by step, and in the other with graphs."""


@pytest.mark.parametrize(
    ("name", "model_impl", "batching", "preemption", "launched"), EVERY, indirect=["launched"]
)
def test_greedy_tokens(name: str, model_impl: str, batching: str, preemption: str) -> None:
    outputs = served(small(name, model_impl, batching=batching, preemption=preemption))
    assert tokens(outputs) == wanted(name)
    assert total(outputs, "preemptions") > 0
    if preemption == "swap":
        assert total(outputs, "swapped_blocks") > 0


@pytest.mark.parametrize(
    ("name", "model_impl", "budget"),
    [
        *(("mistral", "transformers", 5), ("qwen3", "native", 64), ("deepseek-v3", "native", 5)),
    ],
)
def test_chunks_and_a_prefix_cache_change_no_token(name: str, model_impl: str, budget: int) -> None:
    unified, chunk = {"batching": "unified", "max_batched_tokens": budget}, budget // 4 * 4
    for settings in (
        {**unified, "memory": "paged"},
        {**unified, "memory": "prefix"},
        {
            "batching": make_batching("sglang", chunked_prefill_size=chunk),
            **{"memory": "radix", "policy": "lpm"},
            "max_model_len": LONGEST + TOKENS + 2,  # of which SGLang keeps two tokens free
        },
    ):
        engine = small(name, model_impl, **settings)
        first, again = served(engine), served(engine)
        assert tokens(first) == tokens(again) == wanted(name)
        assert (total(again, "cached_tokens") > 0) == (settings["memory"] != "paged")


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("batching", ["sglang", "unified"])
def test_equal_prompts_of_one_step_share_pages(batching: str, block_size: int, ahead: bool) -> None:
    # A prompt's pages are replaced by those that the tree has, where another prompt of the same
    # step came first, while its request decodes.
    engine = small(
        "llama",
        batching=batching,
        memory="radix",
        block_size=block_size,
        blocks=2 * BLOCKS * BLOCK // block_size,
        max_model_len=LONGEST + TOKENS + 2,  # SGLang leaves two tokens free
        async_scheduling=ahead,
    )
    outputs = served(engine, times=2)
    assert tokens(outputs) == wanted("llama")
    again = {i: outputs[i + PROMPTS] for i in range(PROMPTS)}
    assert tokens(again) == wanted("llama")
    assert total(again, "cached_tokens") > 0


@pytest.mark.parametrize(
    ("name", "batching", "preemption"),
    [
        *(("llama", "prefill_first", "recompute"), ("deepseek-v3", "unified", "swap")),
        ("llama", "sglang", "recompute"),
    ],
)
def test_a_prefix_cache_that_is_preempted(name: str, batching: str, preemption: str) -> None:
    settings: dict[str, Any] = {"batching": batching, "memory": "prefix"}
    if batching == "sglang":  # memory is reserved for no answer, so some do not fit
        settings = {"batching": make_batching(batching, conservativeness=0), "memory": "radix"}
        settings |= {"policy": "lpm", "max_model_len": LONGEST + TOKENS + 2}
    engine = small(name, "native", preemption=preemption, **settings)
    outputs = served(engine)
    assert tokens(outputs) == wanted(name)
    assert total(outputs, "preemptions") > 0


MEMORY_OF = {"lpm": "prefix", "continuum": "prefix", "dfs_weight": "radix"}
SHORT = {"quantum": 1e-3, "starve": 1, "most": 3}
"""Settings that make something happen within so short a run."""


@pytest.mark.parametrize(
    ("name", "batching"),
    [
        pytest.param(name, (*BATCHINGS, "unified")[i % 4], marks=[pytest.mark.slow] * (i % 3 > 0))
        for i, name in enumerate(POLICIES)
    ],
)
def test_greedy_tokens_are_the_same_under_every_policy(name: str, batching: str) -> None:
    kind = POLICIES[name]
    settings = {key: value for key, value in SHORT.items() if accepts(kind, key)}
    if batching == "static" and accepts(kind, "displace"):
        settings["displace"] = False
    engine = small(
        "llama",
        policy=make_policy(name, victim="largest" if batching == "unified" else None, **settings),
        batching=batching,
        preemption="swap" if batching == "prefill_first" and name != "dfs_weight" else "recompute",
        memory=MEMORY_OF.get(name, "paged"),
    )
    assert tokens(served(engine)) == wanted("llama")

"""Two processes with half of a model each: the plans and the tokens of one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedsim.core import ConfigError, Request, SamplingParams, Scheduler, StepPlan
from pagedsim.engine import assemble
from pagedsim.engine.assemble import loaded
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.engine_args import Arguments
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.parallel.ranks import Ranks
from pagedsim.engine.profile import fitting_blocks
from pagedsim.metrics.plans import described
from tests.engine.architectures import CONFIGS
from tests.engine.test_equality import BLOCK, BLOCKS, LONGEST, PROMPTS, TOKENS, served

GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=TOKENS, seed=5)
SEVERAL = SamplingParams(temperature=0.8, max_tokens=6, seed=5, n=2)
BEAMS = SamplingParams(temperature=0, max_tokens=6, n=2, best_of=3, beam_search=True)

FAMILIES: dict[str, dict[str, int]] = {
    "llama": {},
    "qwen2": {},  # biases
    "qwen3": {},  # norms of heads
    "mistral": {"num_key_value_heads": 1},  # a window; and one head for both ranks
}


class Log:
    """The plans of an engine, in words."""

    def __init__(self) -> None:
        self.plans: list[str] = []

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self.plans.append(described(plan, scheduler))

    def left(self, request: Request) -> None: ...


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """To start processes takes longer than these tests, so all models are loaded by the same."""
    made = Ranks(2, torch.device("cpu"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def both(
    request: Any, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[LoadedModel]]:
    """A model in one process, and the same over two."""
    folder = tmp_path_factory.mktemp(request.param)
    config = CONFIGS[request.param]()
    for name, value in FAMILIES[request.param].items():
        setattr(config, name, value)
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in module.parameters():  # so large that tokens differ, and biases are some
        torch.nn.init.normal_(weight, float(weight.ndim == 1), 0.3)
    module.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "Ranks", lambda size, device: ranks)
        yield [
            loaded(Arguments.of(model=str(folder), device="cpu", tensor_parallel=size))
            for size in (1, 2)
        ]


def engine(model: LoadedModel, log: Log, **settings: Any) -> LLMEngine:
    given = {
        "block_size": BLOCK, "blocks": BLOCKS, "cpu_blocks": BLOCKS,
        "max_model_len": LONGEST + TOKENS, "max_seqs": 4, "max_batched_tokens": 32,
        "tensor_parallel": model.ranks_count,
    }  # fmt: skip
    return LLMEngine(Arguments.of(model=model, device="cpu", **{**given, **settings}), observer=log)


llama_alone = pytest.mark.parametrize("both", ["llama"], indirect=True)

ALL: dict[str, tuple[dict[str, Any], SamplingParams]] = {
    "swap": ({"batching": "prefill_first", "preemption": "swap"}, GREEDY),
    "ahead": (
        {"batching": "unified", "preemption": "swap", "async_scheduling": True},
        SAMPLED,
    ),
    "recompute": ({"batching": "unified", "preemption": "recompute", "memory": "prefix"}, SAMPLED),
    "cheapest": ({"preemption": "cheapest", "kv_layout": "layer"}, GREEDY),
    "siblings": ({"blocks": 3 * BLOCKS}, SEVERAL),
    "beams": ({"blocks": 3 * BLOCKS, "batching": "unified"}, BEAMS),
    "8 bits": ({"kv_cache_dtype": "fp8"}, GREEDY),
}
SOME = ("swap", "ahead")


@pytest.mark.parametrize(
    ("both", "name"),
    [("llama", name) for name in ALL]
    + [(family, name) for family in FAMILIES if family != "llama" for name in SOME],
    indirect=["both"],
)
def test_tokens_and_plans(both: list[LoadedModel], name: str) -> None:
    settings, params = ALL[name]
    logs, found = (Log(), Log()), []
    for model, log in zip(both, logs, strict=True):
        serving = engine(model, log, **settings)
        outputs = served(serving, params)
        found.append([[one.token_ids for one in outputs[i].outputs] for i in range(PROMPTS)])
        if "preemption" in settings:
            assert sum(outputs[i].metrics.preemptions for i in range(PROMPTS)) > 0
        if settings.get("memory") == "prefix":
            assert sum(outputs[i].metrics.cached_tokens for i in range(PROMPTS)) > 0
        serving.close()
    assert found[0] == found[1]
    if settings.get("preemption") != "cheapest":  # whose prices are measured
        assert logs[0].plans == logs[1].plans


@pytest.mark.parametrize("both", ["llama", "mistral"], indirect=True)
def test_each_has_its_part(both: list[LoadedModel]) -> None:
    one, two = both
    assert two.num_kv_heads == max(one.num_kv_heads // 2, 1)
    assert two.vocab_size == one.vocab_size
    blocks = [engine(model, Log()).runner.cache.shape.block_bytes for model in both]
    assert blocks[1] * 2 == blocks[0] * (2 if one.num_kv_heads == 1 else 1)
    with pytest.raises(ConfigError, match="tensor_parallel=1: was loaded for 2"):
        LLMEngine(Arguments.of(model=two, device="cpu"))


@llama_alone
def test_the_rank_with_the_least_room_decides(
    both: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for more in (0, -1, 1):
        here = partial(lambda more, *a, **k: fitting_blocks(*a, **k) + more, more)
        monkeypatch.setattr(assemble, "fitting_blocks", here)
        counts.append(engine(both[1], Log(), blocks=None).scheduler.memory.total)
    assert counts == [counts[0], counts[0] - 1, counts[0]]


@llama_alone
def test_an_interrupt_leaves_the_ranks_together(both: list[LoadedModel]) -> None:
    one, two = (engine(model, Log()) for model in both)
    move = two.runner.mover.move

    def interrupted(*moves: Any) -> Any:
        signal.raise_signal(
            signal.SIGINT
        )  # the other gets the request, and this has computed nothing yet
        return move(*moves)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two.runner.mover, "move", interrupted)
        two.add_request("a", [5, 6, 7], GREEDY)
        with pytest.raises(KeyboardInterrupt):
            two.step()
    assert not two.has_unfinished_requests()
    wanted, found = served(one, GREEDY), served(two, GREEDY)
    for i in range(PROMPTS):
        assert found[i].outputs[0].token_ids == wanted[i].outputs[0].token_ids

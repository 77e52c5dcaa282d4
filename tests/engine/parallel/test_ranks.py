"""Ranks with half of a model each: the plans and tokens of one, graphs, and how they end."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from pagedsim.backends.engine import ModelCache
from pagedsim.core import ConfigError, Request, SamplingParams, Scheduler, StepPlan
from pagedsim.engine import assemble
from pagedsim.engine import runner as runner_module
from pagedsim.engine.assemble import loaded
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.engine_args import Arguments
from pagedsim.engine.host_copies import HostCopies
from pagedsim.engine.llm import LLM
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.parallel import ranks as ranks_module
from pagedsim.engine.parallel.ranks import RankError
from pagedsim.engine.profile import fitting_blocks
from pagedsim.metrics.plans import described
from tests.engine.architectures import CONFIGS, SHAPE, reference
from tests.engine.parallel.together import OneProcess, groups, shards
from tests.engine.test_cache_memory import Never, SlowBus
from tests.engine.test_equality import (
    BLOCK,
    BLOCKS,
    GREEDY,
    LONGEST,
    PROMPTS,
    TOKENS,
    served,
    tokens,
    total,
)
from tests.engine.test_graphs import SHAPES, SIZES, TOKENS_AT_ONCE, Replayer

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=TOKENS, seed=5)
BEAMS = SamplingParams(temperature=0, max_tokens=6, n=2, best_of=3, beam_search=True)


class Log:
    """The plans of an engine, in words."""

    def __init__(self) -> None:
        self.plans: list[str] = []

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self.plans.append(described(plan, scheduler))

    def left(self, request: Request) -> None: ...


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LoadedModel]]:
    """A model in one process, and the same over two."""
    folder = tmp_path_factory.mktemp("model")
    reference("llama").save_pretrained(folder)
    arguments = [
        Arguments.of(model=str(folder), device="cpu", tensor_parallel=size) for size in (1, 2)
    ]
    models = [loaded(one) for one in arguments]
    yield models
    models[1].close()


SIZED: dict[str, Any] = {
    "device": "cpu", "block_size": BLOCK, "blocks": BLOCKS, "cpu_blocks": BLOCKS,
    "max_model_len": LONGEST + TOKENS, "max_seqs": 4, "max_batched_tokens": 32,
}  # fmt: skip


def engine(model: Any, log: Log | None = None, **settings: Any) -> LLMEngine:
    size = {"tensor_parallel": model.ranks_count if isinstance(model, LoadedModel) else 1}
    return LLMEngine(Arguments.of(model=model, **{**SIZED, **size, **settings}), observer=log)


ALL: dict[str, tuple[dict[str, Any], SamplingParams]] = {
    "swap": (
        {
            **{"batching": "unified", "preemption": "swap", "kv_cache_dtype": "fp8"},
            **{"async_scheduling": True},
        },
        SAMPLED,
    ),
    "recompute": ({"batching": "unified", "preemption": "recompute", "memory": "prefix"}, SAMPLED),
    "cheapest": ({"preemption": "cheapest", "kv_layout": "layer"}, GREEDY),
    "beams": ({"blocks": 3 * BLOCKS, "batching": "unified"}, BEAMS),
}


@pytest.mark.parametrize("name", ALL)
def test_tokens_and_plans(both: list[LoadedModel], name: str) -> None:
    settings, params = ALL[name]
    logs, found = (Log(), Log()), []
    for model, log in zip(both, logs, strict=True):
        serving = engine(model, log, **settings)
        outputs = served(serving, params)
        found.append([[one.token_ids for one in outputs[i].outputs] for i in range(PROMPTS)])
        if "preemption" in settings:
            assert total(outputs, "preemptions") > 0
        if settings.get("memory") == "prefix":
            assert total(outputs, "cached_tokens") > 0
        serving.close()
    assert found[0] == found[1]
    if settings.get("preemption") != "cheapest":  # whose prices are measured
        assert logs[0].plans == logs[1].plans


def test_each_has_its_part(both: list[LoadedModel]) -> None:
    one, two = both
    assert two.num_kv_heads == one.num_kv_heads // 2
    assert two.vocab_size == one.vocab_size
    blocks = [engine(model).runner.cache.shape.block_bytes for model in both]
    assert blocks[1] * 2 == blocks[0]
    with pytest.raises(ConfigError, match="tensor_parallel=1: was loaded for 2"):
        LLMEngine(Arguments.of(model=two, device="cpu"))


def test_the_rank_with_the_least_room_decides(
    both: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for more in (0, -1, 1):
        here = partial(lambda more, *a, **k: fitting_blocks(*a, **k) + more, more)
        monkeypatch.setattr(assemble, "fitting_blocks", here)
        counts.append(engine(both[1], blocks=None).scheduler.memory.total)
    assert counts == [counts[0], counts[0] - 1, counts[0]]


def test_an_interrupt_leaves_the_ranks_together(both: list[LoadedModel]) -> None:
    one, two = (engine(model) for model in both)
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
    assert tokens(served(two)) == tokens(served(one))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("late", ["here", "there"])
def test_a_rank_waits_for_its_own_copies(late: str, ahead: bool) -> None:
    """Rank 0 tells which have ended, and another may have them still before it."""
    config, loaded = CONFIGS["qwen3"](), 0
    with groups(2) as made:
        there = OneProcess(config, made)
        settings: dict[str, Any] = {
            **{"batching": "unified", "cpu_blocks": 0, "async_scheduling": ahead},
            **{"memory": "prefix", "offload": {"chunks": 30, "prompt_only": False}},
        }
        alone, split = engine(config), engine(there.model, **settings, tensor_parallel=2)
        wanted = tokens(served(alone))
        runner = split.runner if late == "here" else there.worker.runner
        assert runner is not None
        rng = random.Random(3) if late == "here" else Never()  # until it is waited for
        buses = SlowBus(rng), SlowBus(rng)
        runner.copies = HostCopies(runner.cache, buses=buses)
        for _ in range(3):
            outputs = served(split)
            assert tokens(outputs) == wanted
            loaded += total(outputs, "cached_tokens")
        assert loaded > 0 and (late == "here" or sum(bus.held for bus in buses) > 5)
        split.close()
        there.close()


# Graphs: without a GPU what is replayed is the work itself, and the other rank is a thread


def test_ranks_replay_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["qwen3"]()
    settings: dict[str, Any] = {"max_seqs": SIZES[-1], "preemption": "swap"}
    settings["max_batched_tokens"] = TOKENS_AT_ONCE
    alone = tokens(served(engine(config, **settings)))
    recorders: dict[int, Replayer] = {}

    def recorder_of(device: torch.device) -> Replayer:
        return recorders.setdefault(len(recorders), Replayer())

    monkeypatch.setattr(runner_module, "recorder_of", recorder_of)
    with groups(2) as made:
        there = OneProcess(config, made)
        split = engine(there.model, **settings, async_scheduling=True, tensor_parallel=2)
        assert tokens(served(split)) == alone
        split.close()
        there.close()
    one, other = recorders.values()
    assert one.recorded == other.recorded == len(SHAPES) + len(SIZES)
    assert one.replayed == other.replayed and len(set(one.replayed)) > 1


def test_a_rank_without_graphs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "recorder_of", lambda device: Replayer(waits_at=0))
    with groups(1) as made:
        (model,) = shards(CONFIGS["llama"](), made)
        with pytest.raises(ConfigError, match="give enforce_eager=True"):
            engine(model)


# Ranks live as long as their engine, and a failed rank is named in the error


SMALL: dict[str, Any] = {
    "device": "cpu",
    "tensor_parallel": 2,
    "blocks": 8,
    "max_model_len": 32,
}


def pids(model: LoadedModel) -> list[int]:
    assert model.ranks is not None
    return [member.process.pid for member in model.ranks._monitor.members]


def there(pid: int) -> bool:
    """Whether it runs; an ended but unreaped one does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_a_study_goes_on_with_others() -> None:
    keeper, arguments = ModelCache(), Arguments.of(model=LlamaConfig(**SHAPE), **SMALL)
    for what, line in ((killed, "rank 1 of 2 died of SIGKILL"), (failing, "rank 1: AssertionErr")):
        kept = keeper.model(arguments)
        engine = LLMEngine(Arguments.of(model=kept, **SMALL))
        served_one(engine)
        engine.close()
        assert there(pids(kept)[0])  # for the next engine
        assert keeper.model(arguments) is kept
        engine = LLMEngine(Arguments.of(model=kept, **SMALL))
        what(kept)
        for _ in range(2):
            with pytest.raises(RankError) as caught:
                served_one(engine)
            assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
            assert not engine.has_unfinished_requests()
        engine.close()
        assert not there(pids(kept)[0])


def served_one(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request("a", [1, 2, 3], params)
    while engine.has_unfinished_requests():
        engine.step()


def killed(model: LoadedModel) -> None:
    os.kill(pids(model)[0], signal.SIGKILL)


def failing(model: LoadedModel) -> None:
    assert model.ranks is not None
    with model.ranks.together("drop"):  # it has nothing to run any more
        pass
    model.ranks.replies()


@pytest.mark.slow
def test_ranks_end_with_the_engine_or_a_step_that_fails_here() -> None:
    llm = LLM("tiny", device="cpu", tensor_parallel_size=2, num_gpu_blocks=8, max_model_len=32)
    (pid,) = pids(llm.engine.model)
    assert there(pid)
    del llm
    gc.collect()
    assert not there(pid)
    engine = LLMEngine(model="tiny", **SMALL)
    (pid,) = pids(engine.model)
    engine.runner.mover = None  # type: ignore[assignment]
    with pytest.raises(RankError, match="rank 0: AttributeError: "):
        served_one(engine)
    assert not there(pid)


SCRIPT = """
import os, signal, torch
from pagedsim.engine.llm import LLM
from pagedsim.engine.models import LoadedModel

torch.set_num_threads(1)
llm = LLM("tiny", device="cpu", tensor_parallel_size=2, num_gpu_blocks=8, max_model_len=32)
print(*(member.process.pid for member in llm.engine.model.ranks._monitor.members), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""As a user writes it: nothing keeps it from being run again by what it starts."""


@pytest.mark.slow
def test_they_end_with_the_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    (pid,) = map(int, ran.stdout.split())
    until = time.monotonic() + 30
    while there(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not there(pid)


def test_processes_that_do_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "BOOT", "import sys; sys.exit(7)")
    threads = torch.get_num_threads()
    with pytest.raises(RankError, match=r"^rank [123] of 4 ended with exit code 7$"):
        LLMEngine(model="tiny", **{**SMALL, "tensor_parallel": 4})
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel=3: model=tiny with 8 heads and 4 "
         "key-value heads cannot be split so; choose from 1, 2, 4, 8"),
        ({"device": "cuda"}, "tensor_parallel=2: torch finds 1 of the GPUs that it needs"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(
    settings: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settings.get("device") == "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(subprocess, "Popen", None)  # no process is started for it
    with pytest.raises(ConfigError) as caught:
        LLMEngine(**{"model": "tiny", **SMALL, **settings})
    assert str(caught.value) == line

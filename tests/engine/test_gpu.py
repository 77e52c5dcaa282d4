"""The engine on real GPUs: the tokens of the CPU, moves in order, graphs, and no waiting."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedsim.core import ConfigError, SamplingParams
from pagedsim.core.transfers import Direction
from pagedsim.engine import profile as profile_module
from pagedsim.engine.cache import Cache, CacheShape, Mover
from pagedsim.engine.engine import InflightStep, LLMEngine, SamplingJob
from pagedsim.engine.graphs import Graphs, recorder_of
from pagedsim.engine.host_copies import HostCopies
from pagedsim.engine.inputs import DecodeInputs, Shape
from pagedsim.engine.models import load_model
from pagedsim.engine.models.weights import fill_tiny, tiny_config
from pagedsim.engine.parallel.ranks import RankError
from pagedsim.engine.profile import graph_bytes
from pagedsim.engine.sampler import Row, Rows, Sampler, stream_key
from pagedsim.engine.step_inputs import HostCopy, HostWork
from pagedsim.kernels.float8 import FORMATS
from tests.engine import test_equality
from tests.engine.architectures import fresh
from tests.engine.test_graphs import SEQS, SIZES

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROOT = Path(__file__).parents[2]
SCARCE: dict[str, Any] = {"blocks": 40, "cpu_blocks": 60}
"""Blocks of four tokens, too few for ten requests: some are preempted."""
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def on_gpu(test: Any) -> Any:
    for mark in GPU:
        test = mark(test)
    return test


def made(device: str = "cuda", **settings: Any) -> LLMEngine:
    """The tiny model; its logits in float32 leave no ties."""
    given = {"block_size": 4, "max_model_len": 96, "dtype": "float32", "blocks": 400}
    return LLMEngine(model="tiny", device=device, **{**given, **settings})


def served(engine: LLMEngine, params: list[SamplingParams]) -> list[Any]:
    """The outputs of ten prompts."""
    rng, found, preempted = random.Random(3), {}, 0
    for number in range(10):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        engine.add_request(number, prompt, params[number % len(params)])
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = output
        preempted += sum(r.preemptions for r in engine.scheduler.requests.values())
    assert bool(preempted) is (engine.scheduler.memory.total == SCARCE["blocks"])
    engine.close()
    return [found[number] for number in range(10)]


def answers(device: str, params: list[SamplingParams] | None = None, **settings: Any) -> list[Any]:
    outputs = served(made(device, **settings), params or [GREEDY])
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return answers("cpu")


@on_gpu
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_tokens_are_those_of_the_cpu(ahead: bool, wanted: list[list[int]]) -> None:
    for memory, preemption, batching in product(
        ("paged", "prefix"), ("recompute", "swap", "cheapest"), ("prefill_first", "unified")
    ):
        settings = {"memory": memory, "preemption": preemption, "batching": batching}
        engine = made(async_scheduling=ahead, **SCARCE, **settings)
        found = [list(one.outputs[0].token_ids) for one in served(engine, [GREEDY])]
        assert found == wanted, settings
        assert engine.runner.launched["graph"] and not engine.runner.launched["eager"]


@on_gpu
@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_drawn_tokens_are_the_same_with_swaps_and_a_step_ahead(batching: str) -> None:
    drawn = [
        SamplingParams(temperature=0.8, top_p=0.9, max_tokens=24, ignore_eos=True),
        SamplingParams(
            temperature=1.2, top_k=20, min_p=0.01, max_tokens=24, ignore_eos=True, seed=4
        ),
        GREEDY,
    ]
    settings = {"batching": batching, "preemption": "swap", "async_scheduling": True}
    assert answers("cuda", drawn, **SCARCE, **settings) == answers("cpu", drawn)


@on_gpu
def test_any_forward_pass_and_block_size(wanted: list[list[int]]) -> None:
    for model_impl in ("native", "transformers"):
        assert answers("cuda", model_impl=model_impl) == wanted, model_impl
    for size in (1, 8, 16, 32, 128):
        assert answers("cuda", block_size=size, blocks=1600 // size + 8) == wanted, size


@on_gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_host_never_waits_while_it_launches(
    preemption: str, enforce_eager: bool, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever makes it wait for the GPU is an error, but for waiting for the tokens."""
    launch = InflightStep.launch

    def watched(self: InflightStep, sampler: Sampler) -> None:
        with no_waiting():
            launch(self, sampler)

    monkeypatch.setattr(InflightStep, "launch", watched)
    settings: dict[str, Any] = {"preemption": preemption, "enforce_eager": enforce_eager}
    settings |= {"batching": "unified", "async_scheduling": True}
    assert answers("cuda", **SCARCE, **settings) == wanted


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_8_bits_of_keys_and_values(name: str, model_impl: str) -> None:
    """A key at the edge of two numbers may round to the other one, and move a token: not many."""
    settings: dict[str, Any] = {"kv_cache_dtype": name, "model_impl": model_impl}
    here, found = (answers(device, **settings) for device in ("cpu", "cuda"))
    assert sum(one == other for one, other in zip(here, found, strict=True)) >= 8
    swapped = answers("cuda", **settings, **SCARCE, preemption="swap")
    assert sum(one == other for one, other in zip(found, swapped, strict=True)) >= 8
    half: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": name, "preemption": "swap"}
    assert [len(tokens) for tokens in answers("cuda", **SCARCE, **half)] == [24] * 10


# Logits of half precision, whose bounds are rehearsed on a CPU

BOUND = {"bfloat16": 0.03, "float16": 0.003}
"""The most by which a logit may differ from the reference, as a share of the largest: 2.5 times
what the arithmetic of a CPU leaves (`python -m tests.engine.test_gpu` prints it)."""


@pytest.mark.parametrize(
    ("device", "preemption"),
    [("cpu", "swap"), *(pytest.param("cuda", way, marks=GPU) for way in ("recompute", "swap"))],
)
@pytest.mark.parametrize("dtype", BOUND)
def test_logits_of_half_precision_are_near_those_of_float32(
    device: str, preemption: str, dtype: str
) -> None:
    assert distance(device, dtype, preemption) <= BOUND[dtype]


def distance(device: str, dtype: str, preemption: str) -> float:
    """How far the logits of any token are from those of transformers' model in float32, over the
    same tokens and the same rounded weights, as a share of the largest."""
    rows: dict[Any, list[torch.Tensor]] = {}
    draw = SamplingJob.draw

    def noted(job: SamplingJob, logits: torch.Tensor, *rest: Any) -> None:
        for (request, _), row in zip(job._batch.samplers, logits.float().cpu(), strict=True):
            rows.setdefault(request.id, []).append(row.clone())
        draw(job, logits, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplingJob, "draw", noted)
        found = served(made(device, dtype=dtype, **SCARCE, preemption=preemption), [GREEDY])
    model: Any = AutoModelForCausalLM.from_config(tiny_config(), attn_implementation="eager")
    fill_tiny(model)
    for weight in model.eval().parameters():
        weight.data = weight.data.to(getattr(torch, dtype)).float()
    worst = 0.0
    for number, output in enumerate(found):
        prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert len(wanted) == len(tokens) == len(rows[number])
        away = (torch.stack(rows[number]) - wanted).abs().max() / wanted.abs().max()
        worst = max(worst, float(away))
    return worst


# Memory


@on_gpu
def test_no_move_overtakes_writes_or_reads() -> None:
    """Blocks are written late, swapped out at once, written over at once, swapped in elsewhere."""
    shape = CacheShape(layers=4, block_size=16, kv_heads=4, head_dim=64, dtype=torch.bfloat16)
    blocks = 64
    cache = Cache(shape, blocks, blocks, torch.device("cuda"))
    mover, rng = Mover(cache), random.Random(0)
    matrix = torch.rand(4096, 4096, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    turns = []
    for _ in range(300):
        order, places = rng.sample(range(blocks), blocks), rng.sample(range(blocks), 24)
        out, back = order[:24], order[24:48]
        # Made here: a list as an index would be waited for, and nothing would overtake anything.
        turns.append((out, back, places, torch.tensor([out, back], device="cuda")))
    numbers = torch.arange(24, device="cuda")
    with no_waiting():
        for turn, (out, back, places, (here, there)) in enumerate(turns, 1):
            late = (matrix @ matrix).sum() * 0  # keeps the computation's stream busy
            values = (numbers + turn % 100 + late).to(shape.dtype).view(24, 1, 1, 1, 1, 1)
            cache.gpu.index_copy_(0, here, values.expand(24, *shape.block))
            mover.move(plan(swap_out=list(zip(out, places, strict=True))))
            cache.gpu.index_fill_(0, here, -1.0)  # as the next step would, into free blocks
            mover.move(plan(swap_in=list(zip(places, back, strict=True))))
            found = cache.gpu.index_select(0, there)
            wrong += (found != values).sum()
    assert wrong.item() == 0


@on_gpu
def test_no_copy_of_the_host_tier_overtakes_writes_or_reads() -> None:
    """Blocks are written late, stored, written over once that is flushed, and loaded elsewhere."""
    shape = CacheShape(layers=4, block_size=16, kv_heads=4, head_dim=64, dtype=torch.bfloat16)
    blocks, turns = 64, 300
    cache = Cache(shape, blocks, blocks, torch.device("cuda"))
    copies, rng = HostCopies(cache), random.Random(0)
    matrix = torch.rand(4096, 4096, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    numbers = torch.arange(24, device="cuda")
    for turn in range(turns):
        order, places = rng.sample(range(blocks), blocks), rng.sample(range(blocks), 24)
        out, back = order[:24], order[24:48]
        here, there = torch.tensor([out, back], device="cuda")
        store = HostCopy(2 * turn, Direction.STORE, tuple(zip(out, places, strict=True)))
        load = HostCopy(2 * turn + 1, Direction.LOAD, tuple(zip(places, back, strict=True)))
        late = (matrix @ matrix).sum() * 0  # keeps the computation's stream busy
        values = (numbers + turn % 100 + late).to(shape.dtype).view(24, 1, 1, 1, 1, 1)
        cache.gpu.index_copy_(0, here, values.expand(24, *shape.block))
        copies.after(HostWork([store], [], []))
        copies.before(HostWork([], [store.job], []))
        cache.gpu.index_fill_(0, here, -1.0)
        copies.before(HostWork([load], [load.job], []))
        wrong += (cache.gpu.index_select(0, there) != values).sum()
    assert wrong.item() == 0
    ended = copies.ended()
    assert [one.job for one in ended] == [*range(0, 2 * turns, 2), *range(1, 2 * turns, 2)]
    assert all(one.seconds > 0 and one.bytes == 24 * shape.block_bytes for one in ended)


@on_gpu
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_tokens_with_a_host_tier(ahead: bool, wanted: list[list[int]]) -> None:
    settings: dict[str, Any] = {"batching": "unified", "blocks": SCARCE["blocks"]}
    for memory, sync in product(("paged", "prefix"), (0, 64)):
        offload = {"chunks": 200, "prompt_only": False, "sync_tokens": sync}
        engine = made(async_scheduling=ahead, memory=memory, offload=offload, **settings)
        assert engine.runner.cache.cpu.is_pinned()
        found = [list(one.outputs[0].token_ids) for one in served(engine, [GREEDY])]
        assert found == wanted, (memory, sync)


def plan(**moves: list[tuple[int, int]]) -> Any:
    return SimpleNamespace(**{"swap_out": [], "swap_in": [], "copies": {}, **moves})


CHECKER = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
CHECKED = """
from pagedsim.core import SamplingParams
from pagedsim.engine.llm import LLM
llm = LLM("tiny", device="cuda", block_size=4, max_model_len=96, enforce_eager=True)
params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=4, seed=1, ignore_eos=True)
print(len(llm.generate([[5] * 7, [6] * 40], params, use_tqdm=False)))
"""


@on_gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")
def test_no_kernel_reads_or_writes_beside_its_memory() -> None:
    """In a process of its own, where every tensor is an allocation of CUDA's own."""
    ended = subprocess.run(
        [*CHECKER, sys.executable, "-c", CHECKED],
        cwd=ROOT,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    if "Device not supported" in ended.stdout + ended.stderr:
        pytest.skip("compute-sanitizer does not take this device")
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


# Drawing


DRAWN = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(top_k=50),
    "large top_k": SamplingParams(top_k=5000),
    "top_p": SamplingParams(top_p=0.9),
    "large top_p": SamplingParams(temperature=2, top_p=0.9999999),
    "min_p": SamplingParams(min_p=0.05),
    "all": SamplingParams(temperature=0.8, top_k=900, top_p=0.95, min_p=0.001, logprobs=5),
    "logprobs": SamplingParams(temperature=0, logprobs=3),
    "own logprob": SamplingParams(logprobs=0),
    "best_of": SamplingParams(n=1, best_of=3),
}


@on_gpu
@pytest.mark.parametrize("vocab", [1000, 50257, 128256])
def test_no_draw_synchronises(vocab: int) -> None:
    """Alone, and all in one batch; also where tokens are forbidden."""
    for names in (*([name] for name in DRAWN), [*DRAWN]):
        check_draws(names, vocab)


def check_draws(names: list[str], vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3 * len(names), vocab, generator=generator) * 3
    rows = [
        Row(DRAWN[name], stream_key(number), number, [], [], forbidden)
        for number, name in enumerate(names)
        for forbidden in ((), (), (0, 7, vocab - 1))
    ]
    there = logits.cuda()
    sampler = Sampler()
    with no_waiting():
        draws = [
            sampler.draw(there, Rows.of(rows)) for _ in range(2)
        ]  # with new columns, and with these
    wanted, _ = Sampler().sample(logits, rows)
    for draw in draws:
        assert draw.results()[0] == wanted, names


# Graphs


def on(device: str, **settings: Any) -> LLMEngine:
    small = {"max_model_len": test_equality.LONGEST + test_equality.TOKENS, "max_seqs": SEQS}
    blocks = dict.fromkeys(("blocks", "cpu_blocks"), test_equality.BLOCKS)
    given = {"model": "tiny", "block_size": 4, "dtype": "float32", **small, **blocks}
    return LLMEngine(device=device, **{**given, **settings})


def tokens(engine: LLMEngine) -> list[list[int]]:
    return test_equality.tokens(test_equality.served(engine))


@on_gpu
@pytest.mark.parametrize(
    ("name", "preemption"),
    [("mixtral", "recompute"), ("qwen3-moe", "swap"), ("deepseek-v3", "recompute")],
)
def test_graphs_of_experts_give_the_tokens_of_the_cpu(name: str, preemption: str) -> None:
    engine = on("cuda", model=fresh(name), preemption=preemption)
    graphs = engine.runner.graphs
    assert engine.model.native is not None and graphs is not None and graphs.sizes == SIZES
    assert tokens(engine) == tokens(on("cpu", model=fresh(name), preemption=preemption))


@on_gpu
@pytest.mark.parametrize("what", ["waits", "is_refused"])
def test_what_cannot_be_captured(what: str) -> None:
    """In a process of its own: one in which a capture has failed is of no use to others."""
    code = f"from tests.engine import test_gpu; test_gpu.{what}()"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr


def waits() -> None:
    """A model that reads what it computes serves without graphs, and nothing has failed."""
    wanted = tokens(on("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphs, "_compute", _then(lambda logits: logits.sum().item()))
        engine = on("cuda")
    assert engine.runner.graphs is None
    torch.cuda.empty_cache()  # would fail after a capture that did
    assert tokens(engine) == wanted


def is_refused() -> None:
    """An error that shows only during the capture ends the start with one line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphs, "_compute", _then(lambda logits: torch.cuda.synchronize()))
        with pytest.raises(ConfigError, match="give enforce_eager=True"):
            on("cuda")


def _then(more: Callable[[torch.Tensor], object]) -> Callable[[Graphs, int | Shape], None]:
    forward = Graphs._compute

    def both(graphs: Graphs, key: int | Shape) -> None:
        forward(graphs, key)
        more(graphs._logits)

    return both


@on_gpu
def test_the_memory_of_graphs_is_foreseen() -> None:
    device = torch.device("cuda")
    tiny = load_model("tiny", device=device)
    shape = CacheShape(tiny.num_layers, 16, tiny.num_kv_heads, tiny.head_dim, tiny.dtype)
    free = partial(profile_module._free, device)
    recorder = recorder_of(device)
    assert recorder is not None

    def blank() -> Graphs:
        places = DecodeInputs(device, 256, 64)
        return Graphs(tiny, shape.blank(1, device), places, 256, 1024, recorder)

    for _ in range(2):  # at first kernels are loaded
        foreseen = graph_bytes(blank(), free)
    before = free()
    graphs = blank()
    assert graphs.capture_all() and len(graphs.shapes) == 27
    assert graphs.nbytes <= foreseen
    assert before - free() <= foreseen + graphs._places.nbytes + 2**26


# Two GPUs


def on_two(test: Any) -> Any:
    return pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices")(
        on_gpu(test)
    )


@on_two
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_tokens_of_two_are_those_of_one(enforce_eager: bool, wanted: list[list[int]]) -> None:
    for preemption, ahead in product(("recompute", "swap", "cheapest"), (False, True)):
        engine = made(
            preemption=preemption, async_scheduling=ahead, enforce_eager=enforce_eager,
            tensor_parallel=2, **SCARCE,
        )  # fmt: skip
        assert (engine.runner.graphs is None) is enforce_eager
        found = [list(output.outputs[0].token_ids) for output in served(engine, [GREEDY])]
        assert found == wanted, (preemption, ahead)


@on_two
def test_a_dead_rank_leaves_no_rank_waiting() -> None:
    engine = made(tensor_parallel=2, **SCARCE)
    assert engine.model.ranks is not None
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    os.kill(engine.model.ranks._monitor.members[0].process.pid, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 of 2 died of SIGKILL"):
        while engine.has_unfinished_requests():
            engine.step()


if __name__ == "__main__":
    for name in BOUND:
        for way in ("recompute", "swap"):
            print(name, way, f"{distance('cpu', name, way):.4f}")

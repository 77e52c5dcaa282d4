"""CUDA graphs: without a GPU, what is replayed is the work itself, over the same memory."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedsim.core import ConfigError, SamplingParams
from pagedsim.engine import graphs as graphs_module
from pagedsim.engine import profile as profile_module
from pagedsim.engine import runner as runner_module
from pagedsim.engine.cache import CacheShape
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.graphs import CudaRecorder, Graphs, Unrecordable, recorder_of, sizes
from pagedsim.engine.inputs import Places
from pagedsim.engine.models import load_model
from pagedsim.engine.profile import graph_bytes
from tests.engine.test_equality import BLOCK, BLOCKS, LONGEST, PROMPTS, TOKENS, model, served

CPU = torch.device("cpu")
SEQS = 6
SIZES = [1, 2, 4, 6]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=TOKENS, seed=5)
ENDLESS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)

Work = Callable[[], None]


class Replayer:
    """Records work as a GPU does: what it was given as numbers stays, what is in tensors is read.

    `replayed` are the places of the recorded work, in the order of its replays.
    """

    def __init__(self, fails_at: int | None = None, waits_at: int | None = None) -> None:
        self.recorded = 0
        self.replayed: list[int] = []
        self.fails_at, self.waits_at = fails_at, waits_at

    def record(self, work: Work) -> Work:
        if self.recorded == self.waits_at:
            raise Unrecordable("called a synchronizing CUDA operation\nException raised from")
        if self.recorded == self.fails_at:
            try:
                raise RuntimeError("operation not permitted when capturing\nCUDA kernel ...")
            finally:
                raise RuntimeError("a previous error during capture")
        number, self.recorded = self.recorded, self.recorded + 1
        work()

        def replay() -> None:
            self.replayed.append(number)
            work()

        return replay


@pytest.fixture
def replayer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replayer]:
    one = Replayer()
    monkeypatch.setattr(runner_module, "recorder_of", lambda device: one)
    yield one


def server(name: str, **settings: Any) -> LLMEngine:
    given = {
        "block_size": BLOCK, "blocks": BLOCKS, "cpu_blocks": BLOCKS,
        "max_model_len": LONGEST + TOKENS, "max_seqs": SEQS, "max_batched_tokens": 32,
    }  # fmt: skip
    return LLMEngine(model=deepcopy(model(name)), device="cpu", **{**given, **settings})


def tokens(engine: LLMEngine, params: SamplingParams | None = None) -> list[Any]:
    outputs = served(engine, params) if params else served(engine)
    assert engine.scheduler.memory.free == engine.scheduler.memory.total
    return [[one.token_ids for one in outputs[i].outputs] for i in range(PROMPTS)]


def test_sizes_are_few_and_end_with_the_most() -> None:
    for most in range(1, 600):
        found = sizes(most)
        assert found == sorted(set(found))
        assert found[0] == 1 and found[-1] == min(most, graphs_module.LARGEST)
        for count in range(1, found[-1] + 1):
            padding = min(size for size in found if size >= count) - count
            assert padding < max(8, count / 4)
    assert sizes(256) == [
        *(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128),
        *(160, 192, 224, 256),
    ]


WAYS = [*product(("recompute", "swap"), ("prefill_first", "unified"), ("paged", "prefix"))]
MODELS = [("qwen3", "native"), ("mistral", "native"), ("qwen3", "transformers"), ("gpt2", "auto")]
MODELS += [("qwen3_moe", "native"), ("deepseek_v3", "native")]
EVERY = [
    pytest.param(*model, *way, marks=() if quick else pytest.mark.slow)
    for (number, model), (which, way) in product(enumerate(MODELS), enumerate(WAYS))
    for quick in [not number or which in (number, len(WAYS) - number)]
]
"""Every model goes every way; one of them all quickly, the others two each."""


@pytest.mark.parametrize(("name", "model_impl", "preemption", "batching", "memory"), EVERY)
def test_tokens_are_those_without_graphs(
    name: str, model_impl: str, preemption: str, batching: str, memory: str, replayer: Replayer
) -> None:
    settings = {
        "model_impl": model_impl, "preemption": preemption, "batching": batching, "memory": memory,
    }  # fmt: skip
    eager = tokens(server(name, **settings, enforce_eager=True))
    assert replayer.recorded == 0
    engine = server(name, **settings)
    assert replayer.recorded == len(SIZES)
    assert tokens(engine) == eager
    assert len(set(replayer.replayed)) > 1


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_groups_are_those_without_graphs(
    width: int, beams: bool, preemption: str, replayer: Replayer
) -> None:
    params = SamplingParams(
        n=width, seed=3, temperature=0 if beams else 1, beam_search=beams and width > 1,
        max_tokens=TOKENS,
    )  # fmt: skip
    settings = {"preemption": preemption, "blocks": 3 * BLOCKS}
    eager = tokens(server("llama", **settings, enforce_eager=True), params)
    assert tokens(server("llama", **settings), params) == eager
    assert replayer.replayed


@pytest.mark.parametrize("seed", range(6))
def test_random_runs(seed: int, replayer: Replayer) -> None:
    """Requests of all kinds come and are aborted at random, in an engine of random settings."""
    rng = random.Random(seed)
    settings = {
        "batching": rng.choice(["prefill_first", "unified", "static"]),
        "preemption": rng.choice(["recompute", "swap"]),
        "memory": rng.choice(["paged", "prefix"]),
        "max_seqs": rng.randint(2, 9),
        "model_impl": rng.choice(["native", "transformers"]),
        "max_batched_tokens": rng.randint(33, 60),
    }
    runs = [
        random_run(server("qwen3", **settings, enforce_eager=eager), random.Random(seed))
        for eager in (True, False)
    ]
    assert runs[0] == runs[1]
    assert replayer.replayed


def random_run(engine: LLMEngine, rng: random.Random) -> dict[int, Any]:
    found = {}
    alive: list[int] = []
    for number in range(200):
        if number < 40 and rng.random() < 0.7:
            prompt = [rng.randrange(3, 97) for _ in range(rng.randint(1, LONGEST))]
            params = SamplingParams(
                temperature=rng.choice([0, 1]), n=1, max_tokens=rng.randint(1, TOKENS),
                seed=number, ignore_eos=rng.random() < 0.5,
            )  # fmt: skip
            engine.add_request(number, prompt, params)
            alive.append(number)
        if alive and rng.random() < 0.05:
            victim = alive.pop(rng.randrange(len(alive)))
            found[victim] = engine.abort_request(victim).outputs[0].token_ids
        for output in engine.step():
            found[int(output.request_id)] = output.outputs[0].token_ids
            alive.remove(int(output.request_id))
        engine.scheduler.check()
    assert not alive
    return found


def test_chunks_and_larger_batches_are_launched_anew(
    replayer: Replayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs_module, "LARGEST", 2)
    engine = server("llama", blocks=6 * BLOCKS)
    replays: list[int] = []
    for count in (1, 2, 3, 5):
        for number in range(count):
            engine.add_request(f"{number} of {count}", [3, 4, 5], ENDLESS)
        engine.step()
        before = len(replayer.replayed)
        assert before == sum(replays)  # a prefill
        for _ in range(3):
            engine.step()
        replays.append(len(replayer.replayed) - before)
        for request in list(engine.scheduler.requests):
            engine.abort_request(request)
    assert replays == [3, 3, 0, 0]
    assert replayer.replayed == [1, 1, 1, 0, 0, 0]  # the larger of both was recorded first
    monkeypatch.undo()
    assert tokens(engine) == tokens(server("llama", blocks=6 * BLOCKS))


@pytest.mark.parametrize("waits_at", [0, 2])
def test_a_model_that_waits_for_the_gpu_serves_without(
    waits_at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replayer = Replayer(waits_at=waits_at)
    monkeypatch.setattr(runner_module, "recorder_of", lambda device: replayer)
    with caplog.at_level(logging.WARNING, graphs_module.__name__):
        engine = server("llama")
        found = tokens(engine)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].endswith("kernel by kernel: called a synchronizing CUDA operation")
    assert not replayer.replayed and engine.runner.graphs is None
    assert found == tokens(server("llama", enforce_eager=True))


@pytest.mark.parametrize("fails_at", [0, 2])
def test_no_request_is_served_after_a_failed_capture(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "recorder_of", lambda device: Replayer(fails_at))
    with pytest.raises(ConfigError) as caught:
        server("llama")
    size = SIZES[::-1][fails_at]
    assert str(caught.value).endswith(
        f"for {size} sequences cannot be captured in a CUDA graph: "
        "operation not permitted when capturing; give enforce_eager=True"
    )


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_every_replay_reads_and_writes_the_same_memory(
    model_impl: str, replayer: Replayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = server("qwen3", model_impl=model_impl, blocks=6 * BLOCKS)
    assert engine.runner.graphs is not None
    seen: dict[int, set[Any]] = {}
    forward = type(engine.model).forward

    def spied(model: Any, ids: Any, positions: Any, batch: Any, *rest: Any) -> Any:
        if not batch.chunks:
            tensors = (
                *(ids, positions, batch.block_tables, batch.query_start, batch.context_lens),
                *(batch.rows, batch.slots, *rest),
            )
            places = tuple((one.data_ptr(), one.shape, one.stride()) for one in tensors)
            seen.setdefault(len(ids), set()).add((places, batch.num_decodes))
        return forward(model, ids, positions, batch, *rest)

    monkeypatch.setattr(type(engine.model), "forward", spied)
    with torch.inference_mode():
        assert engine.runner.graphs.capture_all()  # once more, now seen
    tokens(engine)
    tokens(engine)
    assert {count: len(kinds) for count, kinds in seen.items()} == dict.fromkeys(SIZES, 1)
    assert len(replayer.replayed) > 20


def test_padding_writes_nothing_and_reads_no_garbage(replayer: Replayer) -> None:
    """Five sequences in a graph of six: nothing but their own slots changes."""
    engines = [server("llama", blocks=6 * BLOCKS, enforce_eager=eager) for eager in (True, False)]
    for engine in engines:
        engine.runner.cache.gpu.fill_(torch.nan)
        for number in range(SEQS):
            engine.add_request(number, [3 + number, 4, 5, 6, 7], ENDLESS)
        for _ in range(3):
            engine.step()
        engine.abort_request(2)  # its row was in use, and is padding now
        engine.step()
    eager, graphed = (engine.runner.cache.gpu for engine in engines)
    assert torch.equal(eager.isnan(), graphed.isnan())
    assert torch.allclose(eager.nan_to_num(), graphed.nan_to_num(), atol=1e-5)
    assert replayer.replayed == [0, 0, 0]
    outputs = [engine.scheduler.requests[5].outputs for engine in engines]
    assert outputs[0] == outputs[1]


def test_memory_of_graphs_is_that_of_the_largest_and_of_the_others() -> None:
    tiny = load_model("tiny", device=CPU)
    shape = CacheShape(tiny.num_layers, BLOCK, tiny.num_kv_heads, tiny.head_dim, tiny.dtype)
    left = iter([1000, 400, 390])
    replayer = Replayer()
    places = Places(CPU, 100, 7)
    taken = partial(graph_bytes, tiny, shape, places, 100, free=lambda: next(left))
    assert len(sizes(100)) == 14
    assert taken(recorder=replayer) == 100 * tiny.vocab_size * 4 + 600 + 13 * 10
    assert replayer.recorded == 2
    left = iter([1000, 400])
    assert taken(recorder=Replayer(waits_at=1)) == 0
    left = iter([1000, 400])
    with pytest.raises(ConfigError, match="give enforce_eager=True"):
        taken(recorder=Replayer(fails_at=1))


class Cuda:
    """The calls of torch.cuda that a capture makes, noted down."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream_now = "main"
        self.mode: int | str = 1

    def get_sync_debug_mode(self) -> int | str:
        return self.mode

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.mode = mode
        self.calls.append(f"waiting: {mode}")
        if mode == "error":  # once in a process
            warnings.warn("Synchronization debug mode is a prototype", stacklevel=1)

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(device=device, name="side", wait_stream=self._waits("side"))

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(name="main", wait_stream=self._waits("main"))

    def current_device(self) -> int:
        return 0

    def graph_pool_handle(self) -> str:
        return "pool"

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.calls.append("replay"))

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream.name
        try:
            yield
        finally:
            self.stream_now = before

    @contextmanager
    def graph(
        self, graph: Any, pool: Any, stream: Any, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """As torch's, which leaves its stream current if the end of the capture fails."""
        self.calls.append(f"capture in {pool} on {stream.name}")
        self.stream_now = stream.name
        try:
            yield
        finally:
            self.calls.append("captured")

    def _waits(self, who: str) -> Callable[[Any], None]:
        return lambda other: self.calls.append(f"{who} waits for {other.name}")


class Garbage:
    """What is called of `gc`."""

    def __init__(self, calls: list[str], enabled: bool = True) -> None:
        self.calls, self.enabled = calls, enabled

    def isenabled(self) -> bool:
        return self.enabled

    def collect(self) -> None:
        self.calls.append("collect")

    def disable(self) -> None:
        self.enabled = False
        self.calls.append("collect no more")

    def enable(self) -> None:
        self.enabled = True
        self.calls.append("collect again")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    one = Cuda()
    monkeypatch.setattr(graphs_module, "torch", SimpleNamespace(cuda=one, device=torch.device))
    monkeypatch.setattr(graphs_module, "gc", Garbage(one.calls))
    graphs_module._stream_of.cache_clear()
    yield one
    graphs_module._stream_of.cache_clear()


RECORDED = [
    "side waits for main",
    *("collect", "collect no more", "work on side"),
    *("waiting: error", "work on side", "waiting: 1"),
    *("capture in pool on side", "work on side", "captured"),
    *("collect again", "main waits for side"),
]


def test_work_is_done_and_watched_before_it_is_captured(cuda: Cuda) -> None:
    recorder = CudaRecorder(torch.device("cuda"))
    replay = recorder.record(lambda: cuda.calls.append(f"work on {cuda.stream_now}"))
    replay()
    assert cuda.calls == [*RECORDED, "replay"]
    assert cuda.mode == 1 and cuda.stream_now == "main"


def test_garbage_is_collected_once_for_all(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = CudaRecorder(torch.device("cuda"))
    with graphs_module.uncollected():
        for _ in range(2):
            recorder.record(lambda: cuda.calls.append(f"work on {cuda.stream_now}"))
    once = [call for call in RECORDED if "collect" not in call]
    assert cuda.calls == ["collect", "collect no more", *once, *once, "collect again"]
    cuda.calls.clear()
    garbage = Garbage(cuda.calls, enabled=False)
    monkeypatch.setattr(graphs_module, "gc", garbage)
    recorder.record(lambda: None)
    assert not garbage.enabled and not any("collect" in call for call in cuda.calls)


@pytest.mark.parametrize(
    ("said", "kind"),
    [("called a synchronizing CUDA operation", Unrecordable), ("no kernel", RuntimeError)],
)
def test_what_waits_is_not_captured(cuda: Cuda, said: str, kind: type[Exception]) -> None:
    def fails_when_watched() -> None:
        if cuda.mode == "error":
            raise RuntimeError(said)

    with pytest.raises(RuntimeError, match=said) as caught:
        CudaRecorder(torch.device("cuda")).record(fails_when_watched)
    assert caught.type is kind
    assert not any("capture" in call for call in cuda.calls)
    assert cuda.mode == 1 and cuda.stream_now == "main"
    assert cuda.calls[-2:] == ["collect again", "main waits for side"]


def test_a_failed_capture_leaves_its_stream(cuda: Cuda) -> None:
    def fails_when_captured() -> None:
        if "capture in pool on side" in cuda.calls:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        CudaRecorder(torch.device("cuda")).record(fails_when_captured)
    assert cuda.stream_now == "main" and cuda.mode == 1
    assert cuda.calls[-2:] == ["collect again", "main waits for side"]


# -- on a GPU ------------------------------------------------------------------------------------


def on_gpu(test: Any) -> Any:
    gone = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.mark.gpu(gone(test))


def on(device: str, **settings: Any) -> LLMEngine:
    given = {
        "model": "tiny", "block_size": 4, "max_model_len": LONGEST + TOKENS, "dtype": "float32",
        "max_seqs": SEQS, "blocks": BLOCKS, "cpu_blocks": BLOCKS,
    }  # fmt: skip
    return LLMEngine(device=device, **{**given, **settings})


@on_gpu
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("memory", ["paged", "prefix"])
@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_graphs_give_the_tokens_of_the_cpu(
    model_impl: str, preemption: str, memory: str, batching: str
) -> None:
    settings = {
        "model_impl": model_impl, "preemption": preemption, "memory": memory, "batching": batching,
    }  # fmt: skip
    engine = on("cuda", **settings)
    graphs = engine.runner.graphs
    assert graphs is not None and graphs.sizes == SIZES
    assert tokens(engine) == tokens(on("cpu", **settings))


@on_gpu
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_graphs_of_experts_give_the_tokens_of_the_cpu(name: str, preemption: str) -> None:
    module = model(name)
    engine = on("cuda", model=deepcopy(module), preemption=preemption)
    assert engine.model.native is not None
    assert engine.runner.graphs is not None
    assert tokens(engine) == tokens(on("cpu", model=deepcopy(module), preemption=preemption))


@on_gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_runs_on_a_gpu(seed: int) -> None:
    runs = [
        random_run(on("cuda", enforce_eager=eager), random.Random(seed)) for eager in (True, False)
    ]
    assert runs[0] == runs[1]


@on_gpu
@pytest.mark.parametrize("what", ["waits", "is_refused"])
def test_what_cannot_be_captured(what: str) -> None:
    """In a process of its own: one in which a capture has failed is of no use to others."""
    code = f"from tests.engine import test_graphs; test_graphs.{what}()"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
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


def _then(more: Callable[[torch.Tensor], object]) -> Callable[[Graphs, int], None]:
    forward = Graphs._compute

    def both(graphs: Graphs, size: int) -> None:
        forward(graphs, size)
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
    for _ in range(2):  # at first kernels are loaded
        foreseen = graph_bytes(tiny, shape, Places(device, 256, 64), 256, recorder, free)
    before = free()
    places = Places(device, 256, 64)
    graphs = Graphs(tiny, tiny.new_cache(1, 16), places, 256, recorder)
    assert graphs.capture_all()
    assert graphs.nbytes <= foreseen
    assert before - free() <= foreseen + places.nbytes + 2**26

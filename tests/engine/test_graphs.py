"""CUDA graphs: without a GPU, what is replayed is the work itself, over the same memory."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedsim.core import ConfigError, SamplingParams
from pagedsim.engine import assemble
from pagedsim.engine import graphs as graphs_module
from pagedsim.engine import runner as runner_module
from pagedsim.engine.cache import CacheShape
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.graphs import CudaRecorder, Graphs, Unrecordable, shapes, sizes
from pagedsim.engine.inputs import DecodeInputs, PromptInputs
from pagedsim.engine.models import load_model
from pagedsim.engine.profile import graph_bytes
from tests.engine.test_equality import (
    BLOCK,
    BLOCKS,
    PROMPTS,
    TOKENS,
    served,
    small,
    tokens,
    wanted,
)
from tests.kernels import other_packages

CPU = torch.device("cpu")
SEQS = 6
SIZES = [1, 2, 4, 6]
TOKENS_AT_ONCE = 32
SHAPES = [(16, 6), (32, 6)]
"""Of steps with prompts, which are recorded first, the largest before all."""
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


def server(name: str, model_impl: str = "auto", **settings: Any) -> LLMEngine:
    given = {"max_seqs": SEQS, "max_batched_tokens": TOKENS_AT_ONCE}
    return small(name, model_impl, **{**given, **settings})


@pytest.mark.parametrize(
    ("name", "model_impl", "preemption", "batching", "memory"),
    [
        ("qwen3", "native", "recompute", "unified", "prefix"),
        ("mistral", "native", "recompute", "unified", "paged"),
        ("qwen3", "transformers", "swap", "prefill_first", "paged"),
        ("gpt2", "auto", "recompute", "prefill_first", "prefix"),
        ("qwen3-moe", "native", "swap", "unified", "prefix"),
        ("deepseek-v3", "native", "recompute", "prefill_first", "paged"),
    ],
)
def test_tokens_are_those_without_graphs(
    name: str, model_impl: str, preemption: str, batching: str, memory: str, replayer: Replayer
) -> None:
    engine = server(name, model_impl, preemption=preemption, batching=batching, memory=memory)
    assert replayer.recorded == len(SHAPES) + len(SIZES)
    assert tokens(served(engine)) == wanted(name)
    with_prompts = [number for number in replayer.replayed if number < len(SHAPES)]
    assert len(set(with_prompts)) == len(SHAPES) and len(set(replayer.replayed)) > len(SHAPES) + 1
    assert engine.runner.launched == {"graph": len(replayer.replayed), "eager": 0}


@pytest.mark.parametrize(
    ("package", "name", "model_impl"),
    [
        ("flashinfer", "mistral", "native"),
        ("flashinfer", "gemma2", "transformers"),
        ("fa2", "mistral", "native"),
        ("fa3", "gemma2", "transformers"),
    ],
)
def test_tokens_are_those_of_our_attention(
    package: str, name: str, model_impl: str, replayer: Replayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of packages there are stand-ins; all but FlashInfer's are in graphs."""
    attention = other_packages.installed(package, monkeypatch)
    monkeypatch.setattr(assemble, "attention_of", lambda *names, **sizes: attention)
    graphs = package != "flashinfer"
    engine = server(name, model_impl, attention="fa" if graphs else package, batching="unified")
    assert tokens(served(engine)) == wanted(name)
    assert engine.runner.launched["eager" if graphs else "graph"] == 0
    assert engine.model.attention is attention


@pytest.mark.parametrize(
    ("params", "preemption"),
    [
        (SamplingParams(seed=3, max_tokens=TOKENS), "swap"),
        (SamplingParams(n=3, seed=3, max_tokens=TOKENS), "recompute"),
        (SamplingParams(n=3, temperature=0, beam_search=True, max_tokens=TOKENS), "swap"),
    ],
)
def test_groups_are_those_without_graphs(
    params: SamplingParams, preemption: str, replayer: Replayer
) -> None:
    settings: dict[str, Any] = {"preemption": preemption, "blocks": 3 * BLOCKS}
    found = []
    for eager in (True, False):
        outputs = served(server("llama", **settings, enforce_eager=eager), params)
        found.append([[one.token_ids for one in outputs[i].outputs] for i in range(PROMPTS)])
        assert bool(replayer.replayed) is not eager
    assert found[0] == found[1]


def test_prices_are_those_of_graphs(replayer: Replayer) -> None:
    """Of a prompt of one token, and of one that fills a step."""
    server("llama", preemption="cheapest")
    assert set(replayer.replayed) == {0, 1}


def test_larger_batches_and_prompts_are_launched_anew(
    replayer: Replayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs_module, "LARGEST", 2)
    engine = server(
        "llama", blocks=6 * BLOCKS, max_cudagraph_capture_size=2, async_scheduling=False
    )
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
    # The larger of both was recorded first, and before it that of prompts.
    assert replayer.replayed == [2, 2, 2, 1, 1, 1]
    assert engine.runner.launched == {"graph": 6, "eager": 10}
    monkeypatch.undo()
    assert tokens(served(engine)) == wanted("llama")


@pytest.mark.parametrize("waits_at", [0, 2])
def test_a_model_that_waits_for_the_gpu_serves_without(
    waits_at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replayer = Replayer(waits_at=waits_at)
    monkeypatch.setattr(runner_module, "recorder_of", lambda device: replayer)
    with caplog.at_level(logging.WARNING, graphs_module.__name__):
        engine = server("llama")
        found = tokens(served(engine))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].endswith("kernel by kernel: called a synchronizing CUDA operation")
    assert not replayer.replayed and engine.runner.graphs is None
    assert found == wanted("llama")


@pytest.mark.parametrize("fails_at", [0, 2])
def test_no_request_is_served_after_a_failed_capture(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "recorder_of", lambda device: Replayer(fails_at))
    with pytest.raises(ConfigError) as caught:
        server("llama")
    size = ["32 tokens of 6 sequences", "16 tokens of 6 sequences", "6 sequences"][fails_at]
    assert str(caught.value).endswith(
        f"for {size} cannot be captured in a CUDA graph: "
        "operation not permitted when capturing; give enforce_eager=True"
    )


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_every_replay_reads_and_writes_the_same_memory(
    model_impl: str, replayer: Replayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = server("qwen3", model_impl, blocks=6 * BLOCKS)
    assert engine.runner.graphs is not None
    seen: dict[tuple[int, int], set[Any]] = {}
    forward = type(engine.model).forward

    def spied(model: Any, ids: Any, positions: Any, batch: Any, *rest: Any) -> Any:
        tensors = (
            *(ids, positions, batch.block_tables, batch.query_start, batch.context_lens),
            *(batch.rows, batch.slots, *rest),
        )
        places = tuple((one.data_ptr(), one.shape, one.stride()) for one in tensors)
        kind = len(ids), batch.longest
        seen.setdefault(kind, set()).add((places, batch.num_decodes, batch.chunks))
        return forward(model, ids, positions, batch, *rest)

    monkeypatch.setattr(type(engine.model), "forward", spied)
    with torch.inference_mode():
        assert engine.runner.graphs.capture_all()  # once more, now seen
    served(engine)
    served(engine)
    every = [*((count, 0) for count in SIZES), *((count, count) for count, _ in SHAPES)]
    assert {kind: len(places) for kind, places in seen.items()} == dict.fromkeys(every, 1)
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
    assert replayer.replayed == [0, 2, 2, 2]  # 30 tokens of prompts in the graph of 32
    outputs = [engine.scheduler.requests[5].outputs for engine in engines]
    assert outputs[0] == outputs[1]


def test_memory_of_graphs_is_that_of_the_largest_and_of_the_others() -> None:
    tiny = load_model("tiny", device=CPU)
    shape = CacheShape(tiny.num_layers, BLOCK, tiny.num_kv_heads, tiny.head_dim, tiny.dtype)
    left = iter([1000, 400, 390])
    replayer = Replayer()
    places = DecodeInputs(CPU, 100, 7)

    def taken(recorder: Replayer) -> int:
        cache = shape.blank(1, CPU)
        return graph_bytes(Graphs(tiny, cache, places, 100, 200, recorder), lambda: next(left))

    assert len(sizes(100)) == 14 and len(shapes(200, 100)) == 11
    inputs = PromptInputs(places.tables, 200, 100).nbytes
    assert inputs > 200 * 24 + 100 * 28
    assert taken(recorder=replayer) == 100 * tiny.vocab_size * 4 + inputs + 600 + 24 * 10
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

    def _waits(self, stream: str) -> Callable[[Any], None]:
        return lambda other: self.calls.append(f"{stream} waits for {other.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    one = Cuda()
    monkeypatch.setattr(graphs_module, "torch", SimpleNamespace(cuda=one, device=torch.device))
    graphs_module._stream_of.cache_clear()
    yield one
    graphs_module._stream_of.cache_clear()


def test_work_is_done_and_watched_before_it_is_captured(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With garbage collected before it, once for all in a block, and none meanwhile."""
    collected: list[bool] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(gc.isenabled()))
    recorder = CudaRecorder(torch.device("cuda"))

    def work() -> None:
        assert not gc.isenabled()
        cuda.calls.append(f"work on {cuda.stream_now}")

    replay = recorder.record(work)
    assert cuda.calls == [
        *("side waits for main", "work on side", "waiting: error", "work on side", "waiting: 1"),
        *("capture in pool on side", "work on side", "captured", "main waits for side"),
    ]
    replay()
    assert cuda.calls[-1] == "replay" and cuda.mode == 1 and cuda.stream_now == "main"
    with graphs_module.uncollected():
        for _ in range(2):
            recorder.record(work)
    assert collected == [True, True] and gc.isenabled()
    gc.disable()
    try:
        recorder.record(work)
        assert len(collected) == 2 and not gc.isenabled()
    finally:
        gc.enable()


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
    assert cuda.calls[-1] == "main waits for side" and gc.isenabled()

"""Settings of an engine: vLLM's arguments, errors, threads, and a model's own sampling defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedsim.backends.engine import Engine
from pagedsim.core import ConfigError, SamplingParams
from pagedsim.engine import assemble
from pagedsim.engine import engine as engine_module
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.engine_args import (
    OURS,
    REFUSED,
    TRANSLATED,
    WITHOUT_EFFECT,
    EngineArgs,
    from_vllm,
)
from pagedsim.engine.llm import LLM
from pagedsim.engine.runtime import Threads
from pagedsim.serve.api.schema import ChatRequest, CompletionRequest
from pagedsim.spec.run import RunSpec
from tests.engine.architectures import reference
from tests.engine.test_engine import engine


def test_an_argument_has_its_place_in_one_table() -> None:
    tables = OURS, TRANSLATED, WITHOUT_EFFECT, REFUSED
    for name in {*TRANSLATED, *WITHOUT_EFFECT, *REFUSED}:
        assert sum(name in table for table in tables) == 1, name


def test_arguments_are_refused_with_the_reason_or_left_out() -> None:
    for name, reason in REFUSED.items():
        with pytest.raises(ConfigError) as error:
            EngineArgs("tiny", **{name: "other"})
        assert str(error.value) == f"{name}='other': {reason}"
        assert from_vllm({name: None}) == {}
    for name in WITHOUT_EFFECT:
        assert from_vllm({name: "anything"}) == {}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"num_gpu_blocks_override": 7}, {"blocks": 7}),
        ({"enable_prefix_caching": True}, {"memory": "prefix"}),
        ({"enable_prefix_caching": False}, {"memory": "paged"}),
        ({"enable_chunked_prefill": True}, {"batching": "unified"}),
        ({"enable_chunked_prefill": False}, {"batching": "prefill_first"}),
        ({"scheduling_policy": "priority"}, {"policy": "priority"}),
        ({"preemption_mode": "swap"}, {"preemption": "swap"}),
        ({"attention_backend": "FLASHINFER"}, {"attention": "flashinfer"}),
        ({"attention_backend": "FLASH_ATTN"}, {"attention": "fa"}),
        ({"attention_backend": "TRITON_ATTN", "attention": "triton"}, {"attention": "triton"}),
        ({"enable_prefix_caching": True, "memory": "prefix"}, {"memory": "prefix"}),
        (dict.fromkeys([*TRANSLATED, "max_num_seqs", "seed", "enforce_eager"]), {}),
        ({"pipeline_parallel_size": 1, "enable_lora": False, "task": "generate"}, {}),
    ],
)
def test_what_is_called_otherwise_is_translated(given: dict[str, Any], meant: Any) -> None:
    assert from_vllm(given) == meant


def test_engines_are_made_of_engine_args() -> None:
    args = EngineArgs(
        model="tiny", device="cpu", max_num_seqs=3, max_num_batched_tokens=70, max_model_len=64,
        num_gpu_blocks=9, num_cpu_blocks=5, preemption="swap", enable_prefix_caching=True,
        enable_chunked_prefill=True, scheduling_policy="priority",
    )  # fmt: skip
    args.max_num_seqs = 4
    server = LLMEngine.from_engine_args(args).server
    assert (server.max_seqs, server.max_batched_tokens, server.max_model_len) == (4, 70, 64)
    assert (server.blocks, server.cpu_blocks, server.memory) == (9, 5, "prefix")
    assert (server.batching, server.policy) == ("unified", "priority")
    assert LLM(**vars(args)).llm_engine.server.sizes() == server.sizes()
    args.max_num_batched_tokens, args.max_model_len, args.max_num_seqs = 5, 4, 6
    with pytest.raises(ConfigError, match=r"^max_num_batched_tokens=5: must be at least max_num_s"):
        LLMEngine.from_engine_args(args)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"blocks": 3}, "max_model_len=64: memory of 3 blocks × 4 tokens holds no request"),
        (
            {"blocks": 10**9},
            "out of memory: 1000000000 blocks, and 0 for swapping, of 0.00146 MiB take 1430.5 GiB",
        ),
        (
            {"preemption": "swap", "swap_space_gib": 1e6},
            "out of memory: 64 blocks, and 699050666666 for swapping, of 0.00146 MiB take 1000000",
        ),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], line: str) -> None:
    """Memory is checked before it is taken: the system would kill the process."""
    with pytest.raises(ConfigError) as error:
        engine(**settings)
    assert str(error.value).startswith(line)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="device=cuda: torch finds no GPU here; choose device="):
        engine(model="tiny", device="cuda")


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_gpu_without_triton(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(assemble, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="device=cuda: needs Triton, which is not installed"):
        assemble.device_of(device)
    assert assemble.device_of("cpu").type == "cpu"


def test_weights_and_steps_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **settings: Any) -> Any:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(assemble, "fitting_blocks", full)
        with pytest.raises(ConfigError, match=r"activations of the largest step on.*; lower"):
            engine(blocks=None)
    monkeypatch.setattr(assemble, "load_model", full)
    with pytest.raises(ConfigError, match="out of memory: no room for the weights on the host"):
        engine(model="tiny")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch has three, and there is no engine."""
    monkeypatch.setattr(engine_module, "THREADS", Threads())
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("settings", "wanted"), [({}, 1), ({"num_threads": 2}, 2)])
def test_one_thread_unless_others_are_asked_for(
    settings: dict[str, Any], wanted: int, threads: None
) -> None:
    """The last engine that is closed gives the threads back."""
    first, second = (engine(**settings) for _ in range(2))
    first.close()
    first.close()
    assert torch.get_num_threads() == wanted
    second.close()
    assert torch.get_num_threads() == 3


def test_threads_that_stay(threads: None) -> None:
    with pytest.raises(ConfigError):
        LLMEngine(model="/nonexistent", device="cpu")
    assert torch.get_num_threads() == 3
    one = engine()
    torch.set_num_threads(2)  # a number that was chosen since
    one.close()
    assert torch.get_num_threads() == 2


def test_the_setting_of_studies_and_of_the_server_is_the_engine_s() -> None:
    from tests.run.studies import settings_of

    settings = settings_of("backend=engine", "model=tiny", "experiment=single")
    stage: Any = Engine(threads=2).prepare(RunSpec(settings))
    assert stage.arguments.num_threads == 2


OWN: dict[str, Any] = {
    **{"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.1},
    "repetition_penalty": 1.2,
}


def test_a_prompt_without_params_is_sampled_as_generation_config_says(tmp_path: Path) -> None:
    reference("llama").save_pretrained(tmp_path)
    said = {**OWN, "do_sample": True, "max_new_tokens": 5, "eos_token_id": [], "num_beams": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    small = {"device": "cpu", "num_gpu_blocks": 64, "max_model_len": 64}
    llm = LLM(str(tmp_path), **small)
    assert llm.get_default_sampling_params() == SamplingParams(**OWN, max_tokens=5)
    for params, length in ((None, 5), (SamplingParams(max_tokens=9), 9)):
        (answer,) = llm.generate([[3, 4, 5]], params, use_tqdm=False)
        assert len(answer.outputs[0].token_ids) == length
    off = LLM(str(tmp_path), **small, generation_config="vllm")
    for one in (off, LLM("tiny", **small)):
        assert one.get_default_sampling_params() == SamplingParams()


def test_a_request_over_http_takes_what_it_does_not_say() -> None:
    defaults = {**OWN, "max_tokens": 50}
    chat = ChatRequest(messages=[{"role": "user", "content": "a"}], temperature=1.0)
    chat.fill(defaults, 20)
    assert chat.sampling_params() == SamplingParams(**OWN | {"temperature": 1.0}, max_tokens=20)
    chat = ChatRequest(messages=[{"role": "user", "content": "a"}], max_completion_tokens=30)
    chat.fill(defaults, 40)
    assert chat.sampling_params() == SamplingParams(**OWN, max_tokens=30)
    completion = CompletionRequest(prompt=["a"], top_k=0)
    completion.fill(defaults, 20)
    assert completion.sampling_params() == SamplingParams(**OWN | {"top_k": 0}, max_tokens=16)

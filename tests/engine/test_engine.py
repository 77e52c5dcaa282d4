"""The engine as its users call it: answers, aborts, refusals, and steps that fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from math import inf
from typing import Any

import pytest
import torch

from pagedsim.core import ConfigError, Policy, Request, RequestError, SamplingParams
from pagedsim.core.batch_state import ServerState
from pagedsim.engine import assemble
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.llm import LLM
from pagedsim.engine.output import RequestOutput
from tests.engine.architectures import made

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def engine(**settings: Any) -> LLMEngine:
    given = {"device": "cpu", "block_size": 4, "blocks": 64, "max_model_len": 64}
    return LLMEngine(model=made("llama"), **{**given, **settings})


def run(server: LLMEngine) -> dict[Any, RequestOutput]:
    found: dict[Any, RequestOutput] = {}
    while server.has_unfinished_requests():
        found |= {output.request_id: output for output in server.step()}
    return found


def test_answers_come_in_the_order_of_the_prompts() -> None:
    llm = LLM(made("llama"), device="cpu", num_gpu_blocks=64, max_model_len=64, max_num_seqs=2)
    prompts = [[5, 6, 7], [8], [9, 10]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 5)]
    answers = llm.generate(prompts, params, use_tqdm=False)
    assert [answer.prompt_token_ids for answer in answers] == prompts
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [9, 2, 5]
    assert [answer.outputs[0].finish_reason for answer in answers] == ["length"] * 3
    assert llm.generate([5, 6, 7], params[0], use_tqdm=False)[0].outputs == answers[0].outputs


def test_a_cpu_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from pagedsim.core import SamplingParams\n"
        "from pagedsim.engine.llm import LLM\n"
        "llm = LLM('tiny', device='cpu', num_gpu_blocks=64, max_model_len=64)\n"
        "answer, = llm.generate('Once', SamplingParams(max_tokens=3, ignore_eos=True))\n"
        "print(len(answer.outputs[0].token_ids))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert child.stdout == "3\n", child.stderr


def test_several_sequences_and_their_shared_blocks() -> None:
    server = engine()
    server.add_request("a", list(range(3, 21)), SamplingParams(n=3, seed=1, max_tokens=6))
    server.step()
    shared = server.scheduler.memory.used
    server.step()
    server.scheduler.check()
    # Four full blocks of the prompt are shared; its last, half full, is one for each sequence.
    assert (shared, server.scheduler.memory.used) == (5, 4 + 3)
    outputs = run(server)["a"].outputs
    assert len({tuple(output.token_ids) for output in outputs}) == 3


def test_a_stream_tells_what_there_is() -> None:
    server = engine()
    server.add_request("a", [5, 6, 7], GREEDY, stream=True)
    server.add_request("b", [5, 6, 7], GREEDY)
    seen = [output for _ in range(6) for output in server.step()]
    assert [(o.request_id, len(o.outputs[0].token_ids)) for o in seen if not o.finished] == [
        ("a", count) for count in range(1, 6)
    ]
    assert {o.request_id for o in seen if o.finished} == {"a", "b"}


def test_a_request_behind_an_aborted_one_is_served() -> None:
    class Waits(Policy):
        def admit(self, request: Request, state: ServerState) -> bool:
            return request.id != "never"

    engine = LLMEngine(model="tiny", device="cpu", policy=Waits())
    for name in ("never", "behind"):
        engine.add_request(name, [1], SamplingParams(max_tokens=1))
    assert engine.step() == [] and engine.pause == inf
    engine.abort_request("never")
    assert engine.pause == 0
    assert [output.request_id for output in engine.step()] == ["behind"]


def test_an_abort_frees_everything() -> None:
    server = engine()
    server.add_request("a", [5, 6, 7], GREEDY)
    server.step()
    output = server.abort_request("a")
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == 1
    assert not server.has_unfinished_requests()
    assert server.scheduler.memory.used == 0


@pytest.mark.parametrize("memory", ["paged", "prefix"])
def test_a_step_that_fails_ends_its_own_requests_only(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = engine(memory=memory, max_seqs=2)
    alone = engine()
    alone.add_request("c", [9, 9, 9, 9, 9], GREEDY)
    wanted = run(alone)["c"].outputs[0].token_ids
    for name in "abc":
        server.add_request(name, [9, 9, 9, 9, 9], GREEDY)
    server.step()
    with monkeypatch.context() as patch:
        patch.setattr(server.runner, "carry_out", fails)
        failed = server.step()
    assert {o.request_id: o.outputs[0].finish_reason for o in failed} == {
        "a": "error",
        "b": "error",
    }
    server.scheduler.check()
    assert server.scheduler.memory.cached == 0  # what the step was to fill cannot be trusted
    rest = run(server)
    assert list(rest) == ["c"]
    assert rest["c"].outputs[0].token_ids == wanted
    assert server.scheduler.memory.used == 0


def fails(*work: Any) -> Any:
    raise RuntimeError("a kernel failed")


@pytest.mark.parametrize(
    ("prompt", "params", "line"),
    [
        ([5] * 70, GREEDY, "request 'a': prompt of 70 tokens: max_model_len is 64"),
        (
            [5] * 60,
            GREEDY,
            "request 'a': prompt of 60 + max_tokens 6 = 66 tokens: max_model_len is 64",
        ),
        ([5, 97], GREEDY, "request 'a': prompt has token 97: ids of LlamaForCausalLM are 0 to 96"),
        (
            "text",
            GREEDY,
            "request 'a': the prompt is a text, and LlamaForCausalLM has no tokenizer; "
            "give token ids",
        ),
    ],
)
def test_requests_that_can_never_be_served(prompt: Any, params: Any, line: str) -> None:
    server = engine()
    with pytest.raises(RequestError) as error:
        server.add_request("a", prompt, params)
    assert str(error.value) == line
    assert not server.has_unfinished_requests()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"max_model_len": 200},
            "max_model_len=200: model=LlamaForCausalLM goes up to 128, its max_position_embeddings",
        ),
        (
            {"device": "tpu"},
            "unknown device 'tpu': did you mean 'cpu'? choose from auto, cpu",
        ),
        ({"load_format": "none"}, "unknown load_format 'none': choose from auto, dummy"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0: must be a number above 0"),
        ({"block_size": 0}, "block_size=0: must be a whole number of at least 1"),
        ({"blocks": 3}, "max_model_len=64: memory of 3 blocks × 4 tokens holds no request"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine(**settings)
    assert str(error.value).startswith(line)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="device=cuda: torch finds no GPU here; choose device="):
        engine(device="cuda")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"blocks": 10**9},
            r"out of memory: 1000000000 blocks, and 0 for swapping, of 0.000977 MiB take "
            r"953.7 GiB, and the host has [\d.]+ GiB left; lower blocks=1000000000$",
        ),
        (
            {"preemption": "swap", "swap_space_gib": 1e6},
            r"out of memory: 64 blocks, and \d+ for swapping, .* take 1000000.0 GiB, .* "
            "lower blocks=64, or lower swap_space_gib=1e\\+06$",
        ),
    ],
)
def test_more_memory_than_there_is(settings: dict[str, Any], line: str) -> None:
    """Told before it is taken: the system would kill the process."""
    with pytest.raises(ConfigError, match=line):
        engine(**settings)


def test_weights_and_steps_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **settings: Any) -> Any:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(assemble, "fitting_blocks", full)
        with pytest.raises(ConfigError, match=r"activations of the largest step on.*; lower"):
            engine(blocks=None)
    monkeypatch.setattr(assemble, "load_model", full)
    with pytest.raises(ConfigError, match="out of memory: no room for the weights on the host"):
        engine()


@pytest.mark.parametrize("width", [2, 3, 6])
def test_samples_share_the_prompt_s_blocks(width: int) -> None:
    """Figure 15 of the PagedAttention paper counts blocks saved, of those without sharing."""
    prompt, block = 18, 4
    server = engine()
    params = SamplingParams(n=width, seed=1, max_tokens=9, ignore_eos=True)
    server.add_request("a", list(range(3, 3 + prompt)), params)
    for saved, unshared in sharing(server):
        length = server.scheduler.requests["a"].num_tokens - 1
        assert unshared == width * -(-length // block)
        assert saved == (width - 1) * (prompt // block)


def test_beams_share_more_than_samples() -> None:
    """Beams have parents in common, so that what they generated is shared as well."""
    shares = []
    for beams in (False, True):
        server = engine()
        params = SamplingParams(n=4, seed=1, max_tokens=30, ignore_eos=True, beam_search=beams)
        server.add_request("a", list(range(3, 13)), params)
        steps = list(sharing(server))
        shares.append(sum(saved for saved, _ in steps) / sum(unshared for _, unshared in steps))
    assert shares[1] > shares[0] > 0


def sharing(server: LLMEngine) -> Iterator[tuple[int, int]]:
    """Blocks saved by sharing and blocks without it, after each step but the first and the last."""
    request = server.scheduler.requests["a"]
    server.step()
    while server.has_unfinished_requests():
        server.step()
        if request.alive:
            unshared = sum(map(len, request.tables))
            distinct = len({block for table in request.tables for block in table})
            assert server.scheduler.memory.used == distinct
            yield unshared - distinct, unshared


def test_a_ctrl_c_in_a_step_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(made("llama"), device="cpu", num_gpu_blocks=64, max_model_len=64)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "carry_out", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
    (answer,) = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 6


def interrupted(*work: Any) -> Any:
    raise KeyboardInterrupt


def test_two_engines_over_one_model_keep_out_of_each_other_s_caches() -> None:
    model = made("llama")
    first, second = (
        LLMEngine(model=model, device="cpu", blocks=64, max_model_len=64) for _ in range(2)
    )
    for server, prompt in ((first, [5, 6, 7]), (second, [9, 9, 9, 9])):
        server.add_request("a", prompt, GREEDY)
    answers: list[dict[Any, RequestOutput]] = [{}, {}]
    while first.has_unfinished_requests():
        for server, found in zip((first, second), answers, strict=True):
            found |= {output.request_id: output for output in server.step()}
    for prompt, found in zip(([5, 6, 7], [9, 9, 9, 9]), answers, strict=True):
        alone = engine()
        alone.add_request("a", prompt, GREEDY)
        assert run(alone)["a"].outputs[0].token_ids == found["a"].outputs[0].token_ids


def test_stop_ids_must_be_the_model_s() -> None:
    server = engine()
    with pytest.raises(RequestError, match=r"stop_token_ids has token 999: ids of Llama.* 0 to 96"):
        server.add_request("a", [5], SamplingParams(stop_token_ids=(999,), min_tokens=2))


def test_generate_does_not_wait_for_other_requests() -> None:
    llm = LLM(made("llama"), device="cpu", num_gpu_blocks=64, max_model_len=64)
    llm.engine.add_request("0", [5, 6], GREEDY)
    with pytest.raises(RequestError, match="generate: the engine serves requests that were added"):
        llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert list(run(llm.engine)) == ["0"]
    assert len(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)) == 1


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (5, None, "prompts=5: must be a text, token ids, or a list of these"),
        ([5.0], None, "prompts: 5.0 must be a text or a list of token ids"),
        ([[5]], 7, "sampling_params=7: must be SamplingParams, or a list of them"),
        ([[5]], [7], "sampling_params=.7.: must be SamplingParams, or a list of them"),
        ([[5]], [GREEDY, GREEDY], "sampling_params: 2 for 1 prompts"),
    ],
)
def test_what_generate_cannot_take(prompts: Any, params: Any, message: str) -> None:
    llm = LLM(made("llama"), device="cpu", num_gpu_blocks=8, max_model_len=64)
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params, use_tqdm=False)


def test_a_setting_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"unknown engine setting 'block_sizes': .* 'block_size'"):
        LLM("tiny", block_sizes=8)


def test_an_llm_s_settings_are_called_as_in_vllm() -> None:
    llm = LLM(
        "tiny", device="cpu", max_num_seqs=3, max_num_batched_tokens=70, num_gpu_blocks=9,
        num_cpu_blocks=5, tensor_parallel_size=1, max_model_len=64, preemption="swap",
    )  # fmt: skip
    server = llm.engine.server
    assert (server.max_seqs, server.max_batched_tokens, server.max_model_len) == (3, 70, 64)
    assert (server.blocks, server.cpu_blocks, server.tensor_parallel) == (9, 5, 1)
    with pytest.raises(ConfigError, match=r"'max_seqs': did you mean 'max_num_seqs'"):
        LLM("tiny", max_seqs=3)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be a whole number of at least 1"),
        ({"swap_space": -1}, "swap_space=-1: must be a number of at least 0"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3: model=tiny with 8 heads"),
        (
            {"max_num_batched_tokens": 5, "max_num_seqs": 6, "max_model_len": 4},
            "max_num_batched_tokens=5: must be at least max_num_seqs=6, ",
        ),
        (
            {"preemption": "swap", "num_cpu_blocks": 0},
            "preemption that swaps needs num_cpu_blocks: at least 1, not 0",
        ),
    ],
)
def test_and_so_are_they_in_errors(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLM("tiny", device="cpu", **{"num_gpu_blocks": 64, "max_model_len": 64, **settings})
    assert str(error.value).startswith(line)


def test_generate_passes_priorities_on() -> None:
    llm = LLM(
        made("llama"), device="cpu", num_gpu_blocks=64, max_model_len=64, policy="priority",
        max_num_seqs=1,
    )  # fmt: skip
    answers = llm.generate([[5], [6], [7]], GREEDY, priority=[2, 1, 0], use_tqdm=False)
    ends = [answer.metrics.finished or 0.0 for answer in answers]
    assert ends[0] > ends[1] > ends[2]

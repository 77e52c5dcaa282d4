"""The engine as its users call it: answers, streams, aborts, refusals, and steps that fail."""

from __future__ import annotations

import signal
import subprocess
import sys
from math import inf
from typing import Any

import pytest

from pagedsim.core import Policy, Request, RequestError, SamplingParams
from pagedsim.core.batch_state import ServerState
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.output import RequestOutput
from tests.engine.architectures import loaded

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def engine(**settings: Any) -> LLMEngine:
    given = {"block_size": 4, "blocks": 64, "max_model_len": 64}
    return LLMEngine(**{"model": loaded("llama"), "device": "cpu", **given, **settings})


def run(server: LLMEngine) -> dict[Any, RequestOutput]:
    found: dict[Any, RequestOutput] = {}
    while server.has_unfinished_requests():
        found |= {output.request_id: output for output in server.step()}
        server.scheduler.check()
    memory = server.scheduler.memory
    assert memory.used == 0 and memory.cpu_free == memory.cpu_total
    return found


def alone(prompt: list[int], params: SamplingParams = GREEDY) -> Any:
    """The outputs of one request in an engine of its own."""
    server = engine()
    server.add_request("alone", prompt, params)
    return run(server)["alone"].outputs


AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])


@pytest.mark.slow
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


def test_a_request_behind_an_aborted_one_is_served() -> None:
    class Waits(Policy):
        def admit(self, request: Request, state: ServerState) -> bool:
            return request.id != "never"

    server = engine(policy=Waits())
    assert server.pause == 0.0
    for name in ("never", "behind"):
        server.add_request(name, [1], SamplingParams(max_tokens=1))
    assert server.step() == [] and server.pause == inf
    server.abort_request("never")
    assert server.pause == 0
    assert [output.request_id for output in server.step()] == ["behind"]


@AHEAD
def test_an_abort_frees_everything(ahead: bool) -> None:
    server = engine(async_scheduling=ahead)
    server.add_request("a", [5, 6, 7], GREEDY)
    server.add_request("b", [5, 6, 8], GREEDY)
    server.step()
    output = server.abort_request("a").outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("abort", 1)
    server.scheduler.check()
    assert run(server)["b"].outputs == alone([5, 6, 8])


@AHEAD
@pytest.mark.parametrize("memory", ["paged", "prefix"])
def test_a_step_that_fails_ends_its_own_requests_only(
    memory: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of the step on top of it."""
    server = engine(memory=memory, max_seqs=2, async_scheduling=ahead)
    for name in "abc":
        server.add_request(name, [9, 9, 9, 9, 9], GREEDY)
    server.step()
    with monkeypatch.context() as patch:
        patch.setattr(server.runner, "carry_out", fails)
        failed = server.step()
    ends = {o.request_id: (o.outputs[0].finish_reason, len(o.outputs[0].token_ids)) for o in failed}
    assert ends == {"a": ("error", 1), "b": ("error", 1)}
    server.scheduler.check()
    if not ahead:
        assert server.scheduler.memory.cached == 0  # what the step was to fill cannot be trusted
    rest = run(server)
    assert list(rest) == ["c"] and rest["c"].outputs == alone([9, 9, 9, 9, 9])
    assert server.failure == "RuntimeError: a kernel failed"


def fails(*work: Any) -> Any:
    raise RuntimeError("a kernel failed")


@AHEAD
@pytest.mark.parametrize("name", ["inputs_of", "carry_out"])
def test_an_error_wherever_a_step_is_made_leaves_an_engine(
    name: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = engine(async_scheduling=ahead)
    server.add_request("a", [5, 6, 7], GREEDY)
    server.step()
    with monkeypatch.context() as patch:
        patch.setattr(server.runner, name, fails)
        while server.has_unfinished_requests():
            server.step()
    assert server.failure == "RuntimeError: a kernel failed"
    server.add_request("b", [5, 6, 7], GREEDY)
    assert run(server)["b"].outputs[0].finish_reason == "length"


@AHEAD
@pytest.mark.parametrize("name", ["plan", "dispatch", "complete"])
def test_a_ctrl_c_comes_before_or_after_a_decision(
    name: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not within, where it would leave the scheduler with half of it."""
    server = engine(async_scheduling=ahead)
    for request in "ab":
        server.add_request(request, [5, 6, 7], GREEDY)
    server.step()
    decide, finished = getattr(server.scheduler, name), []

    def interrupted(*values: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        result = decide(*values)
        finished.append(True)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(server.scheduler, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            server.step()
    assert finished
    server.scheduler.check()
    run(server)
    server.add_request("c", [5, 6, 7], GREEDY)
    assert run(server)["c"].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "line"),
    [
        ([5] * 70, GREEDY, "prompt of 70 tokens: max_model_len is 64"),
        ([5] * 60, GREEDY, "prompt of 60 + max_tokens 6 = 66 tokens: max_model_len is 64"),
        ([5, 97], GREEDY, "prompt has token 97: ids of LlamaForCausalLM are 0 to 96"),
        (
            "text",
            GREEDY,
            "the prompt is a text, and LlamaForCausalLM has no tokenizer; give token ids",
        ),
        (
            [5],
            SamplingParams(stop_token_ids=(999,), min_tokens=2),
            "SamplingParams.stop_token_ids has token 999: ids of LlamaForCausalLM are 0 to 96",
        ),
    ],
)
def test_requests_that_can_never_be_served(prompt: Any, params: Any, line: str) -> None:
    server = engine()
    with pytest.raises(RequestError) as error:
        server.add_request("a", prompt, params)
    assert str(error.value) == f"request 'a': {line}"
    assert not server.has_unfinished_requests()


def test_two_engines_over_one_model_keep_out_of_each_other_s_caches() -> None:
    for model_impl in ("native", "transformers"):
        model = loaded("llama", model_impl)
        prompts = [5, 6, 7], [9, 9, 9, 9]
        servers = [engine(model=model) for _ in prompts]
        answers: list[dict[Any, RequestOutput]] = [{}, {}]
        for server, prompt in zip(servers, prompts, strict=True):
            server.add_request("a", prompt, GREEDY)
        while servers[0].has_unfinished_requests():
            for server, found in zip(servers, answers, strict=True):
                found |= {output.request_id: output for output in server.step()}
        for prompt, found in zip(prompts, answers, strict=True):
            assert found["a"].outputs[0].token_ids == alone(prompt)[0].token_ids

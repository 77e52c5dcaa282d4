"""`LLM` as users of vLLM's offline interface call it: prompts, and conversations as prompts."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

import pagedsim as ps
from pagedsim.core import RequestError, SamplingParams
from pagedsim.engine.llm import LLM
from pagedsim.engine.tokenizer import ByteTokenizer, HuggingFaceTokenizer, chat_tokens

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
A, BC = [97], [98, 99]


@cache
def llm() -> LLM:
    return LLM("tiny", device="cpu", num_gpu_blocks=64, max_model_len=64)


def prompts(*args: Any, **kwargs: Any) -> list[list[int]]:
    given = {"use_tqdm": False, **kwargs} if len(args) < 3 else kwargs
    return [list(answer.prompt_token_ids) for answer in llm().generate(*args, **given)]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("a", [A]),
        (["a", "bc"], [A, BC]),
        (BC, [BC]),
        ([A, "bc"], [A, BC]),
        ({"prompt": "a"}, [A]),
        ({"prompt_token_ids": BC}, [BC]),
        ([{"prompt": "a"}, {"prompt_token_ids": BC}, "a", BC], [A, BC, A, BC]),
        ({"prompt": "a", "prompt_token_ids": None}, [A]),
        ([], []),
    ],
)
def test_a_prompt_has_many_forms(asked: Any, meant: list[list[int]]) -> None:
    assert prompts(asked, GREEDY) == meant


@pytest.mark.parametrize("server", ["vllm-0.6", "vllm-0.33", "sglang-0.5"])
def test_any_server_gives_the_same_tokens(server: str) -> None:
    like = ps.preset(server)
    other = LLM("tiny", device="cpu", num_gpu_blocks=2048, max_model_len=64, server=like)
    assert type(other.engine.scheduler.batching) is type(like.batching)
    given: list[Any] = ["Once upon a time", "Once upon", A, BC] * 2
    answers = [
        [answer.outputs[0].token_ids for answer in one.generate(given, GREEDY, use_tqdm=False)]
        for one in (llm(), other)
    ]
    assert answers[0] == answers[1]


def test_a_memory_in_the_stead_of_the_server_s_has_its_own_settings() -> None:
    for server, memory, size in (("vllm-0.6", "radix", 16), ("sglang-0.5", "prefix", 16)):
        like = ps.preset(server, hardware="h100", model="llama-3.1-8b")
        other = LLM("tiny", device="cpu", num_gpu_blocks=64, server=like, memory=memory)
        assert other.engine.scheduler.memory.block_size == size


def test_token_ids_may_stand_apart() -> None:
    assert prompts(prompt_token_ids=[A, BC], sampling_params=GREEDY) == [A, BC]
    assert prompts(None, GREEDY, prompt_token_ids=BC) == [BC]
    assert prompts(None, GREEDY, [A, BC]) == [A, BC]


def test_whether_to_show_a_bar_may_be_third(capsys: pytest.CaptureFixture[str]) -> None:
    assert prompts("a", GREEDY, False) == [A]
    assert capsys.readouterr().err == ""
    assert prompts("a", GREEDY, True) == [A]
    assert "1/1" in capsys.readouterr().err


def test_the_bar_tells_tokens_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    llm().generate(["a", "bc"], GREEDY)
    told = capsys.readouterr().err.split("\r")[-1]
    assert told.startswith("Processed prompts: 100%")
    found = re.search(r"est\. speed input: ([\d.]+) toks/s, output: ([\d.]+) toks/s", told)
    assert found
    read, said = map(float, found.groups())
    assert said / read == pytest.approx(8 / 3, rel=0.01)  # 8 tokens of answers, 3 of prompts


@pytest.mark.parametrize(
    ("args", "kwargs", "line"),
    [
        ((), {}, "prompts=None: must be a text, token ids, or a list of these"),
        (("a",), {"prompt_token_ids": A}, "generate: give prompts or prompt_token_ids, not both"),
        ((), {"prompt_token_ids": ["a"]}, "prompt_token_ids: 'a' must be a list of token ids"),
        (([[5.5]],), {}, "prompts: [5.5] must be a text or a list of token ids"),
        (("a",), {"priority": 5}, "priority=5: must be a list of numbers"),
        (("a",), {"priority": [1, 2]}, "priority: 2 for 1 prompts"),
        ((A, 7), {}, "sampling_params=7: must be SamplingParams, or a list of them"),
        ((A, [GREEDY, GREEDY]), {}, "sampling_params: 2 for 1 prompts"),
        (({},), {}, "prompts: has nothing: must have one of prompt and prompt_token_ids"),
        (
            ([{"prompt": "a", "multi_modal_data": {}}],),
            {},
            "prompts: has prompt, multi_modal_data: must have one of",
        ),
        (({"prompt": A},), {}, "prompts: prompt=[97]: must be a text"),
    ],
)
def test_what_is_no_prompt(args: Any, kwargs: Any, line: str) -> None:
    with pytest.raises(RequestError) as error:
        llm().generate(*args, **kwargs)
    assert str(error.value).startswith(line)


def test_answers_come_in_the_order_of_the_prompts_whatever_their_priorities() -> None:
    llm = LLM(
        "tiny", device="cpu", num_gpu_blocks=64, max_model_len=64, policy="priority",
        max_num_seqs=1,
    )  # fmt: skip
    prompts = [[5, 6, 7], [8], [9, 10]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 5)]
    answers = llm.generate(prompts, params, priority=[2, 1, 0], use_tqdm=False)
    assert [answer.prompt_token_ids for answer in answers] == prompts
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [9, 2, 5]
    assert [answer.outputs[0].finish_reason for answer in answers] == ["length"] * 3
    ends = [answer.metrics.finished or 0.0 for answer in answers]
    assert ends[0] > ends[1] > ends[2]


def test_answers_tell_cached_tokens_under_vllms_name() -> None:
    llm = LLM("tiny", device="cpu", num_gpu_blocks=64, max_model_len=64, memory="prefix")
    params = SamplingParams(temperature=0, max_tokens=2)
    first, again = (
        llm.generate([[5] * 40], params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)
    )
    assert (first, again) == (0, 32)


def test_a_ctrl_c_in_a_step_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*work: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm().engine.runner, "carry_out", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm().generate(A, GREEDY, use_tqdm=False)
    assert not llm().engine.has_unfinished_requests()
    assert prompts(A, GREEDY) == [A]


def test_generate_does_not_wait_for_other_requests() -> None:
    engine = llm().llm_engine
    assert engine is llm().engine
    engine.add_request("0", "a", GREEDY)
    assert engine.get_num_unfinished_requests() == 1
    with pytest.raises(RequestError, match="generate: the engine serves requests that were added"):
        llm().generate(BC, GREEDY, use_tqdm=False)
    engine.abort_request("0")
    assert engine.get_num_unfinished_requests() == 0


def test_a_tokenizer_can_be_had_and_set() -> None:
    own = llm().get_tokenizer()
    assert isinstance(own, ByteTokenizer)
    theirs = SimpleNamespace(
        eos_token_id=None,
        convert_ids_to_tokens=None,
        encode=lambda text: [1, 2],
        decode=lambda ids, **how: "x",
    )
    try:
        llm().set_tokenizer(theirs)
        assert isinstance(llm().engine.tokenizer, HuggingFaceTokenizer)
        assert llm().get_tokenizer() is theirs
        assert prompts("a", GREEDY) == [[1, 2]]
    finally:
        llm().set_tokenizer(own)
    assert llm().engine.tokenizer is own


HELLO = [{"role": "user", "content": "Hello"}]


class Backend:
    """What is asked of a transformers tokenizer."""

    eos_token_id = None

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template
        self.asked: dict[str, Any] = {}

    def apply_chat_template(self, messages: list[Any], **settings: Any) -> dict[str, list[int]]:
        if messages[-1]["content"] == "bad":
            raise ValueError("roles must\nalternate")
        if messages[-1]["content"] == "unknown":
            raise KeyError("name")
        self.asked = {"messages": messages, **settings}
        return {"input_ids": [1, 2, 3]}


def test_the_tiny_model_reads_lines() -> None:
    hello = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    one = llm().chat(hello, GREEDY, False)
    two = llm().chat([HELLO, HELLO], GREEDY, use_tqdm=False, add_generation_prompt=False)
    read = [bytes(answer.prompt_token_ids) for answer in (*one, *two)]
    assert read == [b"system: Be brief.\nuser: Hi\nassistant:", *[b"user: Hello\n"] * 2]
    with pytest.raises(RequestError, match=r"^chat_template: the tiny model has a chat format of"):
        llm().chat(hello, GREEDY, chat_template="{{ messages }}")


def test_a_template_is_the_models_own_or_another() -> None:
    backend = Backend("its own")
    assert chat_tokens(HuggingFaceTokenizer(backend), HELLO) == [1, 2, 3]
    assert backend.asked["messages"] == HELLO and backend.asked["add_generation_prompt"] is True
    other = Backend(None)
    assert chat_tokens(HuggingFaceTokenizer(other), HELLO, False, chat_template="x") == [1, 2, 3]
    assert (other.asked["chat_template"], other.asked["add_generation_prompt"]) == ("x", False)


def test_parts_of_a_message_are_one_text() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    whole = chat_tokens(ByteTokenizer(), [{"role": "user", "content": parts}])
    assert whole == chat_tokens(ByteTokenizer(), HELLO)


@pytest.mark.parametrize("tokenizer", [None, HuggingFaceTokenizer(Backend(None))])
def test_a_chat_needs_a_template(tokenizer: Any) -> None:
    with pytest.raises(RequestError, match=r"^chat: the model's tokenizer has no chat template$"):
        chat_tokens(tokenizer, HELLO)


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ([], "messages=[]: must be a list of at least one message"),
        ("Hello", "messages='Hello': must be a list of at least one message"),
        (["Hello"], "messages[0]='Hello': must have a role and a content"),
        ([{"content": "a"}], "messages[0].role=None: must be a text, such as user"),
        ([*HELLO, {"role": "user"}], "messages[1].content=None: must be a text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0]: 'image_url': a part must be a text",
        ),
        (
            [{"role": "user", "content": "bad"}],
            "messages: the template refuses them: roles must alternate",
        ),
        ([{"role": "user", "content": "unknown"}], "messages: the template refuses them: 'name'"),
    ],
)
def test_messages_that_are_none(messages: Any, line: str) -> None:
    with pytest.raises(RequestError) as error:
        chat_tokens(HuggingFaceTokenizer(Backend("x")), messages)
    assert str(error.value) == line

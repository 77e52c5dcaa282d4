"""`LLM` as users of vLLM's offline interface call it."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from pagedsim.core import RequestError, SamplingParams
from pagedsim.engine.llm import LLM
from pagedsim.engine.tokenizer import ByteTokenizer, HuggingFaceTokenizer

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
        ((None, GREEDY, 7), {}, "prompt_token_ids=7: must be a text, token ids, or a list of"),
        ((None, GREEDY, A), {"prompt_token_ids": A}, "use_tqdm=[97]: must be true or false"),
        (([[5.5]],), {}, "prompts: [5.5] must be a text or a list of token ids"),
        (("a",), {"priority": 5}, "priority=5: must be a list of numbers"),
        (("a",), {"priority": ["high"]}, "priority=['high']: must be a list of numbers"),
        (("a",), {"priority": [1, 2]}, "priority: 2 for 1 prompts"),
        (({},), {}, "prompts: has nothing: must have one of prompt and prompt_token_ids"),
        (
            ([{"prompt": "a", "multi_modal_data": {}}],),
            {},
            "prompts: has prompt, multi_modal_data: must have one of",
        ),
        (({"prompt": A},), {}, "prompts: prompt=[97]: must be a text"),
        (
            ({"prompt_token_ids": "a"},),
            {},
            "prompts: prompt_token_ids='a': must be a list of token ids",
        ),
    ],
)
def test_what_is_no_prompt(args: Any, kwargs: Any, line: str) -> None:
    with pytest.raises(RequestError) as error:
        llm().generate(*args, **kwargs)
    assert str(error.value).startswith(line)


def test_the_tiny_model_talks() -> None:
    hello = [{"role": "user", "content": "Hi"}]
    one = llm().chat(hello, GREEDY, False)
    two = llm().chat([hello, hello], GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert [bytes(answer.prompt_token_ids) for answer in one] == [b"user: Hi\nassistant:"]
    assert [bytes(answer.prompt_token_ids) for answer in two] == [b"user: Hi\n"] * 2
    with pytest.raises(RequestError, match=r"^chat_template: the tiny model has a chat format of"):
        llm().chat(hello, GREEDY, chat_template="{{ messages }}")


@pytest.mark.parametrize("messages", [None, 5, "Hi", {"role": "user", "content": "Hi"}])
def test_what_is_no_chat(messages: Any) -> None:
    with pytest.raises(RequestError) as error:
        llm().chat(messages, GREEDY)
    assert str(error.value) == f"messages={messages!r}: must be a list of messages, or of chats"


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


def test_the_engine_says_how_many_are_left() -> None:
    engine = llm().llm_engine
    assert engine is llm().engine and engine.get_num_unfinished_requests() == 0
    engine.add_request("left", "a", GREEDY)
    assert engine.get_num_unfinished_requests() == 1
    engine.abort_request("left")
    assert engine.get_num_unfinished_requests() == 0

"""Over HTTP a model says what it says to a program: the tokens of `LLM`, on the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest

from pagedsim.core import SamplingParams
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.llm import LLM
from pagedsim.engine.models import LoadedModel, load_model
from tests.serve.serving import Server, serving

SMALL: dict[str, Any] = {
    "tokenizer": "tiny",
    "device": "cpu",
    "blocks": 64,
    "block_size": 8,
    "max_model_len": 256,
}


@lru_cache
def tiny() -> LoadedModel:
    return load_model("tiny")


@lru_cache
def llm() -> LLM:
    small = {"num_gpu_blocks" if key == "blocks" else key: value for key, value in SMALL.items()}
    return LLM(tiny(), **small)


SGLANG = {**SMALL, "batching": "sglang", "memory": "radix", "policy": "lpm"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(LLMEngine(model=tiny(), **SMALL), model="tiny") as server:
        yield server


@pytest.fixture(scope="module")
def sglang() -> Iterator[Server]:
    with serving(LLMEngine(model=tiny(), **SGLANG), model="tiny") as server:
        yield server


ASKED = {
    "greedy": {"temperature": 0.0, "max_tokens": 12},
    "seeded": {"temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True},
    "cut": {"top_k": 20, "top_p": 0.9, "seed": 3, "max_tokens": 8, "n": 3, "ignore_eos": True},
    "penalised": {"presence_penalty": 1.5, "repetition_penalty": 1.3, "temperature": 0.0},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_completions_are_those_of_generate(
    server: Server, asked: dict[str, Any], stream: bool
) -> None:
    settings = {"max_tokens": 16, **asked}
    prompts = ["Once upon a time", "né 日本"]
    want = [
        (list(one.token_ids), one.text, one.finish_reason)
        for output in llm().generate(prompts, SamplingParams(**settings), use_tqdm=False)
        for one in output.outputs
    ]
    assert answers(server, {"prompt": prompts, **settings}, stream) == want


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_sglang_gives_the_same_tokens(server: Server, sglang: Server, stream: bool) -> None:
    for asked in ASKED.values():
        fields = {"prompt": ["Once upon a time", "né 日本"], "max_tokens": 16, **asked, "n": 1}
        assert answers(sglang, fields, stream) == answers(server, fields, stream)


def answers(server: Server, fields: dict[str, Any], stream: bool) -> list[tuple[Any, ...]]:
    """Tokens, text and reason of each choice."""
    client = server.openai.completions
    asked: dict[str, Any] = {"model": "tiny", "extra_body": {**fields, "return_token_ids": True}}
    prompt = fields["prompt"]
    if not stream:
        choices = client.create(prompt=prompt, **asked).choices
        return [(one.token_ids, one.text, one.finish_reason) for one in choices]
    found: dict[int, tuple[list[int], str, Any]] = {}
    for chunk in client.create(prompt=prompt, stream=True, **asked):
        (one,) = chunk.choices
        ids, text, _ = found.get(one.index, ([], "", None))
        news: Any = one
        found[one.index] = (ids + news.token_ids, text + one.text, one.finish_reason)
    return [found[index] for index in sorted(found)]


def test_a_chat_is_that_of_llm(server: Server) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    (want,) = llm().chat(messages, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    answer = server.openai.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=10
    )
    assert answer.choices[0].message.content == want.outputs[0].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(want.prompt_token_ids)


def test_stop_strings_end_an_answer_before_them(server: Server) -> None:
    client = server.openai.completions
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
    free = client.create(model="tiny", prompt="Once", **settings).choices[0].text
    stop = free[3:5]
    answer = client.create(model="tiny", prompt="Once", stop=[stop], **settings).choices[0]
    assert answer.text == free[: free.index(stop)] and answer.finish_reason == "stop"
    streamed = client.create(model="tiny", prompt="Once", stop=stop, stream=True, **settings)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_logprobs_of_completions_are_those_of_the_engine(server: Server, stream: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    (want,) = llm().generate("Once", params, use_tqdm=False)
    known = want.outputs[0].logprobs or []
    sampled = [known[i][token].logprob for i, token in enumerate(want.outputs[0].token_ids)]
    fields: dict[str, Any] = {"model": "tiny", "prompt": "Once", "temperature": 0, "max_tokens": 5}
    client = server.openai.completions
    if stream:
        chunks = client.create(logprobs=2, stream=True, **fields)
        parts = [chunk.choices[0].logprobs for chunk in chunks]
    else:
        parts = [client.create(logprobs=2, **fields).choices[0].logprobs]
    found = [one for part in parts if part for one in part.token_logprobs or []]
    offsets = [one for part in parts if part for one in part.text_offset or []]
    tops = [one for part in parts if part for one in part.top_logprobs or []]
    assert found == pytest.approx(sampled)
    assert len(offsets) == 5 and offsets == sorted(offsets) and offsets[0] == 0
    assert all(1 <= len(top) <= 2 and max(top.values()) == top_of(top) for top in tops)


def top_of(top: dict[str, float]) -> float:
    """The first, which is the most probable."""
    return next(iter(top.values()))


def test_logprobs_of_chats_have_bytes_and_as_many_others_as_asked(server: Server) -> None:
    answer = server.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 4
    for one in logprobs.content:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].logprob == one.logprob  # greedy
        assert bytes(one.bytes or []) == one.token.encode()


def test_text_goes_to_tokens_and_back(server: Server) -> None:
    told = server.post("/tokenize", prompt="né", return_token_strs=True).json()
    assert told["tokens"] == [110, 195, 169] and told["count"] == 3
    assert told["max_model_len"] == 256 and len(told["token_strs"]) == 3
    assert server.post("/detokenize", tokens=told["tokens"]).json() == {"prompt": "né"}
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "a"}]).json()
    assert bytes(chat["tokens"]) == b"user: a\nassistant:"


@pytest.mark.parametrize("settings", [{**SMALL, "memory": "prefix"}, SGLANG])
def test_cached_tokens_are_told(settings: dict[str, Any]) -> None:
    with serving(LLMEngine(model=tiny(), **settings), model="tiny") as server:
        for cached in (0, 32):
            answer = server.post("/v1/completions", prompt="x" * 40, max_tokens=2).json()
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}

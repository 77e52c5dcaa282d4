"""The official client of OpenAI, and the server's own OpenAPI page."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from tests.serve.serving import Server, paced, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(paced()) as server:
        yield server


def test_completions_are_of_16_tokens_where_nothing_is_said(server: Server) -> None:
    answer = server.openai.completions.create(model="model", prompt="Once")
    assert answer.usage is not None and answer.usage.completion_tokens == 16


@pytest.mark.parametrize(
    "prompt", [["Once", "upon"], [[1, 2], [3]]], ids=["texts", "lists of token ids"]
)
def test_several_prompts_have_their_choices_one_after_another(
    server: Server, prompt: list[str] | list[list[int]]
) -> None:
    answer = server.openai.completions.create(model="model", prompt=prompt, max_tokens=2, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in answer.choices} == {" 1 2"}
    assert answer.usage is not None and answer.usage.completion_tokens == 8


def test_echo_begins_with_the_prompt(server: Server) -> None:
    answer = server.openai.completions.create(model="model", prompt="Once", max_tokens=1, echo=True)
    assert answer.choices[0].text == "Once 1"


def test_a_stream_has_every_token_once_and_in_order_and_its_usage_last(server: Server) -> None:
    stream = server.openai.completions.create(
        model="model",
        prompt=["Once", "upon a time"],
        max_tokens=20,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    texts = [""] * 4
    for chunk in chunks:
        (choice,) = chunk.choices
        assert choice.text.count(" ") == 1 and chunk.usage is None
        texts[choice.index] += choice.text
    assert texts == ["".join(f" {i}" for i in range(1, 21))] * 4
    assert not last.choices and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 80)


def test_a_chat_answers_as_the_assistant(server: Server) -> None:
    answer = server.openai.chat.completions.create(
        model="model",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        ],
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == " 1 2 3 4 5 6 7 8"  # as long as answers are here
    assert choice.finish_reason == "stop"
    prompt = "system: Be brief.\nuser: Hello\nassistant:"
    assert answer.usage is not None and answer.usage.prompt_tokens == -(-len(prompt) // 4)


def test_a_chat_streams_its_role_first(server: Server) -> None:
    chunks = list(
        server.openai.chat.completions.create(
            model="model",
            messages=[{"role": "user", "content": "Hello"}],
            max_completion_tokens=4,
            stream=True,
        )
    )
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None, None]
    assert [chunk.choices[0].delta.content for chunk in chunks] == [" 1", " 2", " 3", " 4"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "length"]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_models_are_listed_and_found(server: Server) -> None:
    assert [model.id for model in server.openai.models.list()] == ["model"]
    assert server.openai.models.retrieve("model").owned_by == "pagedsim"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        server.openai.models.retrieve("another")


def test_errors_are_those_of_the_client(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        server.openai.completions.create(model="gpt", prompt="Once")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        server.openai.completions.create(model="model", prompt="Once", max_tokens=-1)
    assert bad.value.type == "invalid_request_error" and bad.value.param == "max_tokens"


def test_a_later_answer_is_fetched_by_its_id(server: Server) -> None:
    name = server.post("/generate", prompt="Once", max_tokens=3).json()["request_id"]
    for _ in range(500):
        result = server.http.get(f"/result/{name}").json()
        if result["state"] == "finished":
            break
        assert result["state"] in ("queued", "running")
    assert result["text"] == " 1 2 3" and result["token_ids"] == [1, 2, 3]
    assert result["finish_reason"] == "length" and result["error"] is None


PATHS = {
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}", "/generate",
    "/result/{name}", "/tokenize", "/detokenize", "/health", "/ping", "/version",
}  # fmt: skip


@pytest.fixture(scope="module")
def fast() -> Iterator[Server]:
    with serving(paced(speed=1e6), max_body=100_000) as fast:
        yield fast


def tried(server: Server, examples: int, paths: Collection[str] = PATHS) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        if found.ok().path in paths:
            answered(found.ok(), examples)


def answered(operation: schemathesis.APIOperation, examples: int) -> None:
    @given(data=st.data())
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def answers(data: st.DataObject) -> None:
        modes = list(schemathesis.GenerationMode)
        case = data.draw(operation.as_strategy(data.draw(st.sampled_from(modes))))
        response = case.call(timeout=30)
        if response.status_code != 504:  # its own `timeout`, which may be short
            case.validate_response(response, checks=[not_a_server_error])

    answers()


def test_no_request_of_its_kind_is_answered_with_a_fault(fast: Server) -> None:
    tried(fast, 6, ["/v1/chat/completions", "/result/{name}", "/detokenize"])


@pytest.mark.slow
def test_nor_are_many_of_every_kind(fast: Server) -> None:
    tried(fast, 100)

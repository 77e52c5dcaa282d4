"""Conversations as prompts: what a message may be, and whose words it is put into."""

from __future__ import annotations

from typing import Any

import pytest

from pagedsim.core import RequestError
from pagedsim.engine.tokenizer import ByteTokenizer, HuggingFaceTokenizer, chat_tokens

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
    chat = [{"role": "system", "content": "Be brief."}, *HELLO]
    text = bytes(chat_tokens(ByteTokenizer(), chat)).decode()
    assert text == "system: Be brief.\nuser: Hello\nassistant:"
    assert bytes(chat_tokens(ByteTokenizer(), HELLO, False)) == b"user: Hello\n"
    with pytest.raises(RequestError, match=r"^chat_template: the tiny model has"):
        chat_tokens(ByteTokenizer(), HELLO, chat_template="x")


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

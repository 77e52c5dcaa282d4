"""Chat templates: from a conversation to prompt tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from pagedsim.core import RequestError
from pagedsim.engine.models.source import brief
from pagedsim.engine.tokenizer import NO_TEMPLATE

Message = Mapping[str, Any]
"""A `role` and a `content`: a text, or parts that are texts; more, where a template reads it."""

Chat = Sequence[Message]


@runtime_checkable
class Converses(Protocol):
    """A tokenizer that knows how its model wants conversations to be written."""

    def chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool, **settings: Any
    ) -> list[int]:
        """The tokens of a conversation; with `add_generation_prompt`, up to the next answer.

        `settings` are a template's own. Raises RequestError where there is no template.
        """


def chat_tokens(
    tokenizer: object,
    messages: Chat,
    add_generation_prompt: bool = True,
    **settings: Any,
) -> list[int]:
    """The prompt that a conversation is to a model, in the words of its chat template.

    `settings` go to the template, such as a `chat_template` in the place of the model's own.
    Raises RequestError for messages that are none, and where there is no template.

    >>> from pagedsim.engine.tokenizer import ByteTokenizer
    >>> bytes(chat_tokens(ByteTokenizer(), [{"role": "user", "content": "Hello"}]))
    b'user: Hello\\nassistant:'
    """
    given = _checked(messages)
    if not isinstance(tokenizer, Converses):
        raise RequestError(NO_TEMPLATE)
    try:
        return tokenizer.chat(given, add_generation_prompt=add_generation_prompt, **settings)
    except RequestError:
        raise
    except Exception as error:  # a template raises what it likes
        raise RequestError(f"messages: the template refuses them: {brief(error)}") from error


def _checked(messages: Any) -> list[dict[str, Any]]:
    """The messages with their contents as texts."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"messages={messages!r}: must be a list of at least one message")
    return [_message(f"messages[{place}]", one) for place, one in enumerate(messages)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}={message!r}: must have a role and a content")
    if not isinstance(role := message.get("role"), str) or not role:
        raise RequestError(f"{where}.role={role!r}: must be a text, such as user")
    return {**message, "content": _text(f"{where}.content", message.get("content"))}


def _text(where: str, content: Any) -> str:
    """The text of a message's content, which may be a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where}={content!r}: must be a text")
    for place, part in enumerate(content):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise RequestError(f"{where}[{place}]: {kind!r}: a part must be a text")
    return "".join(part["text"] for part in content)

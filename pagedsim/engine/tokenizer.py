"""Tokenizers, and chat templates: from a text or a conversation to tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pagedsim.core.errors import ConfigError, RequestError
from pagedsim.engine.models.source import brief, folder_of
from pagedsim.engine.models.weights import TINY, TINY_EOS

VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json",
    "spiece.model", "sentencepiece.bpe.model", "tiktoken.model",
)  # fmt: skip
"""The files of which a folder with a tokenizer has at least one."""

NO_TEMPLATE = "chat: the model's tokenizer has no chat template"


class Tokenizer(Protocol):
    """A tokenizer for the engine; `chat`, as below, is optional."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, special tokens around it included."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""


class ByteTokenizer:
    """The tiny model's tokenizer: a token is a byte of UTF-8; other tokens have no text.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né")
    [110, 195, 169]
    >>> tokenizer.decode([110, 195, 169, tokenizer.eos_token_id, 500])
    'né'
    """

    eos_token_id: int = TINY_EOS

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool, **settings: Any
    ) -> list[int]:
        """One line per message; the untrained model has no template."""
        if settings:
            raise RequestError(
                f"{next(iter(settings))}: the tiny model has a chat format of its own"
            )
        lines = [f"{one['role']}: {one['content']}\n" for one in messages]
        return self.encode("".join(lines) + "assistant:" * add_generation_prompt)


class HuggingFaceTokenizer:
    """A tokenizer of transformers."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.eos_token_id: int | None = backend.eos_token_id

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.backend.decode(
            list(ids),
            skip_special_tokens=True,
            # Would take back spaces that an incremental text has long shown.
            clean_up_tokenization_spaces=False,
        )
        return text

    def chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool, **settings: Any
    ) -> list[int]:
        """Tokens by the model's chat template, or by another `chat_template`."""
        if getattr(self.backend, "chat_template", None) is None and "chat_template" not in settings:
            raise RequestError(NO_TEMPLATE)
        encoded = self.backend.apply_chat_template(
            list(messages),
            tokenize=True,
            return_dict=True,
            add_generation_prompt=add_generation_prompt,
            **settings,
        )
        return list(encoded["input_ids"])


def wrapped(tokenizer: Any) -> Tokenizer:
    """Wrap a transformers tokenizer; return any other as it is."""
    ours = not hasattr(tokenizer, "convert_ids_to_tokens")
    return tokenizer if ours else HuggingFaceTokenizer(tokenizer)


def load_tokenizer(model: str | os.PathLike[str] | Any) -> Tokenizer | None:
    """The tokenizer of a model as `load_model` takes it; None where there is none.

    `"tiny"`, `"smollm2"`, a GGUF file, a folder or a name on the Hugging Face hub; a transformers
    object has no tokenizer, and neither has a folder without a vocabulary. Raises ConfigError for
    one that is broken.
    """
    if not isinstance(model, str | os.PathLike):
        return None
    if model == TINY:
        return ByteTokenizer()
    folder = folder_of(model)
    if folder is not None and not any((folder / name).is_file() for name in VOCABULARIES):
        return None
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(os.fspath(folder or model))
    except Exception as error:  # transformers may raise anything
        raise ConfigError(
            f"model={model}: its tokenizer cannot be loaded: {brief(error)}"
        ) from error
    if len(backend) <= len(set(backend.all_special_ids)):  # made up, for want of files
        return None
    return HuggingFaceTokenizer(backend)


Message = Mapping[str, Any]
"""A `role` and a `content`, a text or text parts; and whatever else the template reads."""

Chat = Sequence[Message]


def chat_tokens(
    tokenizer: object,
    messages: Chat,
    add_generation_prompt: bool = True,
    **settings: Any,
) -> list[int]:
    """The prompt tokens of a conversation by the model's chat template.

    With `add_generation_prompt` they end where the next answer begins. `settings` go to the
    template, such as a `chat_template` in place of the model's own. Raises RequestError for
    malformed messages, and where there is no template.

    >>> bytes(chat_tokens(ByteTokenizer(), [{"role": "user", "content": "Hello"}]))
    b'user: Hello\\nassistant:'
    """
    given = _checked(messages)
    chat: Callable[..., list[int]] | None = getattr(tokenizer, "chat", None)
    if chat is None:
        raise RequestError(NO_TEMPLATE)
    try:
        return chat(given, add_generation_prompt=add_generation_prompt, **settings)
    except RequestError:
        raise
    except Exception as error:  # a template may raise anything
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

"""Text to tokens and back, and a sequence's text while it grows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from pagedsim.core.errors import ConfigError, RequestError
from pagedsim.engine.models.source import brief, folder_of
from pagedsim.engine.models.weights import TINY, TINY_EOS

VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json",
    "spiece.model", "sentencepiece.bpe.model", "tiktoken.model",
)  # fmt: skip
"""The files of which a folder with a tokenizer has at least one."""

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""What bytes decode to that are not a character, or not yet."""

NO_TEMPLATE = "chat: the model's tokenizer has no chat template"


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with what the tokenizer puts around one."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""


class ByteTokenizer:
    """The tiny model's tokenizer: a token is a byte of UTF-8, and what is no byte has no text.

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
        """As the model's chat template, or another `chat_template`, puts it."""
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
    """A tokenizer of ours as it is, one of transformers' as the engine calls it."""
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
    except Exception as error:  # transformers raises what comes
        raise ConfigError(
            f"model={model}: its tokenizer cannot be loaded: {brief(error)}"
        ) from error
    if len(backend) <= len(set(backend.all_special_ids)):  # made up, for want of files
        return None
    return HuggingFaceTokenizer(backend)


class Detokenizer:
    """The text of one sequence, token by token.

    A token's text may depend on its neighbours: bytes join to a character, a word loses its space
    at the beginning of a text. So new tokens are decoded behind some whose text is out already,
    and what goes beyond their text is new. Text that ends in half a character waits for the rest.

    >>> detokenizer = Detokenizer(ByteTokenizer())
    >>> [detokenizer.push(token) for token in (110, 195, 169)]
    ['n', '', 'é']
    """

    PROMPT = 6
    """How many of the prompt's last tokens the first ones of the output are decoded behind."""
    PATIENCE = 64
    """Tokens without an end in sight; by then it is no character that is being spelled."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._shown = 0
        """How much of the pending tokens' text is out."""
        self._context: list[int] = []
        self._context_length = 0
        self._stand_on(list(prompt[-self.PROMPT :]))
        # A prompt may end within a character; then the output spells the rest of it.
        self._context_length = len(self._decode(self._context).rstrip(UNKNOWN))

    def push(self, token: int) -> str:
        """Take the next token; returns the text that is certain now and was not before."""
        self._pending.append(token)
        text = self._pending_text()
        whole = text.rstrip(UNKNOWN)
        if len(whole) < len(text) and len(self._pending) < self.PATIENCE:
            return self._show(whole)
        new = self._show(text)
        if text:
            self._stand_on(self._pending)
        elif len(self._pending) >= self.PATIENCE:  # special tokens, which have no text
            self._pending = []
        return new

    def finish(self) -> str:
        """The rest: there will be no more tokens, and half a character is what it is."""
        return self._show(self._pending_text())

    def copy(self) -> Detokenizer:
        """The same for a sequence that begins as this one did."""
        twin = Detokenizer(self._tokenizer)
        twin.text, twin._shown = self.text, self._shown
        twin._pending, twin._context = list(self._pending), self._context
        twin._context_length = self._context_length
        return twin

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        return self._decode(self._context + self._pending)[self._context_length :]

    def _show(self, text: str) -> str:
        new = text[self._shown :]
        self._shown += len(new)
        self.text += new
        return new

    def _stand_on(self, tokens: list[int]) -> None:
        """Decode what follows behind these tokens, whose text is out."""
        self._context, self._pending, self._shown = tokens, [], 0
        self._context_length = len(self._decode(tokens))

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens) if tokens else ""

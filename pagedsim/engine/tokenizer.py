"""Tokenizers and chat templates; the text of a sequence while it grows, and what ends it.

A stop string may span tokens, and a token may hold more than a stop string. The result does not
depend on how the text is cut into tokens: the stop string that is complete first ends the text, and
of those complete at the same character the longest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from pagedsim.core import SamplingParams
from pagedsim.core.errors import ConfigError, RequestError
from pagedsim.engine.models.source import folder_of
from pagedsim.engine.models.transformers_io import brief
from pagedsim.engine.models.weights import TINY, TINY_EOS
from pagedsim.engine.output import Tokenizer

VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json",
    "spiece.model", "sentencepiece.bpe.model", "tiktoken.model",
)  # fmt: skip
"""The files of which a folder with a tokenizer has at least one."""

NO_TEMPLATE = "chat: the model's tokenizer has no chat template"


class ByteTokenizer:
    """The tiny model's tokenizer: a token is a byte of UTF-8; other tokens have no text.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né")
    [110, 195, 169]
    >>> tokenizer.decode([110, 195, 169, tokenizer.eos_token_id, 500])
    'né'
    """

    eos_token_id: int = TINY_EOS

    def __init__(self) -> None:
        self.apart = cache(lambda token: self.decode([token]))

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
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant:" * add_generation_prompt)


class HuggingFaceTokenizer:
    """A tokenizer of transformers."""

    def __init__(self, backend: Any) -> None:
        from transformers import PreTrainedTokenizerFast as Fast

        self.backend = backend
        self._fast: Any = None
        """What decodes, if the class of `backend` adds nothing to it but time."""
        kind: Any = type(backend)
        if isinstance(backend, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode):
            self._fast = backend.backend_tokenizer
        self.apart: Callable[[int], str] | None = None
        """A token's text behind any text, if it is of whole characters; None where it may depend on
        more of the text."""
        if (decoder := getattr(self._fast, "decoder", None)) is None:
            return
        kind = json.loads(decoder.__getstate__())
        if kind["type"] == "ByteLevel":
            self.apart = cache(lambda token: self.decode([token]))
        elif all(part in APART for part in kind.get("decoders", [kind])):
            letter = backend.encode("a", add_special_tokens=False)
            if length := len(self.decode(letter)):
                self.apart = cache(lambda token: self.decode([*letter, token])[length:])

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        text: str
        if self._fast is not None:
            text = self._fast.decode(ids, skip_special_tokens=True)
            return text
        text = self.backend.decode(
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


APART: Sequence[Mapping[str, Any]] = (
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)
"""Decoders of SentencePiece's tokens. As with bytes, a token's text depends on what comes before
only if that is half a character or nothing."""


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
    some: Any = messages
    if not isinstance(some, Sequence) or isinstance(some, str) or not some:
        raise RequestError(f"messages={some!r}: must be a list of at least one message")
    given = [_message(f"messages[{place}]", message) for place, message in enumerate(messages)]
    chat: Callable[..., list[int]] | None = getattr(tokenizer, "chat", None)
    if chat is None:
        raise RequestError(NO_TEMPLATE)
    try:
        return chat(given, add_generation_prompt=add_generation_prompt, **settings)
    except RequestError:
        raise
    except Exception as error:  # a template may raise anything
        raise RequestError(f"messages: the template refuses them: {brief(error)}") from error


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


# A sequence's text

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""The text of bytes that are no character, or not yet."""


def ends_of(params: SamplingParams, eos: Collection[int]) -> frozenset[int]:
    """The tokens that end a sequence; `eos` are the model's own."""
    return frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos)


class Detokenizer:
    """The text of one sequence, token by token.

    A token's text may depend on its neighbours: bytes join to a character, a word loses its space
    at the beginning of a text. So new tokens are decoded behind some whose text is known, and the
    text beyond that is new. Text that ends in half a character waits for the rest.

    >>> from pagedsim.engine.tokenizer import ByteTokenizer
    >>> detokenizer = Detokenizer(ByteTokenizer())
    >>> [detokenizer.push(token) for token in (110, 195, 169)]
    ['n', '', 'é']
    """

    PROMPT = 6
    """Tokens at the prompt's end behind which the first output tokens are decoded."""
    MAX_PENDING = 64
    """Tokens after which pending bytes cannot become a character any more."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._apart: Callable[[int], str] | None = getattr(tokenizer, "apart", None)
        self._whole = False
        """Whether the context has a text that does not end within a character."""
        self._pending: list[int] = []
        self._shown = 0
        """Characters of the pending tokens' text that were returned."""
        self._context: list[int] = []
        self._context_length = 0
        self._stand_on(list(prompt[-self.PROMPT :]))
        # A prompt may end within a character; then the output spells the rest of it.
        self._context_length = len(self._decode(self._context).rstrip(UNKNOWN))

    def push(self, token: int) -> str:
        """Take the next token; returns the text that has become certain."""
        if self._whole and self._apart is not None:
            text = self._apart(token)
            if text and text[-1] != UNKNOWN:
                self._context = [token]
                return text
            self._stand_on(self._context)
            self._whole = False
        self._pending.append(token)
        text = self._pending_text()
        whole = text.rstrip(UNKNOWN)
        if len(whole) < len(text) and len(self._pending) < self.MAX_PENDING:
            return self._show(whole)
        new = self._show(text)
        if text:
            self._stand_on(self._pending)
        elif len(self._pending) >= self.MAX_PENDING:  # special tokens, which have no text
            self._pending = []
        return new

    def finish(self) -> str:
        """The remaining text, with an incomplete character as it is."""
        return self._show(self._pending_text())

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        return self._decode(self._context + self._pending)[self._context_length :]

    def _show(self, text: str) -> str:
        new = text[self._shown :]
        self._shown += len(new)
        return new

    def _stand_on(self, tokens: list[int]) -> None:
        """Decode following tokens behind these, whose text was returned."""
        self._context, self._pending, self._shown = tokens, [], 0
        text = self._decode(tokens)
        self._context_length = len(text)
        self._whole = text != "" and text[-1] != UNKNOWN

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens) if tokens else ""


class Text:
    """The text of one sequence, with its stop strings."""

    def __init__(
        self,
        streamer: Callable[[], Detokenizer],
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        self._streamer = streamer()
        self._stops = stops
        self._lasts = frozenset(stop[-1] for stop in stops)
        """Characters that may complete a stop string."""
        self._include = include_stop
        self._ended = False
        self.text = ""
        """The text so far, including characters that are held back."""
        self.tokens = 0
        """Tokens that were pushed."""
        self._given = 0  # characters that `news` has returned

    def push(self, token: int, *, watch: bool = True) -> str | None:
        """Add a token; returns the stop string that it completes, if any, and with `watch`."""
        self.tokens += 1
        new = self._streamer.push(token)
        known = len(self.text)
        self.text += new
        if not watch or self._lasts.isdisjoint(new) or self._ended:
            return None
        return self._cut(known)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Add those of `tokens` that were not pushed yet; stop strings are not looked for."""
        for token in tokens[self.tokens :]:
            self.text += self._streamer.push(token)
            self.tokens += 1

    def finish(self) -> None:
        """End the text: no token follows."""
        if not self._ended:
            self._ended = True
            self.text += self._streamer.finish()

    @property
    def shown(self) -> str:
        """The text without an end that may be the beginning of a stop string."""
        return self.text[: self._certain()]

    def news(self) -> str:
        """The part of `shown` that no call has returned yet; it is final."""
        text, known = self.text, self._given
        self._given = certain = self._certain() if self._stops else len(text)
        return text[known:certain]

    def _certain(self) -> int:
        """Characters of `shown`."""
        held = 0 if self._ended else held_back(self.text, self._stops)
        return len(self.text) - held

    def _cut(self, known: int) -> str | None:
        """Look for a stop string that ends after the first `known` characters, and cut there."""
        match = first_stop(self.text, self._stops, known)
        if match is None:
            return None
        stop, start = match
        self.text = self.text[: start + len(stop) if self._include else start]
        self._ended = True
        return stop


def first_stop(text: str, stops: Sequence[str], known: int = 0) -> tuple[str, int] | None:
    """The stop string that `text` completes first after its first `known` characters, and where.

    >>> first_stop("one, two", (", t", "two", ","))
    (',', 3)
    """
    best: tuple[int, int, str] | None = None  # end, start
    for stop in stops:
        start = text.find(stop, max(0, known - len(stop) + 1))
        if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
            best = (start + len(stop), start, stop)
    return None if best is None else (best[2], best[1])


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a stop string.

    >>> held_back("a cat sat", ("at the", "tt"))
    2
    """
    longest = min(max(map(len, stops), default=0) - 1, len(text))
    for size in range(longest, 0, -1):
        tail = text[len(text) - size :]
        if any(len(stop) > size and stop.startswith(tail) for stop in stops):
            return size
    return 0

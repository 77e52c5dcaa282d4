"""Texts and conversations to tokens and back, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pagedsim.core import PagedsimError
from pagedsim.serve.api.errors import BadRequest, brief
from pagedsim.serve.backend import Tokenizer

T = TypeVar("T")

SHORT = 8192
"""Characters that are encoded in no time; the other texts' turn comes in a thread."""


class AsyncTokenizer:
    """The engine's tokenizer, as clients may use it."""

    def __init__(self, tokenizer: Tokenizer | None, model: str) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._thread = ThreadPoolExecutor(1, "tokenizer")

    async def tokens(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """The tokens of prompts, which together may be long."""
        texts = [one for one in prompts if isinstance(one, str)]
        if not texts:
            return [one for one in prompts if not isinstance(one, str)]
        encode = self._known("prompt").encode
        return await self.apart(
            sum(map(len, texts)),
            lambda: [encode(one) if isinstance(one, str) else one for one in prompts],
        )

    async def chat(self, messages: Sequence[dict[str, str]], prompting: bool = True) -> list[int]:
        """The prompt that a conversation is; with `prompting`, up to where an answer begins."""
        chat: Callable[..., list[int]] | None = getattr(self._known("messages"), "chat", None)
        if chat is None:
            raise BadRequest(f"messages: {self._model} has no chat template")
        size = sum(len(message["content"]) for message in messages)
        try:
            return await self.apart(size, lambda: chat(messages, add_generation_prompt=prompting))
        except PagedsimError as error:
            raise BadRequest(f"messages: {error}") from error
        except Exception as error:  # a template raises what it likes
            raise BadRequest(f"messages: the template refuses them: {brief(str(error))}") from error

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self._known("tokens").decode(ids)

    async def long_text(self, ids: Sequence[int]) -> str:
        """The same, of tokens that may be many."""
        decode = self._known("tokens").decode
        return await self.apart(len(ids), lambda: decode(ids))

    def token(self, token: int) -> str:
        """One token as a text, for whoever lists tokens."""
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.decode([token])

    async def apart(self, size: int, work: Callable[[], T]) -> T:
        """What `work` gives; in a thread, if it goes over so many characters or tokens."""
        if size <= SHORT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _known(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise BadRequest(f"{what}: {self._model} has no tokenizer; give a prompt of token ids")
        return self._tokenizer

"""Tokenisation of texts and conversations without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pagedsim.core import PagedsimError
from pagedsim.engine.output import Tokenizer
from pagedsim.serve.api.errors import BadRequest, brief

T = TypeVar("T")

SHORT = 8192
"""Characters or tokens that are processed on the event loop; more go to a thread."""
THREAD = ThreadPoolExecutor(1, "large")
"""A single thread for large bodies and long texts, so that at most one holds the GIL."""


class AsyncTokenizer:
    """The engine's tokenizer with asynchronous methods."""

    def __init__(self, tokenizer: Tokenizer | None, model: str) -> None:
        self._tokenizer, self._model = tokenizer, model

    async def tokens(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [prompt for prompt in prompts if not isinstance(prompt, str)]
        encode = self._known("prompt").encode
        return await self.apart(
            sum(map(len, texts)),
            lambda: [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts],
        )

    async def chat(self, messages: Sequence[dict[str, str]], prompting: bool = True) -> list[int]:
        """Encode a conversation; with `prompting`, including the generation prompt."""
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

    async def long_text(self, ids: Sequence[int]) -> str:
        """Decode tokens, in a thread if there are many."""
        decode = self._known("tokens").decode
        return await self.apart(len(ids), lambda: decode(ids))

    def token(self, token: int) -> str:
        """The text of a single token."""
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.decode([token])

    async def apart(self, size: int, work: Callable[[], T]) -> T:
        """Run `work`; in a thread if `size` exceeds SHORT characters or tokens."""
        if size <= SHORT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(THREAD, work)

    def _known(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise BadRequest(f"{what}: {self._model} has no tokenizer; give a prompt of token ids")
        return self._tokenizer

"""Response bodies in OpenAI's format: whole answers, and chunks of a stream."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, ClassVar

from pagedsim.engine.output import CompletionOutput, Logprob, RequestOutput
from pagedsim.serve.api.schema import ChatRequest, Choices, CompletionRequest, ParsedRequest
from pagedsim.serve.api.tokenise import AsyncTokenizer

LEAST = -9999.0
"""Substitute for -inf, which JSON cannot represent."""


_TEXT, _COMPLETION, _TOTAL = "\0", "\1", "\2"
"""Placeholders for a chunk's text and numbers in its frame."""


DONE = "data: [DONE]\n\n"
"""Terminates every stream, also after an error."""


class Reply(ABC):
    """The response to one request, for any number of prompts with `n` choices each."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self, parsed: ParsedRequest, model: str, fields: Choices, tokenizer: AsyncTokenizer
    ) -> None:
        self.fields, self.prompts, self.tokenizer = fields, parsed.prompts, tokenizer
        self.echoes = [""] * len(parsed.prompts)
        """Text that each choice of a prompt begins with (`echo`)."""
        self._prompt_tokens = sum(map(len, parsed.prompts))
        self._completion_tokens = self._cached_tokens = 0
        self._head = {"id": parsed.name, "created": int(time.time()), "model": model}
        self._frames: dict[int, tuple[str, str]] = {}
        """JSON before and behind the text in intermediate chunks, by choice."""
        self._offsets: dict[int, int] = {}
        self._plain = not (fields.return_token_ids or self.scored)

    @property
    @abstractmethod
    def scored(self) -> bool:
        """Whether logprobs were requested."""

    @abstractmethod
    def choice(self, output: CompletionOutput, text: str, scores: Any) -> dict[str, Any]:
        """A complete choice, without the fields common to all formats."""

    @abstractmethod
    def piece(self, text: str, first: bool, scores: Any) -> dict[str, Any]:
        """The delta of a choice."""

    @abstractmethod
    def scores(self, output: CompletionOutput, offset: int) -> Any:
        """Logprobs of an output that starts at character `offset`."""

    # -- whole -----------------------------------------------------------------------------------

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The complete response, from one output per prompt."""
        choices = []
        for place, output in enumerate(outputs):
            self._completion_tokens += sum(
                len(completion.token_ids) for completion in output.outputs
            )
            self._cached_tokens += output.metrics.cached_tokens
            choices += [self._choice(place, completion) for completion in output.outputs]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def _choice(self, place: int, output: CompletionOutput) -> dict[str, Any]:
        scores = self.scores(output, 0) if self.scored else None
        return {
            "index": place * self.fields.n + output.index,
            **self.choice(output, self.echoes[place] + output.text, scores),
            **self._ends(output),
            **self._ids(place, output, first=True),
        }

    # -- in chunks -------------------------------------------------------------------------------

    def events(self, place: int, outputs: Sequence[RequestOutput]) -> bytes:
        """New outputs of a prompt as events, one per step and choice."""
        frames, plain, numbers = self._frames, self._plain, self.fields.reports_usage_in_chunks
        base = place * self.fields.n
        events: list[str] = []
        for output in outputs:
            for completion in output.outputs:
                self._completion_tokens += len(completion.token_ids)
                frame = frames.get(base + completion.index)
                if frame is None or not plain or completion.finish_reason is not None:
                    events.append(self._event(place, completion, frame is None))
                    continue
                before, behind = frame
                if numbers:
                    tokens = self._completion_tokens
                    behind = behind % (tokens, self._prompt_tokens + tokens)
                events.append(f"{before}{quoted(completion.text)}{behind}")
            if output.finished:
                self._cached_tokens += output.metrics.cached_tokens
        return "".join(events).encode()

    def _event(self, place: int, output: CompletionOutput, first: bool) -> str:
        index = place * self.fields.n + output.index
        text = output.text
        if first:
            self._frames[index] = self._frame(index)
            text = self.echoes[place] + text
        scores = None
        if self.scored:
            offset = self._offsets.get(index, 0)
            self._offsets[index] = offset + len(text)
            scores = self.scores(output, offset)
        choice = {
            "index": index,
            **self.piece(text, first, scores),
            **self._ends(output),
            **self._ids(place, output, first),
        }
        return event(
            self._chunk([choice], self._usage() if self.fields.reports_usage_in_chunks else None)
        )

    def last(self) -> bytes:
        """The final events of a stream."""
        end = DONE
        if self.fields.reports_usage:
            end = event(self._chunk([], self._usage())) + end
        return end.encode()

    def _chunk(self, choices: list[Any], usage: Any) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        return {**chunk, "usage": usage} if self.fields.reports_usage else chunk

    def _frame(self, index: int) -> tuple[str, str]:
        """A pre-serialised chunk around its text, behind which two usage fields may be filled."""
        numbers = self.fields.reports_usage_in_chunks
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": _COMPLETION,
            "total_tokens": _TOTAL,
        }
        choice = {"index": index, **self.piece(_TEXT, False, None), "finish_reason": None}
        chunk = event(self._chunk([choice], usage if numbers else None))
        before, _, behind = chunk.partition(quoted(_TEXT))
        if numbers:
            behind = behind.replace("%", "%%")
            for number in (_COMPLETION, _TOTAL):
                behind = behind.replace(quoted(number), "%d")
        return before, behind

    # -- both ------------------------------------------------------------------------------------

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def _ends(self, output: CompletionOutput) -> dict[str, Any]:
        if output.finish_reason is None:
            return {"finish_reason": None}
        return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}

    def _ids(self, place: int, output: CompletionOutput, first: bool) -> dict[str, Any]:
        """Token ids if requested, in the first chunk with those of the prompt."""
        if not self.fields.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": list(self.prompts[place])} if first else {}
        return {"token_ids": list(output.token_ids), **prompt}


def event(plain: object) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(plain, separators=(',', ':'))}\n\n"


class ChatReply(Reply):
    """Responses of `POST /v1/chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    fields: ChatRequest

    @property
    def scored(self) -> bool:
        return self.fields.logprobs

    def choice(self, output: CompletionOutput, text: str, scores: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": scores}

    def piece(self, text: str, first: bool, scores: Any) -> dict[str, Any]:
        # The role comes with the first text: a chunk of its own would look like a token.
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, "content": text}, "logprobs": scores}

    def scores(self, output: CompletionOutput, offset: int) -> Any:
        content = []
        for token, known in zip(output.token_ids, output.logprobs or (), strict=True):
            best = [
                candidate
                for candidate in _ranked(known)
                if candidate[1].rank <= self.fields.top_logprobs
            ]
            top = [self._entry(*candidate) for candidate in best]
            content.append({**self._entry(token, known[token]), "top_logprobs": top})
        return {"content": content}

    def _entry(self, token: int, known: Logprob) -> dict[str, Any]:
        text = self.tokenizer.token(token)
        return {"token": text, "logprob": _number(known), "bytes": list(text.encode())}


class CompletionReply(Reply):
    """Responses of `POST /v1/completions`."""

    kind = chunk_kind = "text_completion"
    fields: CompletionRequest

    async def echo(self) -> None:
        """Prepend its prompt to every choice."""
        self.echoes = [
            prompt if isinstance(prompt, str) else await self.tokenizer.long_text(prompt)
            for prompt in self.fields.prompt
        ]

    @property
    def scored(self) -> bool:
        return self.fields.logprobs is not None

    def choice(self, output: CompletionOutput, text: str, scores: Any) -> dict[str, Any]:
        return {"text": text, "logprobs": scores}

    def piece(self, text: str, first: bool, scores: Any) -> dict[str, Any]:
        return {"text": text, "logprobs": scores}

    def scores(self, output: CompletionOutput, offset: int) -> Any:
        tokens: list[str] = []
        offsets: list[int] = []
        logprobs: list[float] = []
        tops: list[dict[str, float]] = []
        for token, known in zip(output.token_ids, output.logprobs or (), strict=True):
            tokens.append(self.tokenizer.token(token))
            offsets.append(offset)
            offset += len(tokens[-1])
            logprobs.append(_number(known[token]))
            tops.append({})
            for other, logprob in _ranked(known):
                tops[-1].setdefault(self.tokenizer.token(other), _number(logprob))
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _ranked(known: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(known.items(), key=lambda item: item[1].rank)


def _number(known: Logprob) -> float:
    return max(known.logprob, LEAST)

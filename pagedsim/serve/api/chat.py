"""`POST /v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

from typing import Any

from pagedsim.engine.output import CompletionOutput
from pagedsim.serve.api.fields import ChatRequest
from pagedsim.serve.api.logprobs import of_messages
from pagedsim.serve.api.reply import Reply


class Messages(Reply):
    """Choices that are messages."""

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
        return of_messages(output, self.words, self.fields.top_logprobs)

"""`POST /v1/completions`: prompts go on."""

from __future__ import annotations

from typing import Any

from pagedsim.engine.output import CompletionOutput
from pagedsim.serve.api.fields import CompletionRequest
from pagedsim.serve.api.logprobs import of_texts
from pagedsim.serve.api.problem import Bad
from pagedsim.serve.api.reply import Reply


class Texts(Reply):
    """Choices that are texts."""

    kind = chunk_kind = "text_completion"
    fields: CompletionRequest

    async def echo(self) -> None:
        """Have every choice begin with its prompt."""
        given = self.fields.prompt
        self.echoes = [
            one if isinstance(one, str) else await self.words.long_text(one) for one in given
        ]

    @property
    def scored(self) -> bool:
        return self.fields.logprobs is not None

    def choice(self, output: CompletionOutput, text: str, scores: Any) -> dict[str, Any]:
        return {"text": text, "logprobs": scores}

    def piece(self, text: str, first: bool, scores: Any) -> dict[str, Any]:
        return {"text": text, "logprobs": scores}

    def scores(self, output: CompletionOutput, offset: int) -> Any:
        return of_texts(output, self.words, offset)


def refuse_misfits(fields: CompletionRequest) -> None:
    """Raise Bad for settings that do not go together."""
    if fields.stream and (fields.best_of or 0) > fields.n:
        raise Bad(f"best_of={fields.best_of}: with stream, must be n={fields.n}")
    if fields.echo and fields.logprobs is not None:
        raise Bad("logprobs: with echo, must be null: a prompt's are not computed")

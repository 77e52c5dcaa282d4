"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from typing import Any

from pagedsim.engine.output import CompletionOutput, Logprob
from pagedsim.serve.api.words import Words

LEAST = -9999.0
"""In the place of minus infinity, which JSON has not."""


def of_texts(output: CompletionOutput, words: Words, offset: int) -> dict[str, Any]:
    """As completions have them; the text begins `offset` characters into the answer."""
    tokens: list[str] = []
    offsets: list[int] = []
    logprobs: list[float] = []
    tops: list[dict[str, float]] = []
    for token, known in zip(output.token_ids, output.logprobs or (), strict=True):
        tokens.append(words.token(token))
        offsets.append(offset)
        offset += len(tokens[-1])
        logprobs.append(_number(known[token]))
        tops.append({})
        for other, one in sorted(known.items(), key=_rank):
            tops[-1].setdefault(words.token(other), _number(one))
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def of_messages(output: CompletionOutput, words: Words, most: int) -> dict[str, Any]:
    """As chats have them, with the `most` probable tokens."""
    content = []
    for token, known in zip(output.token_ids, output.logprobs or (), strict=True):
        best = [(other, one) for other, one in sorted(known.items(), key=_rank) if one.rank <= most]
        top = [_entry(other, one, words) for other, one in best]
        content.append({**_entry(token, known[token], words), "top_logprobs": top})
    return {"content": content}


def _entry(token: int, known: Logprob, words: Words) -> dict[str, Any]:
    text = words.token(token)
    return {"token": text, "logprob": _number(known), "bytes": list(text.encode())}


def _rank(item: tuple[int, Logprob]) -> int:
    return item[1].rank


def _number(known: Logprob) -> float:
    return max(known.logprob, LEAST)

"""ShareGPT: a JSON list of conversations, as text.

The prompt is a conversation's first turn and the output its second, as in vLLM's benchmark;
conversations with fewer turns are skipped. A tokenizer is required to count tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.core.errors import not_installed
from pagedsim.workload.traces.rows import Chunk, Format, Options, Tokenizer, opened, wrong


class ShareGPT(Format):
    """Conversations, without times."""

    name = "sharegpt"
    time = None
    prompt = "tokens of the first turn"
    output = "tokens of the second turn"
    options = ("tokenizer",)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("conversations",)

    def fits(self, head: str) -> float:
        return float(head.startswith("["))

    def chunks(self, path: Path, options: Options) -> Iterator[Chunk]:
        count = _counter(options.tokenizer)
        try:
            with opened(path) as file:
                entries = json.load(file)
        except json.JSONDecodeError as error:
            what = f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
            raise wrong(path, error.lineno, what) from None
        except (ValueError, RecursionError):
            raise wrong(path, 1, "not JSON: a number too long, or lists too deep") from None
        if not isinstance(entries, list):
            raise wrong(path, 1, "must be a list of objects with conversations")
        pairs = [self._pair(path, number, entry) for number, entry in enumerate(entries, 1)]
        kept = [(number, pair) for number, pair in enumerate(pairs, 1) if pair is not None]
        yield Chunk(
            [number for number, _ in kept],
            None,
            None,
            np.array([count(first) for _, (first, _) in kept], np.int64),
            np.array([count(second) for _, (_, second) in kept], np.int64),
        )

    def wrong(self, path: Path, line: int, what: str) -> ConfigError:
        """Errors refer to list entries, since those have no line numbers."""
        return ConfigError(f"{path}: entry {line}: {what}")

    def _pair(self, path: Path, number: int, entry: Any) -> tuple[str, str] | None:
        """The first two turns; None if there are fewer."""
        turns = entry.get("conversations", entry.get("conversation")) if _object(entry) else None
        if not isinstance(turns, list):
            raise self.wrong(path, number, "must be an object with a list conversations")
        if len(turns) < 2:
            return None
        first, second = (turn.get("value") if _object(turn) else None for turn in turns[:2])
        if not (isinstance(first, str) and isinstance(second, str)):
            raise self.wrong(path, number, "each turn must have a text as its value")
        return first, second


def _object(value: Any) -> bool:
    return isinstance(value, dict)


class _Counter:
    def __init__(self, tokenize: Tokenizer) -> None:
        self._tokenize = tokenize

    def __call__(self, text: str) -> int:
        found = self._tokenize(text)
        return found if isinstance(found, int) else len(found)


def _counter(tokenizer: str | Tokenizer | None) -> _Counter:
    if tokenizer is None:
        raise ConfigError(
            "tokenizer: format sharegpt holds text, so it needs one: a model's name on the "
            "Hugging Face Hub, a tokenizer.json, or a function"
        )
    if not isinstance(tokenizer, str):
        return _Counter(tokenizer)
    try:
        # Imported by name: an optional dependency, installed with transformers.
        library = import_module("tokenizers")
    except ImportError:
        raise not_installed(f"tokenizer={tokenizer}", "engine", "tokenizers") from None
    path = Path(tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        if path.is_file():
            loaded = library.Tokenizer.from_file(str(path))
        else:
            loaded = library.Tokenizer.from_pretrained(tokenizer)
    except Exception as error:  # the library raises bare Exception for every error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"tokenizer={tokenizer}: cannot be loaded: {reason}") from None
    return _Counter(lambda text: len(loaded.encode(text, add_special_tokens=False).ids))

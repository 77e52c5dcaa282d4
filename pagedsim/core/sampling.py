"""What a client asks of the sampler, and of the scheduler: how many sequences, how many tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pagedsim.core.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling settings.

    The scheduler reads `max_tokens` and `width`; everything else is for the engine's sampler.
    `stop` may be given as one string, and it and `stop_token_ids` as lists. `length_penalty` and
    `early_stopping` are for beams, and as in transformers.

    >>> SamplingParams(n=2, max_tokens=64).width
    2
    """

    n: int = 1
    best_of: int | None = None
    beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        stop: Any = self.stop
        if type(stop) is not tuple:
            object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        if type(self.stop_token_ids) is not tuple:
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        best = self.n if self.best_of is None else self.best_of
        above = "at least 1, or None for as many as the model can"
        rules = (
            ("n", self.n, self.n >= 1, "at least 1"),
            ("best_of", self.best_of, best >= self.n, f"at least n={self.n}"),
            ("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, above),
            (
                "min_tokens",
                self.min_tokens,
                0 <= self.min_tokens <= (self.max_tokens or self.min_tokens),
                "0 to max_tokens",
            ),
            (
                "early_stopping",
                self.early_stopping,
                self.early_stopping in (False, True, "never"),
                "False, True or 'never'",
            ),
            ("stop", self.stop, "" not in self.stop, "strings of at least one character"),
            ("temperature", self.temperature, self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0"),
            ("logprobs", self.logprobs, (self.logprobs or 0) >= 0, "0 or more"),
        )
        for name, value, fine, allowed in rules:
            if not fine:
                raise RequestError(f"SamplingParams.{name}={value}: must be {allowed}")

    @property
    def width(self) -> int:
        """Sequences that run at once: the seats that the request takes in a batch."""
        return self.n if self.best_of is None else self.best_of

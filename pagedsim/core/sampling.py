"""The sampling settings of a request, and its number of sequences and tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pagedsim.core.errors import RequestError, is_number, is_whole, shown

_REQUIRED = ("n", "min_tokens", "top_k")
_WHOLE = (*_REQUIRED, "best_of", "max_tokens", "logprobs", "seed")
_NUMBERS = (
    *("length_penalty", "temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling settings.

    The scheduler reads `max_tokens` and `num_seqs`; everything else is for the engine's sampler.
    `stop` may be given as one string, and it and `stop_token_ids` as lists. `length_penalty` and
    `early_stopping` are for beams, and as in transformers.

    >>> SamplingParams(n=2, max_tokens=64).num_seqs
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
        for name, kinds in (("stop", str), ("stop_token_ids", int)):
            value: Any = getattr(self, name)
            if value is None:
                value = ()
            allowed = f"a list of {'strings' if kinds is str else 'ids'}"
            if not isinstance(value, Iterable):
                raise _refused(name, value, allowed)
            if type(value) is not tuple:
                value = (value,) if isinstance(value, str) else tuple(value)
            if not all(
                isinstance(item, kinds) or (kinds is int and is_whole(item)) for item in value
            ):
                raise _refused(name, value, allowed)
            if "" in value:
                raise _refused(name, "", "strings of at least one character")
            object.__setattr__(self, name, value)
        for name in _WHOLE:
            if (value := getattr(self, name)) is not None and not is_whole(value):
                raise _refused(name, value, "a whole number")
        for name in _NUMBERS:
            if not is_number(getattr(self, name)):
                raise _refused(name, getattr(self, name), "a number")
        for name in _REQUIRED:
            if getattr(self, name) is None:
                raise _refused(name, None, "a whole number")
        for name, fine, allowed in self._rules():
            if not fine:
                raise _refused(name, getattr(self, name), allowed)

    def _rules(self) -> tuple[tuple[str, bool, str], ...]:
        """Each setting, whether it is fine, and what is allowed."""
        whole = "a whole number of at least"
        above = f"{whole} 1, or None for as many as the model can"
        best = self.n if self.best_of is None else self.best_of
        most = self.max_tokens
        return (
            ("n", self.n >= 1, f"{whole} 1"),
            ("best_of", best >= self.n, f"{whole} n={self.n}"),
            ("max_tokens", most is None or most >= 1, above),
            (
                "min_tokens",
                0 <= self.min_tokens <= (most or self.min_tokens),
                "a whole number from 0 to max_tokens",
            ),
            ("length_penalty", abs(self.length_penalty) <= 50, "a number from -50 to 50"),
            (
                "early_stopping",
                self.early_stopping in (False, True, "never"),
                "False, True or 'never'",
            ),
            ("temperature", self.temperature >= 0, "a number of at least 0 (greedy)"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, at most 1"),
            ("top_k", self.top_k >= -1, f"{whole} -1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "a number above 0"),
            ("logprobs", (self.logprobs or 0) >= 0, f"{whole} 0"),
        )

    @property
    def num_seqs(self) -> int:
        """Sequences that run at once: the seats that the request takes in a batch."""
        return self.n if self.best_of is None else self.best_of

    @property
    def penalised(self) -> bool:
        """Whether tokens that occurred become more or less probable."""
        additive = self.presence_penalty != 0 or self.frequency_penalty != 0
        return additive or self.repetition_penalty != 1

    @property
    def looks_back(self) -> bool:
        """Whether the next step needs the sampled tokens beyond computing from them.

        So with penalties, and with sequences that end, or are replaced, one by one.
        """
        return self.num_seqs > 1 or self.penalised


def _refused(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"SamplingParams.{name}={shown(value)}: must be {allowed}")

"""Sampling: from logits to tokens, with counter-based noise.

A row's token depends only on its logits, its settings and its (stream, position): it is the argmax
of the filtered logits plus Gumbel noise, a hash of (stream, position, token), unless it is greedy.
So it is independent of the rest of the batch and of preemptions, and no generator state is kept.
Rows of all settings are sampled in one call; a setting costs only for the rows that use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, log
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedsim.core import SamplingParams
from pagedsim.engine.runtime import Fetch, sent
from pagedsim.kernels import ops as kernels
from pagedsim.kernels.batch import SamplingTensors
from pagedsim.kernels.reference.sampling import gumbel as gumbel_of
from pagedsim.kernels.reference.sampling import hashed, token_hashes

Tokens = Sequence[int]
Keys = NDArray[np.uint64]
_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive numbers land far apart
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's multipliers


def stream_key(seed: int, index: int = 0) -> int:
    """64 bits that name a random stream: the `index`-th of those of `seed`.

    >>> stream_key(7, 0) == stream_key(7, 0), stream_key(7, 0) == stream_key(7, 1)
    (True, False)
    """
    return _mixed(_mixed(int(seed) & _MASK) + index * _ODD)


def words_of(keys: Sequence[int] | Keys, positions: Sequence[int]) -> Tensor:
    """[rows, 2] int32: the two halves of each row's 64 bits."""
    x = np.asarray(keys, dtype=np.uint64) + np.array(positions, dtype=np.uint64) * np.uint64(_ODD)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    x ^= x >> np.uint64(31)
    return torch.from_numpy(x.astype("<u8").view("<i4").reshape(-1, 2))


def gumbel(keys: Sequence[int], positions: Sequence[int], vocab: int) -> Tensor:
    """Standard Gumbel noise [rows, vocab] in float32; row i is that of (keys[i], positions[i])."""
    words = words_of(keys, positions)
    return gumbel_of(hashed(token_hashes(vocab, words.device), words[:, :1], words[:, 1:]))


def _mixed(x: int) -> int:
    """A bijection of 64 bits after which none of them looks like the input."""
    x = (x + _ODD) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


class TokenCounts:
    """Token counts of the last batch's sequences on the device, for penalties, one row each.

    A sequence is identified by its token list, which only grows. While a batch has the same lists
    as the last one, only new tokens are sent to the device; another batch is counted anew.
    """

    def __init__(self) -> None:
        self._prompts: list[Tokens] = []
        self._outputs: list[Tokens] = []
        self._known: list[int] = []  # how many tokens of each output are counted
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None

    def counts(
        self, prompts: Sequence[Tokens], outputs: Sequence[Tokens], like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Count of each token in each output, [rows, vocab] as `like`, in int32; and a mask of the
        prompt's tokens. Valid until the next call."""
        if self._counts is None or self._seen is None or not self._same(prompts, outputs):
            self._prompts, self._outputs = list(prompts), list(outputs)
            self._known = [0] * len(outputs)
            self._counts = torch.zeros(like.shape, dtype=torch.int32, device=like.device)
            self._seen = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
            self._seen.view(-1).index_fill_(0, places(prompts, like), True)
        new = [output[known:] for output, known in zip(outputs, self._known, strict=True)]
        self._known = [len(output) for output in outputs]
        at = places(new, like)
        self._counts.view(-1).scatter_add_(0, at, torch.ones_like(at, dtype=torch.int32))
        return self._counts, self._seen

    def _same(self, prompts: Sequence[Tokens], outputs: Sequence[Tokens]) -> bool:
        return (
            len(outputs) == len(self._outputs)
            and all(map(is_, prompts, self._prompts))
            and all(map(is_, outputs, self._outputs))
            and all(
                len(output) >= known for output, known in zip(outputs, self._known, strict=True)
            )
        )


def places(texts: Sequence[Tokens], like: Tensor) -> Tensor:
    """Flat indices of each row's tokens in a [rows, vocab] tensor."""
    sizes = [len(text) for text in texts]
    flat = np.fromiter(chain.from_iterable(texts), np.int64, sum(sizes))
    flat += np.repeat(np.arange(len(texts)) * like.shape[1], sizes)
    return sent(torch.from_numpy(flat), like.device)


def penalties(params: Sequence[SamplingParams], device: torch.device) -> Tensor:
    """[3, rows, 1]: each row's penalties for repetition, presence and frequency."""
    settings = [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params]
    return sent(torch.tensor(settings).view(-1, 3), device).T[:, :, None]


def penalise(
    logits: Tensor,
    settings: Tensor,
    prompts: Sequence[Tokens],
    outputs: Sequence[Tokens],
    known: TokenCounts | None = None,
) -> Tensor:
    """Apply penalties for earlier tokens; `settings` are those of `penalties`.

    Repetition looks at prompt and output and scales (as in transformers); presence and frequency
    look at the output alone and subtract (as in vLLM and OpenAI's API). `known` holds the counts.
    """
    repetition, presence, frequency = settings
    counts, seen = (known or TokenCounts()).counts(prompts, outputs, logits)
    present = counts > 0
    scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(seen | present, scaled, logits)
    return logits - frequency * counts - presence * present


def forbid(logits: Tensor, tokens: Sequence[Tokens]) -> Tensor:
    """Set the logits of each row's `tokens` to -inf."""
    logits = logits.clone(memory_format=torch.contiguous_format)
    logits.view(-1).index_fill_(0, places(tokens, logits), -torch.inf)
    return logits


COLDEST = 1e-5
"""Below this temperature a row is greedy: its logits divided by it would overflow."""
GREEDY = SamplingParams(temperature=0.0)
EVERYTHING = SamplingParams(
    top_k=1,
    top_p=0.9,
    min_p=0.1,
    logprobs=1,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
)
"""All settings that cost something."""


class Row(NamedTuple):
    """One token to be sampled."""

    params: SamplingParams
    key: int
    """64 bits: the random stream of the sequence."""
    position: int
    """How many tokens precede it."""
    prompt: Sequence[int]
    output: Sequence[int]
    """Prompt and output are read for penalties only."""
    forbidden: Sequence[int] = ()
    """Tokens that must not be sampled: the ends, before `min_tokens`."""


class Rows(NamedTuple):
    """The tokens to be sampled in a step, as columns of what `Row` has."""

    params: list[SamplingParams]
    keys: Keys
    positions: Sequence[int]
    prompts: Sequence[Tokens]
    outputs: Sequence[Tokens]
    forbidden: Sequence[Tokens]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Rows:
        """At least one row."""
        params, keys, *rest = zip(*rows, strict=True)
        return cls(list(params), np.array(keys, np.uint64), *rest)


class Scores(NamedTuple):
    """Of each row that requests it: the sampled token and, best first, the most probable ones, as
    many as any row requests; their log-probabilities; and the sampled one's rank, 1 if it is best.

    Log-probabilities are the model's own, before penalties, temperature and truncation.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]


def wants_logprob(params: SamplingParams) -> bool:
    """Whether the log-probability of each sampled token is needed."""
    return params.logprobs is not None or params.num_seqs > params.n


class Sampler:
    """Samples a token for each row, of one vocabulary and on one device.

    Settings and token counts of the last batch are cached.
    """

    def __init__(self) -> None:
        self._settings: BatchSettings | None = None
        self._counts = TokenCounts()

    def sample(self, logits: Tensor, rows: Sequence[Row]) -> tuple[list[int], Scores | None]:
        """A token for each row of `logits` [rows, vocab] in float32, which stay as they are."""
        return self.draw(logits, Rows.of(rows)).results()

    def draw(self, logits: Tensor, rows: Rows) -> Draw:
        """Sample without waiting for the result."""
        settings = self._settings
        if settings is None or settings.params != rows.params:
            settings = self._settings = BatchSettings(rows.params, logits)
        scores = self._adjusted(logits, rows, settings)
        if settings.random:
            words = sent(words_of(rows.keys, rows.positions), logits.device)
            picked = kernels.pick(scores, settings.tensors, words)
        else:
            picked = scores.argmax(1)
        return Draw(picked, _scored(logits, picked, settings))

    def _adjusted(self, logits: Tensor, rows: Rows, settings: BatchSettings) -> Tensor:
        if (at := settings.penalised).rows:
            prompts, outputs = ([x[i] for i in at.rows] for x in (rows.prompts, rows.outputs))
            values = penalise(at.of(logits), settings.penalties, prompts, outputs, self._counts)
            logits = at.put(logits, values)
        if any(rows.forbidden):
            logits = forbid(logits, rows.forbidden)
        return logits


def warm_up_sampling(vocab: int, device: torch.device) -> None:
    """Compile all kernels that sampling may need, before requests arrive.

    Kernels are the same for any number of rows; there are those that draw from all tokens, and
    those that cut rows and draw from what is left.
    """
    for params in (SamplingParams(), EVERYTHING):
        sample_alike(torch.zeros(2, vocab, device=device), Sampler(), params)


def sample_alike(logits: Tensor, sampler: Sampler, params: SamplingParams = EVERYTHING) -> None:
    """Sample each row with the same settings, by default all that take memory."""
    row = Row(params, 1, position=1, prompt=[0], output=[0], forbidden=(0,))
    sampler.sample(logits, [row] * len(logits))


class Draw:
    """Sampled tokens, on the device and being copied to the host."""

    def __init__(self, picked: Tensor, scored: Sequence[Tensor] = ()) -> None:
        """`scored`: the columns of `Scores`, or nothing."""
        self.picked = picked
        """The tokens, on the device."""
        self._coming = Fetch([picked, *scored])

    def results(self) -> tuple[list[int], Scores | None]:
        """The token of each row, and scores if any wants them; waits for the copy to the host."""
        tokens, *scored = self._coming.lists()
        return tokens, Scores(*scored) if scored else None


@dataclass(frozen=True, slots=True)
class RowSubset:
    """Some rows of a batch."""

    rows: list[int]
    index: Tensor
    all: bool

    def of(self, x: Tensor) -> Tensor:
        """These rows of x."""
        return x if self.all else x[self.index]

    def put(self, x: Tensor, values: Tensor) -> Tensor:
        """x with these rows replaced; x itself is left alone."""
        return values if self.all else x.index_copy(0, self.index, values)


class BatchSettings:
    """The settings of a batch as columns: the rows that use each setting, and its values."""

    def __init__(self, params: list[SamplingParams], like: Tensor) -> None:
        self.params = params
        self.vocab, self.device = like.shape[1], like.device
        self.penalised = self._at(p.penalised for p in params)
        self.penalties = penalties([params[i] for i in self.penalised.rows], self.device)
        self.scored = self._at(wants_logprob(p) for p in params)
        self.logprobs = [params[i].logprobs or 0 for i in self.scored.rows]
        self.random = any(p.temperature >= COLDEST for p in params)
        self.tensors = self._tensors([p if p.temperature >= COLDEST else GREEDY for p in params])

    def _at(self, used: Iterable[bool]) -> RowSubset:
        used = list(used)
        rows = [i for i, yes in enumerate(used) if yes]
        return RowSubset(rows, sent(torch.tensor(rows), self.device), len(rows) == len(used))

    def _tensors(self, params: list[SamplingParams]) -> SamplingTensors:
        k = [p.top_k if 0 < p.top_k < self.vocab else 0 for p in params]
        return SamplingTensors(
            self._column([p.temperature for p in params], torch.float32),
            self._column(k, torch.int32),
            self._column([p.top_p for p in params], torch.float64),
            self._column([log(p.min_p) if p.min_p else -inf for p in params], torch.float32),
            some_top_k=any(k),
            some_top_p=any(p.top_p < 1 for p in params),
            some_min_p=any(p.min_p > 0 for p in params),
        )

    def _column(self, values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return sent(torch.tensor(values, dtype=dtype), self.device)


def _scored(logits: Tensor, picked: Tensor, settings: BatchSettings) -> list[Tensor]:
    """The columns of `Scores`; empty if no row requests them."""
    at = settings.scored
    if not at.rows:
        return []
    logprobs = at.of(logits).log_softmax(1)
    tokens = at.of(picked)[:, None]
    sampled = logprobs.gather(1, tokens)
    ranks = (logprobs > sampled).sum(1) + 1
    best = logprobs.topk(min(max(settings.logprobs), settings.vocab))
    return [torch.cat((tokens, best.indices), 1), torch.cat((sampled, best.values), 1), ranks]

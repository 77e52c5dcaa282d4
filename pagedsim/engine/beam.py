"""Beam search of one request: the same steps, and so the same answers, as transformers' generate.

The request is a group of fixed width. Each step extends every running beam by every token and
keeps the best `width` that go on; ended beams compete, under the length penalty, for the `width`
places among the finished. There are more candidates than beams, so that enough are left when some
of them end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from pagedsim.core import Continuation, Request, RequestError
from pagedsim.engine.output import CompletionOutput, RequestOutput
from pagedsim.engine.sampler import forbid, penalise, penalties
from pagedsim.engine.tokenizer import Detokenizer, Text, ends_of


class Candidate(NamedTuple):
    """A running beam and one more token."""

    logprob: float
    parent: int
    token: int


class Finished(NamedTuple):
    """A beam that ended."""

    score: float
    logprob: float
    tokens: list[int]
    reason: str


class Beams:
    """The beams of one request: `best_of` (or `n`) wide, of which the `n` best are returned.

    Called like Sequences, but with logits. Temperature and truncation have no effect; penalties and
    `min_tokens` apply to the log-probabilities, as in transformers.
    """

    def __init__(
        self,
        request: Request,
        *,
        eos: Collection[int] = (),
        limit: int | None = None,
        detokenizer: Callable[[], Detokenizer] | None = None,
        prompt: str | None = None,
    ) -> None:
        """`limit`: the most tokens that it may generate, if less than its max_tokens."""
        params = request.params
        for name in ("stop", "logprobs"):
            if value := getattr(params, name):
                raise RequestError(
                    f"request {request.id!r}: SamplingParams.{name}={value}: not with beam_search"
                )
        self.request = request
        self.ranked = True
        """The returned sequences are known only at the end."""
        self.plain = self.simple = self.steady = self.scored = self.deltas = False
        self.ends = ends_of(params, eos)
        """Tokens that end a beam."""
        self._eos = frozenset(eos)
        self._limit: float = min(limit or inf, params.max_tokens or inf)
        self._detokenizer = detokenizer
        self._prompt = prompt
        # Until the first token all beams are the same one, and only the first may have successors.
        self._logprobs = [0.0] + [-1e9] * (request.num_seqs - 1)
        self._finished: list[Finished] = []  # best first
        self._contenders = 0  # running beams that would be finished if this were the last step

    def take(self, logits: Tensor) -> tuple[Continuation, str | None]:
        """Take the logits of this step, [width, vocab], or [1, vocab] before the first token.

        Returns the request's result for `Scheduler.complete`, and its finish reason, if any.
        """
        request, width = self.request, self.request.num_seqs
        candidates = self._candidates(logits)
        going = [c for c in candidates if c.token not in self.ends][:width]
        # The candidates beyond the best `width` are only there to go on, not to win.
        ended = [c for c in candidates[:width] if c.token in self.ends]
        outputs = request._outputs or [[]] * width
        length = request.sampled_count + 1
        self._finish((c.logprob, [*outputs[c.parent], c.token], "stop") for c in ended)
        self._contenders = width - len(ended)
        self._logprobs = [c.logprob for c in going]
        parents = [c.parent for c in going] if request.sampled_count else None
        answer = Continuation([c.token for c in going], parents)
        if length >= self._limit:
            return answer, "length"
        return answer, None if self._may_improve(length) else "stop"

    def close(self, reason: str) -> None:
        """End the request; unless beam search itself has ended it, running beams end as well."""
        if reason != "stop":
            count = self._contenders if reason == "length" else self.request.num_seqs
            running = self._running()[:count]
            self._finish((logprob, tokens, reason) for logprob, tokens in running)

    def output(self, finished: bool) -> RequestOutput:
        """The best beams, `finished` or among the running ones, which may change."""
        if finished:
            beams = self._finished
        else:
            beams = [Finished(self._score(p, len(ids)), p, ids, "") for p, ids in self._running()]
        best = beams[: self.request.params.n]
        outputs = [self._completion(index, beam) for index, beam in enumerate(best)]
        return RequestOutput.of(self.request, self._prompt, outputs, finished)

    def _running(self) -> list[tuple[float, list[int]]]:
        """Log-probability and tokens of the running beams, best first."""
        width, outputs = self.request.num_seqs, self.request._outputs
        if not outputs:
            return [(0.0, [])] * width
        return list(zip(self._logprobs, outputs, strict=True))

    def _candidates(self, logits: Tensor) -> list[Candidate]:
        """The best successors of all running beams, best first."""
        request = self.request
        logprobs = self._adjusted(logits.log_softmax(1)).expand(request.num_seqs, -1)
        totals = logprobs + torch.tensor(self._logprobs, device=logits.device)[:, None]
        count = max(2, 1 + len(self.ends)) * request.num_seqs
        best = totals.flatten().topk(min(count, totals.numel()))
        vocab = logits.shape[1]
        return [
            Candidate(logprob, *divmod(index, vocab))
            for logprob, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]

    def _adjusted(self, logprobs: Tensor) -> Tensor:
        """The log-probabilities after penalties, without ends before `min_tokens`."""
        request, params, rows = self.request, self.request.params, len(logprobs)
        if params.penalised:
            outputs = request._outputs or [[]] * rows
            settings = penalties([params] * rows, logprobs.device)
            logprobs = penalise(logprobs, settings, [request.prompt or ()] * rows, outputs)
        if request.sampled_count < params.min_tokens:
            logprobs = forbid(logprobs, [tuple(self.ends)] * rows)
        return logprobs

    def _finish(self, beams: Iterable[tuple[float, list[int], str]]) -> None:
        """Have ended beams compete for places among the finished."""
        new = [Finished(self._score(p, len(ids)), p, ids, why) for p, ids, why in beams]
        ranked = sorted(self._finished + new, key=lambda beam: -beam.score)
        self._finished = ranked[: self.request.num_seqs]

    def _score(self, logprob: float, length: float) -> float:
        return float(logprob / max(length, 1) ** self.request.params.length_penalty)

    def _may_improve(self, length: int) -> bool:
        """Whether a running beam, of `length` tokens now, may still join the finished."""
        params = self.request.params
        if len(self._finished) < self.request.num_seqs:
            return True
        if params.early_stopping is True:
            return False
        distant = params.early_stopping == "never" and params.length_penalty > 0
        reach = self._limit if distant else length
        return self._score(self._logprobs[0], reach) > self._finished[-1].score

    def _completion(self, index: int, beam: Finished) -> CompletionOutput:
        last = beam.tokens[-1] if beam.tokens and beam.reason == "stop" else None
        stop = None if last in self._eos and not self.request.params.ignore_eos else last
        return CompletionOutput(
            index=index,
            text=self._text(beam, stop),
            token_ids=list(beam.tokens),
            cumulative_logprob=beam.logprob,
            finish_reason=beam.reason or None,
            stop_reason=stop,
            score=beam.score,
        )

    def _text(self, beam: Finished, stop: int | None) -> str:
        if self._detokenizer is None:
            return ""
        wanted = self.request.params.include_stop_str_in_output and stop is not None
        text = Text(self._detokenizer)
        text.catch_up(beam.tokens if wanted or beam.reason != "stop" else beam.tokens[:-1])
        if beam.reason:
            text.finish()
        return text.text

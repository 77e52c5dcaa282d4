"""The sequences of one request, and their update by a step's samples.

A *group* stands between the sampler and the scheduler: it returns the rows to sample, takes the
samples, ends sequences, and returns results as `Scheduler.complete` takes them. Tokens stay in the
scheduler's `request.outputs`; a group copies those of a sequence that ends before the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from pagedsim.core import Continuation, Request, RequestError
from pagedsim.engine.beam import Beams
from pagedsim.engine.output import (
    CompletionOutput,
    Logprobs,
    RequestMetrics,
    RequestOutput,
    Tokenizer,
)
from pagedsim.engine.sampler import COLDEST, Row, Scores, stream_key, wants_logprob
from pagedsim.engine.tokenizer import Detokenizer, Text, ends_of


@dataclass(slots=True, eq=False)
class SampledSequence:
    """One sequence of a request."""

    key: int
    text: Text | None
    tokens: list[int] = field(default_factory=list)
    """Set once it has ended; before, they are in `request.outputs`."""
    logprob: float = 0.0
    best: list[int] = field(default_factory=list)
    best_logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """Columns of `Logprobs`."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reported: int = 0
    """Tokens that a delta has returned."""
    end_reported: bool = False

    def score(self, scores: Scores, row: int, keep: int | None) -> None:
        """Add the log-probability of its next token, and unless `keep` is None those of so many
        most probable ones."""
        values = scores.logprobs[row]
        self.logprob += values[0]
        if keep is not None:
            self.best += scores.tokens[row][: keep + 1]
            self.best_logprobs += values[: keep + 1]
            self.ranks.append(scores.ranks[row])

    def logprobs(self, start: int) -> Logprobs:
        """Of its tokens from `start` on."""
        return Logprobs(self.best, self.best_logprobs, self.ranks, start)

    def end(self, reason: str, tokens: list[int], stop: int | str | None = None) -> None:
        self.finish_reason, self.tokens, self.stop_reason = reason, tokens, stop


class Sequences:
    """The sequences of a sampled request: `n` or `best_of` of them, often just one.

    Order of calls: `rows` before the scheduler dispatches the step; `take` before it is completed;
    `output` after that, if requested; `close` when the request has left the scheduler, and
    `output(finished=True)`.
    """

    def __init__(
        self,
        request: Request,
        *,
        eos: Collection[int] = (),
        seed: int = 0,
        detokenizer: Callable[[], Detokenizer] | None = None,
        prompt: str | None = None,
    ) -> None:
        """`seed` names the random streams of a request without a seed; `prompt` is its text."""
        params = request.params
        if params.beam_search:  # of one beam
            params = replace(params, temperature=0.0)
        if params.stop and detokenizer is None:
            raise RequestError(
                f"request {request.id!r}: SamplingParams.stop={params.stop}: the model has no "
                "tokenizer; use stop_token_ids"
            )
        self.request = request
        self._params = params
        self._prompt = prompt
        self._eos = frozenset(eos)
        self.scored = wants_logprob(params)
        """Whether `take` needs scores."""
        self.ends = ends_of(params, eos)
        """Tokens that end a sequence."""
        self.deltas = False
        """Whether each output has only what is new since the last one."""
        self._metrics: RequestMetrics | None = None
        alone = params.num_seqs == 1
        self.simple = alone and not (params.stop or self.scored)
        """Whether its token is its result, and only `ends` may end it."""
        self.steady = alone and not (params.min_tokens or params.penalised)
        """Whether nothing but the position changes in the only one of its `rows`."""
        self.plain = params.temperature < COLDEST and self.simple and self.steady
        """Whether its next token is the argmax of its logits, too."""
        if params.seed is not None:
            seed = params.seed
        stops, include = params.stop, params.include_stop_str_in_output
        self._sequences = [
            SampledSequence(
                stream_key(seed, index),
                detokenizer and Text(detokenizer, stops, include_stop=include),
            )
            for index in range(request.num_seqs)
        ]
        self._live = self._sequences  # in the order of request._outputs

    @property
    def ranked(self) -> bool:
        """Whether the returned sequences are known only at the end."""
        return len(self._sequences) > self._params.n

    def rows(self) -> list[Row]:
        """The rows to sample, one per sequence.

        The first tokens of all sequences are drawn from the request's single row of logits.
        """
        request, params = self.request, self._params
        position, prompt = request.num_tokens, request.prompt or ()
        outputs: Sequence[Sequence[int]] = request._outputs or [()] * len(self._live)
        forbidden = tuple(self.ends) if request.generated < params.min_tokens else ()
        return [
            Row(params, sequence.key, position, prompt, output, forbidden)
            for sequence, output in zip(self._live, outputs, strict=True)
        ]

    def take(
        self, tokens: list[int], scores: Scores | None = None, row: int = 0
    ) -> tuple[int | Continuation, str | None]:
        """Take the tokens of `rows`, whose scores begin at a `row`; returns the request's result
        for `Scheduler.complete`, and its finish reason, if any. The request must not change between
        the two calls."""
        live = self._live
        if scores is not None and self.scored:
            keep = self._params.logprobs
            for place, sequence in enumerate(live, row):
                sequence.score(scores, place, keep)
        if len(live) == 1:
            return tokens[0], "stop" if self._ended(0, tokens[0]) else None
        going = [i for i, token in enumerate(tokens) if not self._ended(i, token)]
        if not going:
            return Continuation(tokens), "stop"
        if len(going) == len(live):
            return Continuation(tokens), None
        self._live = [live[i] for i in going]
        return Continuation([tokens[i] for i in going], going), None

    def close(self, reason: str) -> None:
        """End all sequences: the request has left the scheduler."""
        outputs = self.request._outputs or [[]] * len(self._live)
        for sequence, output in zip(self._live, outputs, strict=False):
            if sequence.finish_reason is None:
                token = output[-1] if output and reason == "stop" else None
                sequence.end(reason, output, self._stop_reason(token))

    def output(self, finished: bool) -> RequestOutput:
        """All sequences, or with `deltas` what no output has returned yet; until the request is
        `finished`, without text that may be the beginning of a stop string."""
        request, pairs = self.request, self._with_tokens()
        if self.deltas:
            new = []
            for index, (sequence, tokens) in enumerate(pairs):
                more = sequence.reported < len(tokens)
                if more or (sequence.finish_reason and not sequence.end_reported):
                    new.append(self._completion(index, sequence, tokens, True))
            prompt = request.prompt or ()  # not copied: a delta's cost does not grow
            metrics = self._metrics
            # While it decodes, and has never lost its memory, they stay as they are.
            if metrics is None or finished or request._preemptions or request._computed_before:
                metrics = RequestMetrics.of(request)
                self._metrics = metrics if metrics.first_token is not None else None
            return RequestOutput(request.id, self._prompt, prompt, new, finished, metrics)
        if self.ranked:
            pairs = sorted(pairs, key=lambda pair: -pair[0].logprob)[: self._params.n]
        outputs = [self._completion(index, *pair) for index, pair in enumerate(pairs)]
        return RequestOutput.of(request, self._prompt, outputs, finished)

    def _with_tokens(self) -> Sequence[tuple[SampledSequence, list[int]]]:
        """Every sequence and its tokens, in the lists that hold them."""
        outputs, sequences = self.request._outputs, self._sequences
        if len(sequences) == 1 and outputs and sequences[0].finish_reason is None:
            return ((sequences[0], outputs[0]),)
        outputs = outputs or [[]] * len(self._live)
        running = dict(zip(self._live, outputs, strict=False))
        return [
            (sequence, sequence.tokens if sequence.finish_reason else running[sequence])
            for sequence in sequences
        ]

    def _completion(
        self, index: int, sequence: SampledSequence, tokens: list[int], delta: bool = False
    ) -> CompletionOutput:
        reason, text, start = sequence.finish_reason, sequence.text, 0
        shown = ""
        if text is not None:
            if reason is None:
                text.catch_up(tokens)
            else:
                self._finish(text, sequence, tokens)
            shown = text.news() if delta else text.shown
        if delta:
            start, sequence.reported = sequence.reported, len(tokens)
            sequence.end_reported = reason is not None
        return CompletionOutput(
            index,
            shown,
            tokens[start:],
            sequence.logprob if self.scored else None,
            None if self._params.logprobs is None else sequence.logprobs(start),
            reason,
            sequence.stop_reason,
        )

    def _ended(self, place: int, token: int) -> bool:
        sequence = self._live[place]
        if token in self.ends:
            stop = self._stop_reason(token)
        elif self._params.stop and sequence.text is not None:
            least = self._params.min_tokens
            enough = not least or self.request.sampled_count + 1 >= least
            match = sequence.text.push(token, watch=enough)
            if match is None:
                return False
            stop = match
        else:
            return False
        outputs = self.request._outputs
        sequence.end("stop", [*outputs[place], token] if outputs else [token], stop)
        return True

    def _stop_reason(self, token: int | None) -> int | str | None:
        return None if token in self._eos and not self._params.ignore_eos else token

    def _finish(self, text: Text, sequence: SampledSequence, tokens: Sequence[int]) -> None:
        at_end = sequence.finish_reason == "stop" and tokens and tokens[-1] in self.ends
        include = self._params.include_stop_str_in_output and sequence.stop_reason is not None
        if at_end and not include:
            tokens = tokens[:-1]
        text.catch_up(tokens)
        text.finish()


Group = Sequences | Beams
"""The engine's state of a request, from its arrival until its last output."""


def make_group(
    request: Request,
    *,
    tokenizer: Tokenizer | None = None,
    eos: Collection[int] = (),
    seed: int = 0,
    number: int = 0,
    text: str | None = None,
    limit: int | None = None,
) -> Group:
    """The group of a new request.

    The engine's `seed` and the request's `number` name its random streams if it has no seed. `text`
    is that of its prompt. `limit` is the most tokens that it may generate, if that is less than its
    max_tokens: beam search ends differently at a limit.
    """
    detokenizer = None
    if tokenizer is not None:
        detokenizer = partial(Detokenizer, tokenizer, request.prompt or ())
    if request.params.beam_search and request.num_seqs > 1:
        return Beams(request, eos=eos, limit=limit, detokenizer=detokenizer, prompt=text)
    seed = stream_key(seed, number)
    return Sequences(request, eos=eos, seed=seed, detokenizer=detokenizer, prompt=text)

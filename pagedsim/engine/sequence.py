"""The sequences of one request, and their update by a step's samples.

A *group* stands between the sampler and the scheduler. It says which rows it wants sampled, takes
the samples, ends sequences, and answers in the words of `Scheduler.commit`. The tokens themselves
stay where the scheduler keeps them, in `request.outputs`; a group copies those of a sequence only
when it leaves the request before the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from pagedsim.core import Continuation, Request, RequestError, SamplingParams
from pagedsim.engine.beam import Beams
from pagedsim.engine.detokenizer import Detokenizer, Text, ends_of
from pagedsim.engine.output import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagedsim.engine.sampler import COLDEST, Row, Sample, stream_key, wants_logprob
from pagedsim.engine.tokenizer import Tokenizer


class Line:
    """One sequence of a request."""

    __slots__ = (
        "closed",
        "finish_reason",
        "given",
        "key",
        "logprob",
        "logprobs",
        "stop_reason",
        "text",
        "tokens",
    )

    def __init__(self, key: int, text: Text | None) -> None:
        self.key = key
        self.text = text
        self.tokens: list[int] = []  # known here once it has ended
        self.logprob = 0.0
        self.logprobs: list[dict[int, Logprob]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.given = 0  # tokens that were in a delta
        self.closed = False  # whether its end was

    def score(self, sample: Sample, keep: bool) -> None:
        """Count how probable its next token was."""
        assert sample.logprob is not None
        self.logprob += sample.logprob
        if keep:
            known = {token: Logprob(p, place) for place, (token, p) in enumerate(sample.top, 1)}
            self.logprobs.append({sample.token: Logprob(sample.logprob, sample.rank), **known})

    def end(self, reason: str, tokens: list[int], stop: int | str | None = None) -> None:
        """End the sequence."""
        self.finish_reason, self.tokens, self.stop_reason = reason, tokens, stop


class Sequences:
    """The sequences of a request that is sampled: `n` or `best_of` of them, often just one.

    The order of calls: `rows`, before the scheduler dispatches the step; `take`, before it is
    completed; `output`, after that, if requested;
    `close` once the scheduler is done with the request, and `output(finished=True)`.
    """

    __slots__ = (
        "_eos",
        "_lines",
        "_live",
        "_params",
        "_prompt",
        "_scored",
        "deltas",
        "ends",
        "plain",
        "request",
    )

    def __init__(
        self,
        request: Request,
        *,
        eos: Collection[int] = (),
        seed: int = 0,
        detokenizer: Callable[[], Detokenizer] | None = None,
        prompt: str | None = None,
    ) -> None:
        """`seed` names the random streams unless the request brings its own; `prompt` its text."""
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
        self._scored = wants_logprob(params)
        self.ends = ends_of(params, eos)
        """Tokens that end a sequence."""
        self.deltas = False
        """Whether each output is to hold what is new since the last one."""
        self.plain = _plain(params)
        """Whether its next token is the argmax of its logits and `ends` is all that may end it."""
        if params.seed is not None:
            seed = params.seed
        stops, include = params.stop, params.include_stop_str_in_output
        self._lines = [
            Line(
                stream_key(seed, index),
                detokenizer and Text(detokenizer, stops, include_stop=include),
            )
            for index in range(request.width)
        ]
        self._live = self._lines  # in the order of request.outputs

    @property
    def ranked(self) -> bool:
        """Whether which sequences are returned is known only at the end."""
        return len(self._lines) > self._params.n

    def rows(self) -> list[Row]:
        """What is to be sampled, one row a sequence.

        Before the first token all of them are to be drawn from the request's single row of logits.
        """
        request, params = self.request, self._params
        position, prompt = request.num_tokens, request.prompt or ()
        outputs: Sequence[Sequence[int]] = request.outputs or [()] * len(self._live)
        forbidden = tuple(self.ends) if request.generated < params.min_tokens else ()
        return [
            Row(params, line.key, position, prompt, output, forbidden)
            for line, output in zip(self._live, outputs, strict=True)
        ]

    def take(self, samples: Sequence[Sample]) -> tuple[int | Continuation, str | None]:
        """The samples of `rows`; returns what to tell commit, and why the request has ended.

        Nothing may happen to the request between this and the telling.
        """
        live = self._live
        if len(live) == 1:
            ended = self._ended(0, samples[0])
            return samples[0].token, "stop" if ended else None
        tokens = [sample.token for sample in samples]
        going = [i for i, sample in enumerate(samples) if not self._ended(i, sample)]
        if not going:
            return Continuation(tokens), "stop"
        if len(going) == len(live):
            return Continuation(tokens), None
        self._live = [live[i] for i in going]
        return Continuation([tokens[i] for i in going], going), None

    def close(self, reason: str) -> None:
        """The scheduler ended the request, or gave it up."""
        outputs = self.request.outputs or [[]] * len(self._live)
        for line, output in zip(self._live, outputs, strict=False):
            if line.finish_reason is None:
                token = output[-1] if output and reason == "stop" else None
                line.end(reason, output, self._stop_reason(token))

    def output(self, finished: bool) -> RequestOutput:
        """What there is; until it is `finished`, without text that may still be taken back."""
        if self.deltas:
            return self._news(finished)
        lines = self._told()
        if self.ranked:
            lines = sorted(lines, key=lambda one: -one[0].logprob)[: self._params.n]
        outputs = [self._completion(index, *one) for index, one in enumerate(lines)]
        return RequestOutput.of(self.request, self._prompt, outputs, finished)

    # -- inside ----------------------------------------------------------------------------------

    def _told(self) -> list[tuple[Line, Sequence[int]]]:
        """Every sequence and its tokens, in the lists that they are kept in."""
        outputs: Sequence[Sequence[int]] = self.request.outputs or [()] * len(self._live)
        going = dict(zip(self._live, outputs, strict=False))
        return [(one, one.tokens if one.finish_reason else going[one]) for one in self._lines]

    def _news(self, finished: bool) -> RequestOutput:
        """What no output has held yet; its cost does not grow with what they have."""
        outputs = [
            self._delta(index, line, tokens)
            for index, (line, tokens) in enumerate(self._told())
            if line.given < len(tokens) or (line.finish_reason and not line.closed)
        ]
        request, metrics = self.request, RequestMetrics.of(self.request)
        prompt = request.prompt or ()
        return RequestOutput(request.id, self._prompt, prompt, outputs, finished, metrics)

    def _delta(self, index: int, line: Line, tokens: Sequence[int]) -> CompletionOutput:
        start, line.given = line.given, len(tokens)
        line.closed = line.finish_reason is not None
        text = self._text(line, tokens)
        return CompletionOutput(
            index=index,
            text="" if text is None else text.news(),
            token_ids=tokens[start:],
            cumulative_logprob=line.logprob if self._scored else None,
            logprobs=None if self._params.logprobs is None else line.logprobs[start:],
            finish_reason=line.finish_reason,
            stop_reason=line.stop_reason,
        )

    def _ended(self, place: int, sample: Sample) -> bool:
        line, token = self._live[place], sample.token
        if self._scored:
            line.score(sample, keep=self._params.logprobs is not None)
        if token in self.ends:
            stop = self._stop_reason(token)
        elif self._params.stop and line.text is not None:
            enough = self.request.sampled_count + 1 >= self._params.min_tokens
            found = line.text.push(token, watch=enough)
            if found is None:
                return False
            stop = found
        else:
            return False
        outputs = self.request.outputs
        line.end("stop", [*outputs[place], token] if outputs else [token], stop)
        return True

    def _stop_reason(self, token: int | None) -> int | str | None:
        return None if token in self._eos and not self._params.ignore_eos else token

    def _completion(self, index: int, line: Line, tokens: Sequence[int]) -> CompletionOutput:
        text = self._text(line, tokens)
        return CompletionOutput(
            index=index,
            text="" if text is None else text.shown,
            token_ids=list(tokens),
            cumulative_logprob=line.logprob if self._scored else None,
            logprobs=None if self._params.logprobs is None else list(line.logprobs),
            finish_reason=line.finish_reason,
            stop_reason=line.stop_reason,
        )

    def _text(self, line: Line, tokens: Sequence[int]) -> Text | None:
        """The text of a sequence, as far as these tokens."""
        text = line.text
        if text is None:
            return None
        silent = line.finish_reason == "stop" and tokens and tokens[-1] in self.ends
        wanted = self._params.include_stop_str_in_output and line.stop_reason is not None
        if silent and not wanted:
            tokens = tokens[:-1]
        text.catch_up(tokens)
        if line.finish_reason:
            text.finish()
        return text


def _plain(params: SamplingParams) -> bool:
    greedy = params.temperature < COLDEST and params.width == 1
    asks = params.stop or params.min_tokens or params.penalised or wants_logprob(params)
    return greedy and not asks


Group = Sequences | Beams
"""What the engine keeps for each request, from its arrival until its last output."""


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
    """The group of a request that is new.

    `seed` is the engine's and `number` the request's, which together name its random streams if it
    has no seed of its own. `text` is its prompt's. `limit` is how many tokens it may generate where
    that is less than its max_tokens: beam search ends differently when it runs into that.
    """
    detokenizer = None
    if tokenizer is not None:
        detokenizer = partial(Detokenizer, tokenizer, request.prompt or ())
    if request.params.beam_search and request.width > 1:
        return Beams(request, eos=eos, limit=limit, detokenizer=detokenizer, prompt=text)
    seed = stream_key(seed, number)
    return Sequences(request, eos=eos, seed=seed, detokenizer=detokenizer, prompt=text)

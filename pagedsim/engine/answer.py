"""What a step's logits say: the tokens to tell the scheduler, and who has ended with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from torch import Tensor

from pagedsim.core import Continuation, Request, RequestId
from pagedsim.engine.beam import Beams
from pagedsim.engine.sampler import Row, Sampler
from pagedsim.engine.sequence import Group, Sequences

Answers = tuple[dict[RequestId, "int | Continuation"], dict[RequestId, str]]
"""Tokens and reasons, as `Scheduler.commit` takes them."""

Samplers = Sequence[tuple[Request, int]]
"""Who samples and how many rows of logits it has, in their order."""


def answers(
    logits: Tensor, samplers: Samplers, groups: Mapping[RequestId, Group], sampler: Sampler
) -> Answers:
    """Sample for everybody."""
    if all(groups[request.id].plain for request, _ in samplers):
        return _plain(logits, samplers, groups)
    tokens: dict[RequestId, int | Continuation] = {}
    ended: dict[RequestId, str] = {}
    rows: list[Row] = []
    places: list[int] = []  # of these rows among the logits
    sampled: list[tuple[Sequences, int]] = []
    start = 0
    for request, count in samplers:
        group = groups[request.id]
        if isinstance(group, Beams):
            _told(request, group.take(logits[start : start + count]), tokens, ended)
        else:
            mine = group.rows()
            # All sequences of a request draw their first token from its one row.
            places += range(start, start + count) if count == len(mine) else [start] * len(mine)
            rows += mine
            sampled.append((group, len(mine)))
        start += count
    if sampled:
        whole = places == list(range(len(logits)))
        samples = iter(sampler.sample(logits if whole else logits[places], rows))
        for group, count in sampled:
            _told(group.request, group.take(list(islice(samples, count))), tokens, ended)
    return tokens, ended


def _plain(logits: Tensor, samplers: Samplers, groups: Mapping[RequestId, Group]) -> Answers:
    """The same where everybody has one sequence and takes its most probable token."""
    tokens: dict[RequestId, int | Continuation] = {}
    ended: dict[RequestId, str] = {}
    for (request, _), token in zip(samplers, logits.argmax(1).tolist(), strict=True):
        tokens[request.id] = token
        if token in groups[request.id].ends:
            ended[request.id] = "stop"
    return tokens, ended


def _told(
    request: Request,
    answer: tuple[int | Continuation, str | None],
    tokens: dict[RequestId, int | Continuation],
    ended: dict[RequestId, str],
) -> None:
    tokens[request.id], reason = answer
    if reason is not None:
        ended[request.id] = reason

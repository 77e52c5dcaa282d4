"""Groups of sequences in a real scheduler: rows, ends, stop strings, outputs, and preemption."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.core import Continuation, Request, RequestError, SamplingParams
from pagedsim.engine import runner
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.output import CompletionOutput, RequestOutput
from pagedsim.engine.sampler import gumbel, stream_key
from pagedsim.engine.sequence import Sequences, make_group
from pagedsim.engine.tokenizer import Text
from tests.engine.sampling.test_beam import VOCAB, engine_of, run, tiny
from tests.engine.test_graphs import Replayer

PROMPT = [1, 2, 3, 4, 5]
GREEDY = SamplingParams(temperature=0)


class Letters:
    """A tokenizer whose token i is the i-th letter of the alphabet."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in ids)


class Words:
    """Turns token i into the i-th of some pieces of text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def push(self, token: int) -> str:
        return self.pieces[token]

    def finish(self) -> str:
        return ""


def group(params: SamplingParams, **given: Any) -> Sequences:
    made = make_group(Request("a", PROMPT, params), tokenizer=Letters(), **given)
    assert isinstance(made, Sequences)
    return made


def engine(**settings: Any) -> LLMEngine:
    """Of a model whose distributions are wide."""
    one = engine_of(tiny("llama", 3, sharpness=1.5), **{"eos": (0,), "seed": 1, **settings})
    one.tokenizer = Letters()
    return one


def logits(text: list[int]) -> torch.Tensor:
    """transformers' after a text."""
    with torch.inference_mode():
        found = tiny("llama", 3, sharpness=1.5)(torch.tensor([text]), use_cache=False)
    return torch.Tensor(found.logits[0, -1].float())


def served(params: SamplingParams, **settings: Any) -> RequestOutput:
    one = engine(**settings)
    one.add_request("a", PROMPT, params)
    return run(one)["a"]


def lines(output: RequestOutput) -> list[list[int]]:
    return [list(one.token_ids) for one in output.outputs]


def test_streams_belong_to_the_engines_seed_and_the_request_unless_it_has_a_seed() -> None:
    def keys(params: SamplingParams, seed: int, number: int) -> list[int]:
        return [row.key for row in group(params, seed=seed, number=number).rows()]

    two = SamplingParams(n=2)
    assert keys(two, 1, 2) == keys(two, 1, 2)
    assert len({*keys(two, 1, 2), *keys(two, 1, 3), *keys(two, 2, 2)}) == 6
    own = SamplingParams(n=2, seed=9)
    assert keys(own, 1, 2) == keys(own, 7, 8) == [stream_key(9, 0), stream_key(9, 1)]


def test_sequences_that_end_leave_the_group() -> None:
    a = group(SamplingParams(n=4, max_tokens=9), eos=(0,))
    assert a.take([5, 0, 6, 7]) == (
        Continuation([5, 6, 7], [0, 2, 3]),
        None,
    )
    a.request._outputs = [[5], [6], [7]]
    assert a.take([8, 8, 9]) == (Continuation([8, 8, 9]), None)
    a.request._outputs = [[5, 8], [6, 8], [7, 9]]
    assert a.take([0, 1, 0]) == (Continuation([1], [1]), None)
    a.request._outputs = [[6, 8, 1]]
    assert a.take([0]) == (0, "stop")
    assert lines(a.output(finished=True)) == [[5, 8, 0], [0], [6, 8, 1, 0], [7, 9, 0]]
    a = group(SamplingParams(n=2), eos=(0,))
    assert a.take([0, 0]) == (Continuation([0, 0]), "stop")
    a = group(SamplingParams(stop_token_ids=(7,)), eos=(0,))  # of one sequence
    assert (a.take([4]), a.take([7])) == ((4, None), (7, "stop"))


@pytest.mark.parametrize(
    ("params", "reason", "stop", "text"),
    [
        (SamplingParams(), "stop", None, ""),
        (SamplingParams(stop_token_ids=(0,)), "stop", None, ""),
        (SamplingParams(ignore_eos=True, stop_token_ids=(0,)), "stop", 0, ""),
        (SamplingParams(stop_token_ids=(4,)), "stop", 4, ""),
        (SamplingParams(stop_token_ids=(4,), include_stop_str_in_output=True), "stop", 4, "e"),
        (SamplingParams(stop=("e",)), "stop", "e", ""),
        (SamplingParams(stop=("e",), include_stop_str_in_output=True), "stop", "e", "e"),
    ],
)
def test_why_a_sequence_ended(params: SamplingParams, reason: str, stop: Any, text: str) -> None:
    a = group(params, eos=(0,))
    token = 4 if stop in (4, "e") else 0
    assert a.take([token]) == (token, "stop")
    (output,) = a.output(finished=True).outputs
    assert (output.finish_reason, output.stop_reason, output.text) == (reason, stop, text)
    assert output.token_ids == [token]


def test_stop_strings_wait_for_min_tokens() -> None:
    params = SamplingParams(stop=("e",), min_tokens=2)
    a = group(params)
    assert a.take([4]) == (4, None)
    a.request._outputs = [[4]]
    a.request._generated = 1
    assert a.take([4]) == (4, "stop")
    assert a.output(finished=True).outputs[0].text == "e"


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match=r"^request 'a': SamplingParams\.stop=\('x',\): the mo"):
        make_group(Request("a", 4, SamplingParams(stop=("x",))))


# Stop strings, however the text is cut into tokens


def words(pieces: list[str]) -> Any:
    """What stands in for a detokenizer."""
    return Words(pieces)


def said(pieces: list[str], *stops: str, include: bool = False) -> tuple[str, str | None, int]:
    """The text, the stop string, and how many pieces were taken."""
    text = Text(lambda: words(pieces), stops, include_stop=include)
    for token in range(len(pieces)):
        if found := text.push(token):
            return text.text, found, token + 1
    text.finish()
    return text.text, None, len(pieces)


@pytest.mark.parametrize(
    ("pieces", "stops", "want"),
    [
        (["one ", "two"], ("three",), ("one two", None, 2)),
        (["one ", "two ", "three"], ("two",), ("one ", "two", 2)),
        (["a", "b", "c", "d"], ("bcd",), ("a", "bcd", 4)),
        (["abcdef"], ("d", "bc"), ("a", "bc", 1)),  # complete first
        (["xabcy"], ("bc", "abc"), ("x", "abc", 1)),  # complete at once: the longest
        (["ab", "ab", "c"], ("abc",), ("ab", "abc", 3)),
    ],
)
def test_the_text_is_cut_before_the_stop_string(
    pieces: list[str], stops: tuple[str, ...], want: tuple[str, str | None, int]
) -> None:
    assert said(pieces, *stops) == want
    text, found, taken = want
    assert said(pieces, *stops, include=True) == (text + (found or ""), found, taken)


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_where_tokens_are_cut_makes_no_difference(
    whole: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)))) | {0, len(whole)})
    pieces = [whole[a:b] for a, b in pairwise(cuts)]
    assert said(pieces, *stops)[:2] == said(list(whole), *stops)[:2]
    text, found, _ = said(pieces, *stops)
    assert not any(stop in text for stop in stops)
    assert whole.startswith(text + (found or ""))


# Outputs


def test_an_output_tells_the_request() -> None:
    output = served(SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    metrics = output.metrics
    assert (output.request_id, output.prompt_token_ids) == ("a", PROMPT)
    assert metrics.arrival is not None
    assert metrics.first_token is not None and metrics.finished is not None
    assert metrics.arrival < metrics.first_token < metrics.finished
    assert metrics.preemptions == 0
    assert "metrics" not in repr(output) and "token_ids" in repr(output)
    (one,) = output.outputs
    assert (one.cumulative_logprob, one.logprobs) == (None, None)
    assert all(type(token) is int for token in one.token_ids)
    without_text = make_group(Request("a", PROMPT, GREEDY))  # since there is no tokenizer
    without_text.request._outputs = [[3]]
    without_text.close("length")
    assert without_text.output(finished=True).outputs[0].text == ""


def test_logprobs_name_the_sampled_token_and_the_best() -> None:
    output = served(SamplingParams(logprobs=2, max_tokens=6, seed=3)).outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    text = list(PROMPT)
    total = 0.0
    for token, known in zip(output.token_ids, output.logprobs, strict=True):
        raw = logits(text).log_softmax(0)
        assert set(known) == {token, *raw.topk(2).indices.tolist()}
        for one, logprob in known.items():
            assert logprob.logprob == pytest.approx(float(raw[one]), abs=1e-5)
            assert logprob.rank == 1 + int((raw > raw[one]).sum())
        total += known[token].logprob
        text.append(token)
    assert output.cumulative_logprob == pytest.approx(total)


def test_best_of_returns_the_most_probable_of_those_it_sampled() -> None:
    all_of_them = served(SamplingParams(n=6, logprobs=0, max_tokens=12, seed=8)).outputs
    best = served(SamplingParams(n=2, best_of=6, max_tokens=12, seed=8)).outputs

    def logprob(output: CompletionOutput) -> float:
        assert output.cumulative_logprob is not None
        return output.cumulative_logprob

    want = sorted(all_of_them, key=logprob, reverse=True)[:2]
    assert [output.token_ids for output in best] == [output.token_ids for output in want]
    assert [output.index for output in best] == [0, 1]
    assert [output.logprobs for output in best] == [None, None]


def test_n_sequences_are_those_that_single_requests_would_sample() -> None:
    """Each follows its own random stream, independent of sequences that end earlier."""
    together = lines(served(SamplingParams(n=5, max_tokens=30, seed=2), eos=(0, 1, 2, 3)))
    assert len({len(line) for line in together}) > 2
    for index, line in enumerate(together):
        text: list[int] = []
        for token in line:
            key, position = stream_key(2, index), len(PROMPT) + len(text)
            noise = gumbel([key], [position], VOCAB)
            assert token == int((logits(PROMPT + text) + noise).argmax())
            text.append(token)


# With little memory


def all_of(asked: list[SamplingParams], **settings: Any) -> tuple[list[list[Any]], int]:
    """The sequences of each request, and how often requests were preempted."""
    one = engine(eos=(0, 13), **settings)
    for number, params in enumerate(asked):
        one.add_request(number, [number, *PROMPT], params)
    outputs = run(one)
    found = [[told(line) for line in outputs[i].outputs] for i in range(len(asked))]
    return found, sum(output.metrics.preemptions for output in outputs.values())


def told(line: CompletionOutput) -> tuple[Any, ...]:
    """Without log-probabilities, whose last digits depend on the batch."""
    return list(line.token_ids), line.text, line.finish_reason, line.stop_reason


COMMON: dict[str, Any] = {
    "n": st.integers(1, 3),
    "best_of": st.sampled_from([None, None, 3]),
    "max_tokens": st.integers(1, 12),
    "repetition_penalty": st.sampled_from([1.0, 1.2]),
    "stop_token_ids": st.sampled_from([(), (3,), tuple(range(12))]),
}
BEAMS = st.builds(
    SamplingParams,
    beam_search=st.just(True),
    early_stopping=st.sampled_from([False, True]),
    **COMMON,
)
SAMPLES = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3]),
    stop=st.sampled_from([(), (), ("k", "zz")]),
    logprobs=st.sampled_from([None, None, 1]),
    **COMMON,
)


@given(
    st.lists(st.one_of(SAMPLES, SAMPLES, BEAMS), min_size=1, max_size=6),
    st.sampled_from(["paged", "prefix"]),
    st.sampled_from(["prefill_first", "unified"]),
    st.sampled_from(["recompute", "swap"]),
    st.integers(14, 24),
    st.booleans(),
)
@settings(max_examples=settings().max_examples // 4)
def test_any_mix_is_served_alike_by_any_scheduler(
    asked: list[SamplingParams],
    memory: str,
    batching: str,
    preemption: str,
    blocks: int,
    graphs: bool,
) -> None:
    """Neither preemption nor a graph shows."""
    want, preempted = all_of(asked)
    assert preempted == 0
    tokens = {"max_batched_tokens": 16} if batching == "unified" else {}
    cpu = 10 if preemption == "swap" else 0
    settings = {"memory": memory, "batching": batching, "preemption": preemption, **tokens}
    with patch.object(runner, "recorder_of", lambda device: Replayer() if graphs else None):
        got, _ = all_of(asked, blocks=blocks, cpu_blocks=cpu, **settings, max_model_len=48)
    assert got == want
    for params, lines in zip(asked, got, strict=True):
        assert len(lines) == params.n
        for ids, _, finish, stop in lines:
            ends = {0, 13, *params.stop_token_ids}
            if type(stop) is not str:
                assert finish == ("stop" if ids[-1] in ends else "length")
            assert finish == "stop" or len(ids) == params.max_tokens

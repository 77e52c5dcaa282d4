"""Groups in a real scheduler: ends, outputs, and no effect of preemption on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.core import Continuation, Request, RequestError, SamplingParams
from pagedsim.engine.output import CompletionOutput, RequestOutput
from pagedsim.engine.sampler import Sample, gumbel, stream_key
from pagedsim.engine.sequence import Sequences, make_group
from tests.engine.sampling.fake import Letters, Loop, noisy

VOCAB = 26
PROMPT = [1, 2, 3, 4, 5]
MODEL = noisy(VOCAB)
GREEDY = SamplingParams(temperature=0)


def group(params: SamplingParams, **given: Any) -> Sequences:
    made = make_group(Request("a", PROMPT, params), tokenizer=Letters(), **given)
    assert isinstance(made, Sequences)
    return made


def served(params: SamplingParams, name: str = "a", **given: Any) -> RequestOutput:
    loop = Loop(MODEL, **{"eos": (0,), **given})
    loop.add(name, PROMPT, params)
    return loop.run()[name]


def lines(output: RequestOutput) -> list[list[int]]:
    return [list(one.token_ids) for one in output.outputs]


# Which requests take the fast path


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"n": 2},
        {"best_of": 2},
        {"logprobs": 0},
        {"stop": "x"},
        {"min_tokens": 1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
    ],
)
def test_what_needs_more_than_an_argmax_is_not_plain(settings: dict[str, Any]) -> None:
    assert group(GREEDY).plain
    assert not group(SamplingParams(**{"temperature": 0.0, **settings})).plain


# Rows


def test_before_the_first_token_each_sequence_has_its_row() -> None:
    a = group(SamplingParams(n=3), seed=5, number=2)
    rows = a.rows()
    assert len({row.key for row in rows}) == 3
    assert [(row.position, row.prompt, list(row.output)) for row in rows] == [(5, PROMPT, [])] * 3


def test_streams_belong_to_the_engines_seed_and_the_request_unless_it_has_a_seed() -> None:
    def keys(params: SamplingParams, seed: int, number: int) -> list[int]:
        return [row.key for row in group(params, seed=seed, number=number).rows()]

    two = SamplingParams(n=2)
    assert keys(two, 1, 2) == keys(two, 1, 2)
    assert len({*keys(two, 1, 2), *keys(two, 1, 3), *keys(two, 2, 2)}) == 6
    own = SamplingParams(n=2, seed=9)
    assert keys(own, 1, 2) == keys(own, 7, 8) == [stream_key(9, 0), stream_key(9, 1)]


def test_ends_are_forbidden_until_min_tokens() -> None:
    params = SamplingParams(temperature=0, min_tokens=8, max_tokens=20, stop_token_ids=(3, 9))
    assert set(group(params, eos=(0,)).rows()[0].forbidden) == {0, 3, 9}
    (line,) = lines(served(params, eos=range(0, VOCAB, 2)))
    assert not {*range(0, VOCAB, 2), 3, 9} & set(line[:8])
    assert len(line) >= 9


# Ends


def test_a_request_of_one_sequence_is_told_plain_tokens() -> None:
    a = group(SamplingParams(stop_token_ids=(7,)), eos=(0,))
    assert a.take([Sample(4)]) == (4, None)
    assert a.take([Sample(7)]) == (7, "stop")


def test_sequences_that_end_leave_the_group() -> None:
    a = group(SamplingParams(n=4, max_tokens=9), eos=(0,))
    assert a.take([Sample(5), Sample(0), Sample(6), Sample(7)]) == (
        Continuation([5, 6, 7], [0, 2, 3]),
        None,
    )
    a.request.outputs = [[5], [6], [7]]
    assert a.take([Sample(8), Sample(8), Sample(9)]) == (Continuation([8, 8, 9]), None)
    a.request.outputs = [[5, 8], [6, 8], [7, 9]]
    assert a.take([Sample(0), Sample(1), Sample(0)]) == (Continuation([1], [1]), None)
    a.request.outputs = [[6, 8, 1]]
    assert a.take([Sample(0)]) == (0, "stop")
    assert lines(a.output(finished=True)) == [[5, 8, 0], [0], [6, 8, 1, 0], [7, 9, 0]]


def test_when_all_end_at_once_each_is_told_its_token() -> None:
    a = group(SamplingParams(n=2), eos=(0,))
    assert a.take([Sample(0), Sample(0)]) == (Continuation([0, 0]), "stop")


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
    assert a.take([Sample(token)]) == (token, "stop")
    (output,) = a.output(finished=True).outputs
    assert (output.finish_reason, output.stop_reason, output.text) == (reason, stop, text)
    assert output.token_ids == [token]


def test_a_plain_request_learns_at_the_close_why_it_ended() -> None:
    for eos, params, stop in (
        ((7,), GREEDY, None),
        ((), SamplingParams(temperature=0, stop_token_ids=(7,)), 7),
    ):
        a = group(params, eos=eos)
        a.request.outputs = [[5, 7]]
        a.close("stop")
        (output,) = a.output(finished=True).outputs
        assert (output.text, output.finish_reason, output.stop_reason) == ("f", "stop", stop)


@pytest.mark.parametrize("reason", ["length", "abort", "rejected"])
def test_sequences_that_go_on_end_with_their_request(reason: str) -> None:
    a = group(SamplingParams(n=2), eos=(0,))
    a.take([Sample(0), Sample(3)])
    a.request.outputs = [[3]]
    a.close(reason)
    first, second = a.output(finished=True).outputs
    assert (first.finish_reason, second.finish_reason) == ("stop", reason)
    assert (second.text, second.token_ids) == ("d", [3])


def test_a_request_that_never_ran_has_empty_outputs() -> None:
    a = group(SamplingParams(n=2))
    a.close("abort")
    outputs = a.output(finished=True).outputs
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [([], "abort")] * 2


def test_a_stop_string_ends_one_sequence_of_a_group() -> None:
    params = SamplingParams(n=3, max_tokens=40, stop=("ab", "q"), ignore_eos=True, seed=4)
    outputs = served(params).outputs
    assert len(outputs) == 3
    for output in outputs:
        whole = Letters().decode(output.token_ids)
        if output.finish_reason == "stop":
            assert isinstance(output.stop_reason, str)
            assert whole == output.text + output.stop_reason
        else:
            assert whole == output.text and len(whole) == 40
    assert any(output.finish_reason == "stop" for output in outputs)


def test_stop_strings_wait_for_min_tokens() -> None:
    params = SamplingParams(stop=("e",), min_tokens=2)
    a = group(params)
    assert a.take([Sample(4)]) == (4, None)
    a.request.outputs = [[4]]
    a.request._generated = 1
    assert a.take([Sample(4)]) == (4, "stop")
    assert a.output(finished=True).outputs[0].text == "e"


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match=r"^request 'a': SamplingParams\.stop=\('x',\): the mo"):
        make_group(Request("a", 4, SamplingParams(stop=("x",))))


# Outputs


def test_a_stream_holds_back_what_may_begin_a_stop_string() -> None:
    a = group(SamplingParams(stop=("fg",)))
    for count, token in enumerate([4, 5, 4, 5], start=1):
        a.take([Sample(token)])
        a.request.outputs = [[4, 5, 4, 5][:count]]
    assert a.output(finished=False).outputs[0].text == "efe"
    a.close("length")
    assert a.output(finished=True).outputs[0].text == "efef"


def test_without_a_tokenizer_there_is_no_text() -> None:
    made = make_group(Request("a", PROMPT, GREEDY))
    made.request.outputs = [[3]]
    made.close("length")
    (output,) = made.output(finished=True).outputs
    assert (output.text, output.token_ids) == ("", [3])


def test_an_output_tells_the_request() -> None:
    loop = Loop(MODEL)
    request = loop.add("a", PROMPT, SamplingParams(temperature=0, max_tokens=3))
    output = loop.run()["a"]
    assert (output.request_id, output.prompt_token_ids) == ("a", PROMPT)
    assert (output.metrics.first_token, output.metrics.finished) == (1.0, 3.0)
    assert output.metrics.arrival == request.arrival and output.metrics.preemptions == 0
    assert "metrics" not in repr(output) and "token_ids" in repr(output)


def test_logprobs_name_the_sampled_token_and_the_best() -> None:
    output = served(SamplingParams(logprobs=2, max_tokens=6, seed=3)).outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    text = list(PROMPT)
    total = 0.0
    for token, known in zip(output.token_ids, output.logprobs, strict=True):
        raw = MODEL([text])[0].log_softmax(0)
        assert set(known) == {token, *raw.topk(2).indices.tolist()}
        for one, logprob in known.items():
            assert logprob.logprob == pytest.approx(float(raw[one]), abs=1e-5)
            assert logprob.rank == 1 + int((raw > raw[one]).sum())
        total += known[token].logprob
        text.append(token)
    assert output.cumulative_logprob == pytest.approx(total)


def test_unrequested_logprobs_cost_nothing() -> None:
    (output,) = served(SamplingParams(max_tokens=3)).outputs
    assert (output.cumulative_logprob, output.logprobs) == (None, None)


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
            assert token == int((MODEL([PROMPT + text]) + noise).argmax())
            text.append(token)


def test_a_seed_makes_the_output_independent_of_everything_else() -> None:
    params = SamplingParams(n=2, seed=6, max_tokens=10)
    alone = lines(served(params, seed=1))
    loop = Loop(MODEL, eos=(0,), seed=77)
    for name in ("x", "y", "z"):
        loop.add(name, PROMPT, SamplingParams(n=2, max_tokens=10))
    loop.step()
    loop.add("a", PROMPT, params)
    outputs = loop.run()
    assert lines(outputs["a"]) == alone
    assert len({str(lines(output)) for output in outputs.values()}) == 4


# With little memory


MIXED = {
    "plain": SamplingParams(temperature=0, max_tokens=18),
    "drawn": SamplingParams(max_tokens=14, top_p=0.9),
    "three": SamplingParams(n=3, max_tokens=16),
    "best": SamplingParams(n=1, best_of=3, max_tokens=12),
    "beams": SamplingParams(n=3, beam_search=True, max_tokens=13),
    "string": SamplingParams(n=2, stop=("k", "zz"), max_tokens=20),
    "scored": SamplingParams(temperature=0.7, logprobs=1, max_tokens=10, frequency_penalty=0.3),
}


def all_of(params: dict[str, SamplingParams], **given: Any) -> tuple[dict[str, Any], Loop]:
    loop = Loop(MODEL, **{"eos": (0, 13), **given})
    for number, (name, one) in enumerate(params.items()):
        loop.add(name, [number, *PROMPT], one)
    outputs = loop.run()
    return {name: outputs[name].outputs for name in params}, loop


@pytest.mark.parametrize("memory", ["paged", "prefix"])
@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_does_not_show(memory: str, batching: str, preemption: str) -> None:
    want, ample = all_of(MIXED)
    crowded: dict[str, Any] = {
        "memory": memory,
        "batching": batching,
        "preemption": preemption,
        "blocks": 18,
        "cpu_blocks": 12 if preemption == "swap" else 0,
    }
    if batching == "unified":
        crowded["max_batched_tokens"] = 9
    got, loop = all_of(MIXED, **crowded)
    assert ample.preempted == 0 and loop.preempted > 2
    assert loop.rebuilt if preemption == "recompute" else loop.scheduler.memory.cpu_total
    assert got == want


REQUESTS = st.builds(
    SamplingParams,
    n=st.integers(1, 3),
    best_of=st.sampled_from([None, None, 3]),
    beam_search=st.sampled_from([False, False, True]),
    early_stopping=st.sampled_from([False, True]),
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    stop_token_ids=st.sampled_from([(), (3,), tuple(range(12))]),
)


@given(
    st.lists(REQUESTS, min_size=1, max_size=5),
    st.sampled_from(["prefill_first", "unified"]),
    st.sampled_from(["recompute", "swap"]),
    st.integers(14, 24),
)
@settings(max_examples=settings().max_examples // 4)
def test_any_mix_is_served_alike_by_any_scheduler(
    asked: list[SamplingParams], batching: str, preemption: str, blocks: int
) -> None:
    params = {str(number): one for number, one in enumerate(asked)}
    want, _ = all_of(params)
    tokens = {"max_batched_tokens": 8} if batching == "unified" else {}
    cpu = 10 if preemption == "swap" else 0
    got, _ = all_of(
        params, batching=batching, preemption=preemption, blocks=blocks, cpu_blocks=cpu, **tokens
    )
    assert got == want
    for one, outputs in zip(asked, got.values(), strict=True):
        assert len(outputs) == one.n
        for output in outputs:
            assert output.finish_reason == ("stop" if ended(output, one) else "length")
            assert output.finish_reason == "stop" or len(output.token_ids) == one.max_tokens


def ended(output: CompletionOutput, params: SamplingParams) -> bool:
    return output.token_ids[-1] in {0, 13, *params.stop_token_ids}


def test_ids_of_tokens_are_plain_numbers() -> None:
    output = served(SamplingParams(n=2, max_tokens=4)).outputs[0]
    assert all(type(token) is int for token in output.token_ids)
    assert not isinstance(output.token_ids, torch.Tensor)

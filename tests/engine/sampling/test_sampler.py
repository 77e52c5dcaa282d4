"""Logits to tokens, held against transformers' processors and against plain Python."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import fields
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from pagedsim.core import SamplingParams
from pagedsim.engine.sampler import (
    Row,
    Rows,
    Sampler,
    TokenCounts,
    gumbel,
    penalise,
    penalties,
    places,
    stream_key,
)
from pagedsim.kernels.reference.sampling import (
    keep_min_p,
    keep_top_k,
    keep_top_p,
)

GREEDY = SamplingParams(temperature=0)
VOCAB = 97
CPU = torch.device("cpu")


def row(params: SamplingParams, number: int = 0, **given: Any) -> Row:
    defaults: dict[str, Any] = {"prompt": [1, 2, 2], "output": [3, 3, 3, 4]}
    return Row(params, stream_key(number), 7, **{**defaults, **given})


def some_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def kept(logits: Tensor) -> list[list[int]]:
    """The tokens of each row that are not ruled out."""
    return [torch.nonzero(one > -torch.inf)[:, 0].tolist() for one in logits]


def column(*values: float, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


def test_greedy_is_the_argmax_and_leaves_the_logits_alone() -> None:
    logits = some_logits(4)
    before = logits.clone()
    for params in (GREEDY, SamplingParams(temperature=1e-30)):  # too small to divide by
        assert Sampler().sample(logits, [row(params)] * 4) == (before.argmax(1).tolist(), None)
    assert torch.equal(logits, before)


# Truncation


@pytest.mark.parametrize("vocab", [64, 10_000])
def test_truncation_is_that_of_transformers(vocab: int) -> None:
    """All in its order: temperature, top-k, top-p, min-p; the prefix that is sorted may not do."""
    for seed, (k, p, m) in enumerate([(50, 0.9, 0.05), (20, 0.99, 0.001), (vocab, 0.95, 0.02)]):
        logits = some_logits(5, vocab, seed) / (1 + 4 * seed)
        theirs = hf.LogitsProcessorList(
            [
                hf.TemperatureLogitsWarper(0.7),
                hf.TopKLogitsWarper(k),
                hf.TopPLogitsWarper(p),
                hf.MinPLogitsWarper(m),
            ]
        )(torch.LongTensor(5, 1), torch.FloatTensor(logits))
        ours = keep_top_k(logits / 0.7, column(*[k] * 5))
        ours = keep_top_p(ours, column(*[p] * 5, dtype=torch.float64))
        ours = keep_min_p(ours, column(*[math.log(m)] * 5))
        assert kept(ours) == kept(theirs)


# Penalties


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    logits = some_logits(3)
    texts = [[5, 6, 6], [7, 90, 8], [9, 9, 9]]
    params = [SamplingParams(repetition_penalty=1.3)] * 3
    theirs = hf.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor(texts), logits.clone())
    ours = penalise(
        logits, penalties(params, CPU), [text[:2] for text in texts], [text[2:] for text in texts]
    )
    assert torch.equal(ours, theirs)


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = some_logits(1)
    params = [SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)]
    change = (penalise(logits, penalties(params, CPU), [[1, 2]], [[3, 3, 3, 4]]) - logits)[0]
    want = {3: -0.5 - 3 * 0.25, 4: -0.5 - 0.25}
    assert change.tolist() == pytest.approx([want.get(i, 0) for i in range(VOCAB)], abs=1e-6)


def test_what_was_said_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step after step, with sequences that come, go and start again: as if counted anew."""
    sizes: list[int] = []

    def counted(texts: Sequence[Sequence[int]], like: Tensor) -> Tensor:
        sizes.append(sum(map(len, texts)))
        return places(texts, like)

    monkeypatch.setattr("pagedsim.engine.sampler.places", counted)
    said, logits = TokenCounts(), some_logits(3)
    texts: list[list[int]] = [[5], [7, 7], []]
    prompts = [(1, 2), (2, 3), ()]
    settings = penalties([SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5)] * 3, CPU)
    for token in range(6):
        if token == 3:
            texts[1] = [*texts[1][:1]]  # another list: it started again
        if token == 5:
            texts, prompts = texts[::-1], prompts[::-1]
        sizes.clear()
        ours = penalise(logits, settings, prompts, texts, said)
        assert sum(sizes) == (3 if token in (1, 2, 4) else sum(map(len, [*texts, *prompts])))
        assert torch.equal(ours, penalise(logits, settings, prompts, texts))
        for text in texts:
            text.append(token)


# Drawing


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=2.5),
        SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05),
    ],
)
def test_frequencies_are_the_probabilities(params: SamplingParams) -> None:
    draws, vocab = 20_000, 16
    logits = some_logits(1, vocab, seed=3) / 2
    rows = [row(params, number) for number in range(draws)]
    tokens, _ = Sampler().sample(logits.expand(draws, -1), rows)
    counts = np.bincount(tokens, minlength=vocab)
    want = reference(logits[0].tolist(), params) * draws
    assert not counts[want == 0].any()
    live = want > 0
    statistic = float(((counts - want)[live] ** 2 / want[live]).sum())
    freedom = int(live.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def reference(logits: Sequence[float], params: SamplingParams) -> np.ndarray:
    """What the probabilities are, slowly."""
    weights = np.exp(np.array(logits) / params.temperature)
    order = np.argsort(-weights)
    if params.top_k:
        weights[order[params.top_k :]] = 0
    before = np.concatenate(([0], np.cumsum(weights[order])[:-1]))
    weights[order[before >= params.top_p * weights.sum()]] = 0
    weights[weights < params.min_p * weights.max()] = 0
    return weights / weights.sum()


SETTINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.9]),
    top_k=st.sampled_from([0, 0, 1, 7, 60, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.5, 0.97]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.2]),
    logprobs=st.sampled_from([None, None, 0, 3]),
)

ROWS = st.builds(
    row,
    SETTINGS,
    st.integers(0, 99),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=5),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=9),
    forbidden=st.sampled_from([(), (), (3, 5)]),
)


@settings(max_examples=settings().max_examples * 2 // 5)
@given(st.lists(ROWS, min_size=1, max_size=12), st.sampled_from([VOCAB, 700]))
def test_a_row_does_not_depend_on_the_batch(rows: list[Row], vocab: int) -> None:
    """To the last bit, in one batch of settings after another."""
    logits = some_logits(len(rows), vocab, seed=len(rows))
    sampler = Sampler()
    together = told(sampler, logits, rows)
    alone = [told(sampler, logits[i : i + 1], [one])[0] for i, one in enumerate(rows)]
    assert together == alone
    assert told(sampler, logits.flip(0), rows[::-1]) == together[::-1]


def told(sampler: Sampler, logits: Tensor, rows: list[Row]) -> list[tuple[Any, ...]]:
    """The token of each row, with the scores that it requests."""
    tokens, scores = sampler.sample(logits, rows)
    columns = iter(() if scores is None else zip(*scores, strict=True))
    lines: list[tuple[Any, ...]] = []
    for token, row in zip(tokens, rows, strict=True):
        if (count := row.params.logprobs) is None:
            lines.append((token,))
        else:
            best, logprobs, rank = next(columns)
            lines.append((token, best[: count + 1], logprobs[: count + 1], rank))
    return lines


# Noise


def test_these_values_never_change() -> None:
    """Outputs of a seed are promised to stay."""
    assert [stream_key(0), stream_key(-1, 3)] == [0xA706DD2F4D197E6F, 0xED4D5ED4A6EA59B4]
    assert gumbel([stream_key(5)], [7], 4)[0].tolist() == pytest.approx(
        [0.7191, -0.02944, 0.7285, -0.2977], abs=1e-5
    )


# On a GPU that is not there: whatever is asked for, the host waits for nothing


OTHERS: dict[str, Any] = {
    "n": 2,
    "best_of": 3,
    "max_tokens": 9,
    "min_tokens": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.05,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "stop": "x",
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "logprobs": 3,
    "seed": 5,
}
"""Another value than the default for each setting."""

BEAMS = {"beam_search", "length_penalty", "early_stopping"}
"""Their best successors are chosen on the host."""


def params_of(given: dict[str, Any]) -> SamplingParams:
    best = given.get("best_of", 3)
    return SamplingParams(**{**given, "best_of": best} if "n" in given else given)


def rows_of(params: SamplingParams) -> list[Row]:
    """Two sequences of which one may not end yet."""
    return [
        Row(params, stream_key(0), 7, [1, 2], [3, 4], forbidden)
        for forbidden in ((), (0, 7) if params.min_tokens else ())
    ]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "random"])
def test_no_draw_synchronises(temperature: float) -> None:
    """With each setting alone, with every two of them if random, and with all in one batch."""
    from tests.engine.launches import FAKE, FakeGPU

    defaults = {one.name: one.default for one in fields(SamplingParams)}
    assert {*OTHERS, *BEAMS} == {*defaults}
    assert all(defaults[name] != value for name, value in OTHERS.items())
    few: list[dict[str, Any]] = [{name: value} for name, value in OTHERS.items()]
    pairs = combinations(few, 2) if temperature else ()
    many = [{}, *few, *({**one, **other} for one, other in pairs)]
    batches = [rows_of(params_of({"temperature": temperature, **given})) for given in many]
    batches.append([row for rows in batches for row in rows])
    with FakeGPU() as gpu:
        for rows in batches:
            logits, sampler = torch.empty(len(rows), 50257, device=FAKE), Sampler()
            for _ in range(2):  # with new columns and counts, and with these
                sampler.draw(logits, Rows.of(rows))
                for row in rows:
                    if row.params.penalised:
                        assert isinstance(row.output, list)
                        row.output.append(9)
            assert gpu.launches
            gpu.launches.clear()

"""Beam search gives what transformers' generate gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from pagedsim.core import Request, RequestError, SamplingParams
from pagedsim.engine.beam import Beams
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.output import RequestOutput
from pagedsim.engine.sequence import make_group

VOCAB = 26
PROMPT = [5, 9, 4, 17]


@cache
def tiny(kind: str, seed: int, sharpness: float = 4.0) -> Any:
    """A random model whose distributions are peaked enough for ends to matter."""
    torch.manual_seed(seed)
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=128,
            )
        )
    else:
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=128)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
        norm = model.model.norm if kind == "llama" else model.transformer.ln_f
        norm.weight.mul_(sharpness)
    return model.eval()


@cache
def end_of(model: Any) -> int:
    """A token that its beams often come to, but seldom at once."""
    lines, _ = theirs(model, 4, 4, 14, eos_token_id=None)
    first = {line[0] for line in lines}
    later = Counter(token for line in lines for token in line[1:] if token not in first)
    return max(later or Counter(lines[0]), key=lambda token: (later[token], token))


@cache
def loaded(model: Any) -> LoadedModel:
    return load_model(deepcopy(model))


def engine_of(model: Any, eos: Collection[int] = (), **settings: Any) -> LLMEngine:
    """An engine for the model, with other ends than its own."""
    given = {"block_size": 4, "blocks": 200, "max_seqs": 16, **settings}
    return LLMEngine(model=replace(loaded(model), eos_token_ids=tuple(eos)), device="cpu", **given)


def run(engine: LLMEngine) -> dict[Any, RequestOutput]:
    outputs: dict[Any, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.scheduler.check()
    return outputs


def theirs(model: Any, beams: int, n: int, tokens: int, **more: Any) -> tuple[list, list]:
    """Sequences and scores; what follows an end is padding."""
    found = model.generate(
        torch.tensor([PROMPT]),
        num_beams=beams,
        num_return_sequences=n,
        do_sample=False,
        max_new_tokens=tokens,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **more,
    )
    ends = (
        more["eos_token_id"] if isinstance(more["eos_token_id"], list) else [more["eos_token_id"]]
    )
    sequences = []
    for line in found.sequences[:, len(PROMPT) :].tolist():
        stop = next((i for i, token in enumerate(line) if token in ends), len(line))
        sequences.append(line[: stop + 1])
    return sequences, found.sequences_scores.tolist()


def ours(model: Any, params: SamplingParams, **settings: Any) -> tuple[list, list]:
    engine = engine_of(model, (end_of(model),), **settings)
    engine.add_request("a", PROMPT, params)
    outputs = run(engine)["a"].outputs
    return [list(output.token_ids) for output in outputs], [output.score for output in outputs]


def agree(model: Any, beams: int, tokens: int, n: int | None = None, **settings: Any) -> None:
    """`settings` are those of both. With one end, and with so many that most beams end early."""
    n = n or beams
    for more in ((), (8, 13, 21, 22)):
        params = SamplingParams(
            n=n,
            best_of=beams,
            beam_search=True,
            max_tokens=tokens,
            stop_token_ids=more,
            **settings,
        )
        ends = sorted({end_of(model), *more})
        want, scores = theirs(model, beams, n, tokens, eos_token_id=ends, **settings)
        got, got_scores = ours(model, params)
        assert got == want
        assert got_scores == pytest.approx(scores, abs=1e-3, rel=1e-4)


EARLY: list[Any] = [False, True, "never"]


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize(
    ("penalty", "kind"), [(-1, "llama"), (0, "gpt2"), (1, "llama"), (2.5, "gpt2")]
)
def test_sequences_and_scores_are_those_of_transformers(
    kind: str, early: Any, penalty: float
) -> None:
    for beams, tokens in ((2, 9), (4, 14)):
        agree(tiny(kind, 0), beams, tokens, early_stopping=early, length_penalty=penalty)


@pytest.mark.slow
@pytest.mark.parametrize("early", EARLY)
def test_over_many_models_lengths_and_penalties(early: Any) -> None:
    for seed in range(10):  # each kind with each sharpness
        model = tiny(("llama", "gpt2")[seed % 2], seed, sharpness=2.0 + seed % 5 * 1.5)
        for beams, tokens in ((2, 1), (3, 2), (3, 20), (5, 11), (8, 7)):
            penalty = (-0.5, 0.0, 0.7, 1.0, 1.8)[(seed + beams) % 5]
            agree(model, beams, tokens, early_stopping=early, length_penalty=penalty)


def test_settings_of_requests() -> None:
    """Fewer sequences than beams, penalties, no end, and no end too soon."""
    agree(tiny("llama", 1), beams=5, tokens=10, n=2)
    agree(tiny("gpt2", 0), beams=3, tokens=12, repetition_penalty=1.4)
    model = tiny("llama", 2)
    want, _ = theirs(model, 3, 3, 10, eos_token_id=None)
    got, _ = ours(model, SamplingParams(n=3, beam_search=True, max_tokens=10, ignore_eos=True))
    assert got == want and all(len(line) == 10 for line in got)
    for seed in range(2):
        model = tiny("llama", seed)
        want, _ = theirs(model, 3, 3, 10, min_new_tokens=6, eos_token_id=end_of(model))
        params = SamplingParams(n=3, beam_search=True, max_tokens=10, min_tokens=6)
        got, _ = ours(model, params)
        assert got == want and all(len(line) >= 6 for line in got)


def test_while_it_runs_the_output_is_that_of_the_running_beams() -> None:
    request = Request("a", PROMPT, SamplingParams(n=2, beam_search=True, max_tokens=5))
    group = make_group(request, eos=(3,))
    assert isinstance(group, Beams)
    assert [output.token_ids for output in group.output(finished=False).outputs] == [[], []]
    request._outputs = [[4], [7]]
    group.take(torch.zeros(1, VOCAB))
    outputs = group.output(finished=False).outputs
    assert [output.token_ids for output in outputs] == [[4], [7]]
    assert not any(output.finish_reason for output in outputs)
    group.close("abort")
    assert [o.finish_reason for o in group.output(finished=True).outputs] == ["abort"] * 2


@pytest.mark.parametrize("settings", [{"stop": ("x",)}, {"logprobs": 3}])
def test_what_beams_cannot_do(settings: dict[str, Any]) -> None:
    request = Request("a", 4, SamplingParams(n=2, beam_search=True, **settings))
    with pytest.raises(RequestError, match=r"^request 'a': SamplingParams\.\w+=.*: not with beam"):
        make_group(request)

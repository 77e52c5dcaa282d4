"""Time of the engine's host in a decode step, with a model that computes nothing.

    python -m pagedsim.experiments.benchmarks.host [--device cuda] [--kinds greedy stream ...]

A full batch decodes, of requests of one of the `KINDS`. Each figure is the median over the steps of
a round, of the best round, since the machine may be shared. On a CPU it is the time for which a GPU
would wait, without what a GPU would compute to draw and score tokens. On a GPU inputs are sent, a
graph is launched, and tokens come back. Tokens are first compared with the model's. With `--out`,
or on a GPU, results go to host.json.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pagedsim.core import SamplingParams
from pagedsim.engine import sampler
from pagedsim.engine.engine import LLMEngine, StepTimes
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.tokenizer import HuggingFaceTokenizer
from pagedsim.experiments.benchmarks.device import TIMED, Line, Run
from pagedsim.experiments.benchmarks.harness import main_of
from pagedsim.kernels import ops

LONGEST = 1024
"""Tokens of a request, prompt and output."""
CHECKED = 4
"""Steps whose tokens are compared."""
PARTS = {"plan": "plan", "inputs and launch": "launch", "sample": "sample", "commit": "commit"}
GREEDY, STREAM = "greedy", "stream"
KINDS: Mapping[str, Mapping[str, Any]] = {
    GREEDY: {},
    "temperature": {"temperature": 0.8},
    "logprobs": {"logprobs": 5},
    "stop": {"stop": ("a text that", "never comes")},
    STREAM: {},
}
"""Settings of the requests of each kind. Those of `STREAM` return their text token by token."""


class Nothing:
    """Stands in for a model's own forward pass."""

    group = None

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.logits = torch.rand(LONGEST, vocab).to(device)

    def forward(self, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        """The same logits for every request at any time."""
        return self.logits[: len(rest[-1])]


def idle_model(device: torch.device) -> LoadedModel:
    """The tiny model with the forward pass `Nothing`."""
    torch.set_num_threads(1)
    model = load_model("tiny", dtype="float32", device=device, max_model_len=LONGEST)
    return replace(model, native=cast(Any, Nothing(model.vocab_size, device)))


@cache
def tokenizer(vocab: int) -> HuggingFaceTokenizer:
    """Decodes bytes as GPT-2's does; a token is two letters or a space and a letter."""
    letters = product("Ġetaoinshrdlucmfwypvbgk", "etaoinshrdlucmfwypvbgkq")
    words = {"".join(pair): number for number, pair in enumerate(letters)}
    backend = Tokenizer(models.BPE(words, []))
    backend.decoder = decoders.ByteLevel()
    assert len(words) >= vocab, "tokens without a text"
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


@contextmanager
def without_kernels() -> Iterator[None]:
    """Within, tokens are neither drawn nor scored, which on a CPU the host itself would do."""

    def pick(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        return logits.argmax(1)

    def scored(logits: torch.Tensor, picked: torch.Tensor, batch: Any) -> list[torch.Tensor]:
        scores = torch.zeros(len(picked), 1 + max(batch.logprobs, default=0))
        return [scores.long(), scores, picked] if batch.scored.rows else []

    with patch.object(ops, "pick", pick), patch.object(sampler, "_scored", scored):
        yield


def round_of(engine: LLMEngine, steps: int) -> StepTimes:
    """The median of each part of `steps` steps."""
    times = []
    for _ in range(steps):
        engine.step()
        assert engine.times is not None
        times.append(engine.times)
    return StepTimes(*(median(part) for part in zip(*times, strict=True)))


def full_batch(
    model: LoadedModel,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    stream: bool = False,
    **settings: Any,
) -> LLMEngine:
    """An engine whose requests all decode; those that stream, or stop, have a text."""
    engine = LLMEngine(model=model, device=model.device.type, max_seqs=len(prompts), **settings)
    if stream or params.stop:
        engine.tokenizer = tokenizer(model.vocab_size)
    for number, prompt in enumerate(prompts):
        engine.add_request(number, prompt, params, stream=stream, delta=stream)
    while engine.scheduler.clock.requests < len(prompts):
        engine.step()
    return engine


class Batch(NamedTuple):
    """What is measured."""

    requests: int
    async_scheduling: bool
    kind: str = GREEDY

    def __str__(self) -> str:
        words = [str(self.requests), *[self.kind] * (self.kind != GREEDY)]
        return ", ".join([*words, *["ahead"] * self.async_scheduling])


def host(words: Sequence[str]) -> None:
    """Print the time of each part of a step."""
    more = {"--device": ("cpu", "cuda"), "--rounds": 4, "--running": [1, 16, 64, 256]}
    kinds = {"choices": KINDS, "nargs": "+", "default": [GREEDY], "help": "of requests"}
    run = Run("host", __doc__, words, {**more, "--steps": 100, "--kinds": kinds})
    model, asked = idle_model(run.device), run.asked
    cases = product(asked.kinds, asked.running, (False, True))
    batches = (Batch(requests, ahead, kind) for kind, requests, ahead in cases)
    run.sweep(batches, lambda batch: measure(model, batch, asked.steps, asked.rounds))
    cells: dict[str, Callable[[Line], str]] = {"requests": lambda line: line["case"]}
    for head, part in {**PARTS, "µs in all": TIMED}.items():
        cells[head] = partial(lambda line, part: f"{line[part] * 1e6:.1f}", part=part)
    run.close(cells, "a step of decodes, prefill_first, paged, blocks of 16")


def measure(model: LoadedModel, batch: Batch, steps: int, rounds: int) -> Line:
    """Seconds of each part of a step, if its tokens are right."""
    rng, most = random.Random(0), steps * rounds + 64
    prompts = [
        [rng.randrange(250) for _ in range(rng.randint(64, LONGEST - most))]
        for _ in range(batch.requests)
    ]
    asked = {"temperature": 0, "max_tokens": most, "ignore_eos": True, **KINDS[batch.kind]}
    params, ahead = SamplingParams(**asked), batch.async_scheduling
    stream = batch.kind == STREAM
    engine = full_batch(model, prompts, params, stream, async_scheduling=ahead)
    if not params.temperature and not right(engine):
        return {"right": False}
    cpu = model.device.type == "cpu"
    with without_kernels() if cpu else nullcontext():
        best = min((round_of(engine, steps) for _ in range(rounds)), key=sum)
    parts = {part: getattr(best, part) for part in PARTS.values()}
    return {"right": True, **parts, TIMED: sum(parts.values())}


def right(engine: LLMEngine) -> bool:
    """Whether the tokens of some steps are the most likely ones of the model's logits."""
    nothing = cast(Nothing, engine.model.native)
    requests = list(engine.scheduler.requests.values())
    wanted = sorted(nothing.logits[: len(requests)].argmax(1).tolist())
    engine.step()  # its tokens, or with async_scheduling the next ones, may be of a prefill
    for _ in range(CHECKED):
        engine.step()
        if sorted(request.outputs[0][-1] for request in requests) != wanted:
            return False
    return True


main = main_of(__name__, host)

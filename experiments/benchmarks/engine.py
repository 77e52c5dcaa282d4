"""Tokens a second of the engine against transformers' `generate_batch`, in one run.

    python -m experiments.benchmarks.engine
    python -m experiments.benchmarks.engine --device cuda

Greedy, the same prompts and lengths over the same weights; all are warm, and what they allocate at
their start is not counted. A ratio is of the best of `--repeats` rounds each, which take turns. The
engine runs with its own forward pass, with `async_scheduling`, and with transformers' forward pass.
Before anything is timed all must give the same tokens: in float32 to the last one, in half
precision, where the best two logits often tie, most of the first ones.

Where it does not find FlashAttention, `generate_batch` attends over its whole cache with a mask: on
a GPU that is a weak peer. Engines that serve are in servers.py.

On a CPU it is the tiny model on one thread, and what counts is the processor's time, as long as the
wall clock's where nobody else uses the machine. On a GPU it is Llama-3.1-8B's shape with random
weights, 256 requests at a time, by the wall clock. With `--out`, or on a GPU, results are kept in
engine.json.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from experiments.benchmarks.device import Plain, facts, require_gpu, table
from experiments.benchmarks.results import folder_of, keep
from experiments.benchmarks.shapes import BASE, config_of, shape_of
from experiments.benchmarks.words import Parser, at_least_one
from pagedsim.core import SamplingParams
from pagedsim.engine.llm import LLM
from pagedsim.engine.models import LoadedModel, load_model

Prompts = list[list[int]]
Answers = list[list[int]]

OURS: Mapping[str, Mapping[str, Any]] = {
    "pagedsim": {},
    "pagedsim, async_scheduling": {"async_scheduling": True},
    "pagedsim, model_impl=transformers": {"model_impl": "transformers"},
}
PEER = "transformers' generate_batch"
WEAK = ", over its whole cache with a mask"
PATIENCE = 600
"""Seconds."""
PAGE = 256
"""Tokens of a page of theirs."""
ALIKE = 0.5
"""The share of first tokens that must be the same in half precision. Of 128,256 random logits the
best two are often nearer to each other than rounding; two models that compute different things
agree on none."""


@dataclass(frozen=True)
class Load:
    """What is asked."""

    prompts: Prompts
    tokens: int
    """Generated for each."""

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(map(len, self.prompts)) + self.tokens

    def blocks(self, size: int) -> int:
        """Blocks that all of them take at once."""
        return sum(-(-(len(prompt) + self.tokens) // size) for prompt in self.prompts)


def main(words: Sequence[str] | None = None) -> None:
    """Print all rates and their ratios."""
    words = sys.argv[1:] if words is None else words
    parser = Parser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompts", type=at_least_one, help="64; 256 on a GPU")
    parser.add_argument(
        "--tokens", type=at_least_one, help="generated for each prompt: 64; 128 on a GPU"
    )
    parser.add_argument("--repeats", type=at_least_one, default=3)
    parser.add_argument("--out", type=Path, help="a folder for engine.json")
    asked = parser.parse_args(words)
    if cuda := asked.device == "cuda":
        require_gpu()
    device = torch.device(asked.device)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    place = asked.out or (folder_of(device) if cuda else None)
    model = loaded(device)
    load = load_of(
        asked.prompts or (256 if cuda else 64),
        range(64, 321) if cuda else range(8, 65),
        asked.tokens or (128 if cuda else 64),
        model.vocab_size if cuda else 250,
    )
    result: dict[str, Any] = {
        **facts(device, "experiments.benchmarks.engine", words),
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompts": len(load.prompts),
        "prompt_tokens": sum(map(len, load.prompts)),
        "tokens": load.tokens,
        "clock": "wall" if cuda else "processor",
    }
    result |= measure(model, load, asked.repeats, time.perf_counter if cuda else time.process_time)
    keep(place, "engine", result)
    print(written(result))
    if not result["right"]:
        sys.exit("these do not give the same tokens, so nothing was timed")


def loaded(device: torch.device) -> LoadedModel:
    """The model that all of them serve."""
    if device.type == "cpu":
        return load_model("tiny", device=device)
    config = config_of(shape_of(BASE))
    return load_model(config, dtype="bfloat16", device=device, max_model_len=1024)


def load_of(count: int, lengths: range, tokens: int, vocab: int) -> Load:
    """Random prompts."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, vocab) for _ in range(rng.choice(lengths))] for _ in range(count)]
    return Load(prompts, tokens)


def measure(
    model: LoadedModel, load: Load, repeats: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Tokens a second of each, if they give the same tokens."""
    peer = Peer(model, load)
    try:
        askers: dict[str, Callable[[], Answers]] = {
            **{name: asker(model, load, settings) for name, settings in OURS.items()},
            PEER: lambda: peer.answers(load),
        }
        peer.start()
        wanted = askers[PEER]()
        alike = {name: agreement(askers[name](), wanted, model.dtype) for name in OURS}
        enough = 1.0 if model.dtype == torch.float32 else ALIKE
        found = {
            "alike": alike,
            "attention": peer.attention,
            "right": min(alike.values()) >= enough,
        }
        if not found["right"]:
            return found
        # All are warm now.
        rounds = [{name: rate(ask, clock) for name, ask in askers.items()} for _ in range(repeats)]
    finally:
        peer.close()
    return {**found, "rates": {name: max(one[name] for one in rounds) for name in askers}}


def asker(model: LoadedModel, load: Load, settings: Mapping[str, Any]) -> Callable[[], Answers]:
    """What serves the load with an engine of these settings."""
    settings = dict(settings)
    native = None if settings.pop("model_impl", "") == "transformers" else model.native
    size = 16
    llm = LLM(
        replace(model, native=native),
        device=model.device.type,
        max_model_len=load.longest,
        max_num_seqs=len(load.prompts),
        block_size=size,
        num_gpu_blocks=load.blocks(size) + len(load.prompts),
        **settings,
    )
    params = SamplingParams(temperature=0, max_tokens=load.tokens, ignore_eos=True)

    def ask() -> Answers:
        answers = llm.generate(load.prompts, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return ask


def agreement(found: Answers, wanted: Answers, dtype: torch.dtype) -> float:
    """The share of answers that are the same; in half precision, of first tokens."""
    if [len(one) for one in found] != [len(one) for one in wanted]:
        return 0.0
    compared = slice(None) if dtype == torch.float32 else slice(1)
    same = [one[compared] == other[compared] for one, other in zip(found, wanted, strict=True)]
    return sum(same) / len(same)


def rate(ask: Callable[[], Answers], clock: Callable[[], float]) -> float:
    """Tokens a second."""
    begin = clock()
    answers = ask()
    return sum(map(len, answers)) / (clock() - begin)


class Peer:
    """transformers' continuous batching over the same weights, kept running between rounds."""

    def __init__(self, model: LoadedModel, load: Load) -> None:
        """Made before any engine serves the model: its modules are copied, its weights are not."""
        shared = {id(weight): weight for weight in model.module.parameters()}
        module: Any = deepcopy(model.module, shared)
        module.set_attn_implementation("sdpa")
        config = GenerationConfig(
            max_new_tokens=load.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        # Room for all that is asked here; by default it takes most of the machine's memory, and
        # minutes to do so.
        room = ContinuousBatchingConfig(num_blocks=load.blocks(PAGE) + 16, max_batch_tokens=4096)
        self._manager = module.init_continuous_batching(
            generation_config=config, continuous_batching_config=room
        )
        self._config = module.config

    def start(self) -> None:
        """Start its thread: after graphs were captured, since it waits for the whole device."""
        self._manager.start()

    @property
    def attention(self) -> str:
        """Which one it attends by: it takes FlashAttention where that is installed."""
        return str(self._config._attn_implementation).removeprefix("paged|")  # of some versions

    def answers(self, load: Load) -> Answers:
        """In the order of the prompts."""
        return self.collected(self._manager.add_requests(load.prompts, max_new_tokens=load.tokens))

    def collected(self, names: Sequence[str]) -> Answers:
        """The answers to requests that it was given, in their order."""
        done: dict[str, list[int]] = {}
        while len(done) < len(names):
            result = self._manager.get_result(timeout=PATIENCE)
            if result is None:
                sys.exit(f"{PEER} failed, or gave no answer within {PATIENCE} s")
            if result.error is not None:
                sys.exit(f"{PEER}: {result.error}")
            if result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
        return [done[name] for name in names]

    def close(self) -> None:
        """Stop its thread, if it runs."""
        self._manager.stop(block=True)


def written(result: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    second = "CPU second" if result["clock"] == "processor" else "second"
    title = (
        f"{result['model']}, {result['dtype']}, {result['device']}: {result['prompts']} prompts of "
        f"{result['prompt_tokens']:,} tokens, {result['tokens']} generated for each; "
        f"{PEER} attends by {result['attention']}{WEAK * (result['attention'] == 'sdpa')}"
    )
    rates = result.get("rates")
    if rates is None:
        rows = [[name, f"{share:.0%}"] for name, share in result["alike"].items()]
        return f"{title}\n\n{table(['', f'answers as of {PEER}'], rows)}"
    first = next(iter(rates.values()))
    rows = [[name, f"{own:,.0f}", f"{first / own:.2f}"] for name, own in rates.items()]
    head = ["", f"tokens per {second}", "pagedsim is so many times as fast"]
    return f"{title}\n\n{table(head, rows)}"


if __name__ == "__main__":
    main()

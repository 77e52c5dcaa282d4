"""Token rate of the engine, against transformers' `generate_batch`.

    python -m pagedsim.experiments.benchmarks.engine [--device cuda]
    python -m pagedsim.experiments.benchmarks.engine --model smollm2 --prompts 8 --tokens 8 32
    python -m pagedsim.experiments.benchmarks.engine alone --model smollm2

Both get the same prompts, lengths and weights, greedily and without stop tokens. On a CPU it is the
tiny model, or any other, on one thread, by the processor's time; on a GPU Llama-3.1-8B's shape with
random weights, by the wall clock. `--tokens` is the length of answers, or the least and the most.
With `--out`, or on a GPU, results go to engine.json.

A rate is the best of several rounds, in which all take turns. First all must give the same tokens:
in float32 all of them, in half precision, where the two best logits often tie, most of the first.

`alone` serves one request on a CPU with weights in several types, beside `generate`,
`generate_batch`, llama.cpp (`pip install xllamacpp`, for a model in a GGUF file as it is) and one
reading of the weights for each token. In float32 all must give the tokens of `generate`.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from pagedsim.core import SamplingParams
from pagedsim.engine.llm import LLM
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.models.gguf import gguf_file, is_packed
from pagedsim.experiments.benchmarks.device import TIMED, Line, Run
from pagedsim.experiments.benchmarks.harness import cpu_seconds, in_turns, main_of, positive_int
from pagedsim.experiments.benchmarks.shapes import BASE, config_of, shape_of

Answers = list[list[int]]
Ask = Callable[[], Answers]
"""Serves a load and returns its answers."""

OURS, PEER = "pagedsim", "transformers' generate_batch"
ENGINES: Mapping[str, Mapping[str, Any]] = {
    OURS: {"async_scheduling": False},
    "pagedsim, async_scheduling": {"async_scheduling": True},
}
MORE: Mapping[str, Any] = {
    "--device": ("cpu", "cuda"),
    "--rounds": 3,
    "--model": "tiny",
    "--dtype": "auto",
    "--prompts": {"type": positive_int, "help": "64; 256 on a GPU"},
    "--tokens": {"type": positive_int, "nargs": "+", "help": "of answers: 64; 128 on a GPU"},
}
TIMEOUT = 600
"""Seconds to wait for one of the peer's answers."""
PAGE = 256
"""Tokens of one of its pages."""
BLOCK = 16
ALIKE = 0.5
"""The share of first tokens that must be equal in half precision. Of 128,256 random logits the best
two are often nearer to each other than rounding; two different models agree on none."""


class Load(NamedTuple):
    """Prompts and the lengths of their answers."""

    prompts: list[list[int]]
    tokens: list[int]

    def blocks(self, size: int) -> int:
        """Blocks for all requests at once, with the longest answer each."""
        return sum(-(-(len(prompt) + max(self.tokens)) // size) for prompt in self.prompts)


def engine(words: Sequence[str]) -> None:
    """Print all rates and their ratios."""
    run = Run("engine", __doc__, words, MORE)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    model = loaded(run)
    load = load_of(run, model)
    sizes = {"model": model.name, "prompts": len(load.prompts), "tokens": sum(load.tokens)}
    run.content |= {**sizes, "dtype": str(model.dtype).removeprefix("torch.")}
    run.lines |= {line["case"]: line for line in measured(model, load, run.asked.rounds)}
    first = run.lines[OURS]
    cells: dict[str, Callable[[Line], str]] = {
        "": lambda line: line["case"],
        f"tokens per {'CPU ' * run.tiny}second": lambda line: f"{line['rate']:,.1f}",
        f"{OURS} is so many times as fast": lambda line: f"{first['rate'] / line['rate']:.2f}",
    }
    run.close(cells, *(f"{key} {size}" for key, size in sizes.items()), run.content["dtype"])


def loaded(run: Run) -> LoadedModel:
    """The model for a device."""
    if run.device.type == "cuda":
        config = config_of(shape_of(BASE))
        return load_model(config, device=run.device, dtype="bfloat16", max_model_len=1024)
    return load_model(run.asked.model, dtype=run.asked.dtype, max_model_len=512)


def load_of(run: Run, model: LoadedModel) -> Load:
    """Random prompts, of the default size for the model's device where none is given."""
    rng, cuda = random.Random(0), run.device.type == "cuda"
    lengths, count, tokens = (range(64, 321), 256, 128) if cuda else (range(8, 65), 64, 64)
    count, (least, *most) = run.asked.prompts or count, run.asked.tokens or [tokens]
    prompts = [
        [rng.randrange(3, model.vocab_size) for _ in range(rng.choice(lengths))]
        for _ in range(count)
    ]
    return Load(prompts, [rng.randint(least, max([least, *most])) for _ in range(count)])


def measured(model: LoadedModel, load: Load, rounds: int) -> list[Line]:
    """The rate of each, if all give the tokens of the peer."""
    clock = time.perf_counter if model.device.type == "cuda" else time.process_time
    exact = model.dtype == torch.float32
    with peer(model, load) as ask:
        askers = {name: asker(model, load, settings) for name, settings in ENGINES.items()}
        answers = {name: ask() for name, ask in askers.items()} | {PEER: ask()}
        lines: list[Line] = [
            {"case": name, "alike": agreement(given, answers[PEER], exact)}
            for name, given in answers.items()
        ]
        if all(line["alike"] >= (1.0 if exact else ALIKE) for line in lines):
            calls = {name: partial(rate, ask, clock) for name, ask in {**askers, PEER: ask}.items()}
            for line, rates in zip(lines, in_turns(calls, rounds).values(), strict=True):
                line |= {"rate": max(rates), TIMED: sum(load.tokens) / max(rates)}
    return lines


# -- the engine and its peer -----------------------------------------------------------------------


def asker(model: LoadedModel, load: Load, settings: Mapping[str, Any]) -> Ask:
    """The load served by an engine with these settings."""
    llm = LLM(
        model,
        device=model.device.type,
        max_model_len=max(map(len, load.prompts)) + max(load.tokens),
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
def peer(model: LoadedModel, load: Load) -> Iterator[Ask]:
    """transformers' continuous batching over the same weights.

    To be made before an engine uses the model: its modules are copied, its weights not. It starts
    its thread with the first round, after the capture of graphs, since it waits for the device.
    """
    module = copied(model)
    greedy = GenerationConfig(
        max_new_tokens=max(load.tokens), do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # Room for this load: by default it takes most of the machine's memory, and minutes.
    room = ContinuousBatchingConfig(num_blocks=load.blocks(PAGE) + 16, max_batch_tokens=4096)
    manager = module.init_continuous_batching(
        generation_config=greedy, continuous_batching_config=room
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

    try:
        yield ask
    finally:
        manager.stop(block=True)


def copied(model: LoadedModel) -> Any:
    """transformers' module, over the same weights."""
    shared = {id(weight): weight for weight in model.module.parameters()}
    module: Any = deepcopy(model.module, shared)
    module.set_attn_implementation("sdpa")
    return module


def agreement(answers: Answers, wanted: Answers, exact: bool) -> float:
    """The share of equal answers; in half precision, of equal first tokens."""
    if [len(answer) for answer in answers] != [len(answer) for answer in wanted]:
        return 0.0
    compared = slice(None) if exact else slice(1)
    pairs = zip(answers, wanted, strict=True)
    return sum(answer[compared] == right[compared] for answer, right in pairs) / len(wanted)


def rate(ask: Ask, clock: Callable[[], float]) -> float:
    """Tokens a second."""
    begin = clock()
    answers = ask()
    return sum(map(len, answers)) / (clock() - begin)


# -- one request -----------------------------------------------------------------------------------

FORMS: Mapping[str, Mapping[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
}
"""What weights are stored in, and computed with."""
PROMPT = 8
LLAMA = "llama.cpp"


def alone(words: Sequence[str]) -> None:
    """Print what a token of one request takes."""
    options = {"--rounds": 5, "--model": "tiny", "--tokens": 64}
    run = Run("engine alone", __doc__, ["--device", "cpu", *words], options)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    models = {
        form: load_model(run.asked.model, max_model_len=512, **settings)
        for form, settings in FORMS.items()
    }
    rng, tokens = random.Random(0), run.asked.tokens
    prompt = [rng.randrange(3, models["float32"].vocab_size) for _ in range(PROMPT)]
    load = Load([prompt], [tokens])
    calls: dict[tuple[str, str], Ask] = {}
    with ExitStack() as opened:
        for form, model in models.items():
            calls["reading the weights", form] = partial(read_weights, model, tokens)
            if "quantization" not in FORMS[form]:
                calls["transformers' generate", form] = partial(generated, copied(model), load)
                calls[PEER, form] = opened.enter_context(peer(model, load))
            calls[OURS, form] = asker(model, load, ENGINES[OURS])
        if is_packed(run.asked.model) and find_spec("xllamacpp"):
            calls[LLAMA, "as in the file"] = llama_cpp(gguf_file(run.asked.model), load)
        answers = {case: ask() for case, ask in calls.items()}
        exact = [name for name, form in calls if form == "float32" and answers[name, form]]
        if any(answers[name, "float32"] != answers[OURS, "float32"] for name in exact):
            sys.exit("in float32 the tokens differ")
        timed = {case: partial(cpu_seconds, ask) for case, ask in calls.items()}
        rounds = in_turns(timed, run.asked.rounds)
    best = {case: min(times) / tokens for case, times in rounds.items()}
    base = best["transformers' generate", "float32"]
    for (name, form), seconds in best.items():
        read = best.get(("reading the weights", form))
        line = {"case": f"{name}, {form}", "name": name, "weights": form, TIMED: seconds}
        line |= {"rate": base / seconds, "reads": None if read is None else seconds / read}
        run.lines[line["case"]] = line
    cells: dict[str, Callable[[Line], str]] = {
        "": lambda line: line["name"],
        "weights": lambda line: line["weights"],
        "CPU ms a token": lambda line: f"{line[TIMED] * 1e3:.1f}",
        "times the reading": lambda line: f"{line['reads']:.2f}" if line["reads"] else "",
        "as fast as `generate` in float32": lambda line: f"{line['rate']:.2f}",
    }
    run.close(cells, f"model {run.asked.model}", f"prompt {PROMPT}, tokens {tokens}")


def read_weights(model: LoadedModel, times: int) -> Answers:
    """Read all that a step multiplies by, so many times."""
    module: Any = model.module
    head = module.get_output_embeddings().weight
    table = module.get_input_embeddings().weight
    read = [
        weight.detach().view(torch.uint8).flatten().view(torch.float32)
        for weight in module.parameters()
        if weight.dim() == 2 and (weight is head or weight is not table)
    ]
    for _ in range(times):
        for weight in read:
            weight.sum()
    return []


def generated(module: Any, load: Load) -> Answers:
    """What `generate` answers to the first prompt."""
    [prompt] = load.prompts
    ids = torch.tensor([prompt])
    greedy = GenerationConfig(
        max_new_tokens=load.tokens[0], do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    with torch.inference_mode():
        answer = module.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
    return [answer[0, len(prompt) :].tolist()]


def llama_cpp(file: Path, load: Load) -> Ask:
    """llama.cpp with a GGUF file, on one thread; it returns no token ids."""
    xllamacpp = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.verbosity = 512, 1, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    asked = {
        "prompt": load.prompts[0], "max_tokens": load.tokens[0], "temperature": 0,
        "ignore_eos": True, "cache_prompt": False,
    }  # fmt: skip

    def ask() -> Answers:
        answer = server.handle_completions(asked)
        if answer["usage"]["completion_tokens"] != load.tokens[0]:
            sys.exit(f"{LLAMA}: {answer}")
        return []

    return ask


main = main_of(__name__, engine, alone)

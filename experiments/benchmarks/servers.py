"""Token rate of the engine against serving engines: vLLM and SGLang, where installed.

    python -m pagedsim.experiments.benchmarks.servers --device cuda

The model, prompts and lengths are those of engine.py, greedy and without stop tokens. The weights
are saved once, and each peer loads them in a process of its own, after ours has freed the GPU. All
are warm; a rate is the best of `--rounds` rounds by the wall clock, and counts only if the tokens
agree as in engine.py. No prefix is cached, since rounds repeat the prompts. Peers that are not
installed are listed. Results go to servers.json.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from pagedsim.engine.models import LoadedModel
from pagedsim.experiments.benchmarks.device import Results, parse_device, version_of
from pagedsim.experiments.benchmarks.engine import (
    LOAD,
    OURS,
    TIMES,
    Answers,
    Ask,
    Load,
    agreement,
    asker,
    enough,
    load_of,
    loaded,
    rate,
    rate_rows,
)
from pagedsim.experiments.benchmarks.harness import ROOT, main_of, table
from pagedsim.experiments.benchmarks.timing import TIMED, Line, free_memory

FIRST, AHEAD = "pagedsim", "pagedsim, async_scheduling"
TIMEOUT = 420
"""Seconds for a peer, with its start and its compilations."""
SHARE = 0.85
"""Of the GPU's memory, for its weights and its cache."""


def vllm(folder: Path, dtype: str, load: Load) -> Ask:
    """The load served by vLLM."""
    library: Any = importlib.import_module("vllm")
    llm = library.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=load.longest,
        max_num_seqs=len(load.prompts),
        enable_prefix_caching=False,
        gpu_memory_utilization=SHARE,
    )
    params = library.SamplingParams(
        temperature=0, max_tokens=load.tokens[0], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in load.prompts]

    def ask() -> Answers:
        answers = llm.generate(prompts, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return ask


def sglang(folder: Path, dtype: str, load: Load) -> Ask:
    """The load served by SGLang."""
    library: Any = importlib.import_module("sglang")
    llm = library.Engine(
        model_path=str(folder),
        skip_tokenizer_init=True,
        dtype=dtype,
        context_length=load.longest,
        max_running_requests=len(load.prompts),
        disable_radix_cache=True,
        mem_fraction_static=SHARE,
        log_level="error",
    )
    params = {"temperature": 0, "max_new_tokens": load.tokens[0], "ignore_eos": True}

    def ask() -> Answers:
        answers = llm.generate(input_ids=load.prompts, sampling_params=params)
        return [list(answer["output_ids"]) for answer in answers]

    return ask


SERVERS: Mapping[str, Callable[[Path, str, Load], Ask]] = {"vllm": vllm, "sglang": sglang}


def servers(words: Sequence[str]) -> None:
    """Print all rates and their ratios."""
    asked = parse_device(__doc__, words, {"--device": ("cuda", "cpu"), "--rounds": 2, **LOAD})
    logging.disable(logging.WARNING)
    absent = {name: "not installed" for name in SERVERS if importlib.util.find_spec(name) is None}
    rates: dict[str, float] = {}
    results = Results("servers", "servers", words, asked, absent=absent, rates=rates)
    if there := [name for name in SERVERS if name not in absent]:
        model = loaded(asked.device)
        load = load_of(asked.prompts, asked.tokens, model)
        about = {"model": model.name, "prompts": len(load.prompts), "tokens": load.tokens[0]}
        results.content |= about
        with TemporaryDirectory() as folder:
            save(model, Path(folder))
            answers, found = ours(model, load, asked.rounds)
            rates |= found
            dtype = model.dtype
            del model
            results.sweep(
                {name: name for name in there},
                lambda name: compared(name, Path(folder), load, asked.rounds, answers, dtype),
            )
        rates |= {one["case"]: one["rate"] for one in results.timed()}
    untimed = absent | {one["case"]: one["failed"] for one in results.lines if "failed" in one}
    rows = rate_rows(rates) + [[name, why, ""] for name, why in untimed.items()]
    text = table(["", "tokens per second", TIMES], rows)
    results.close(f"{results.content['device']}, {results.content['date']}\n\n{text}")


def save(model: LoadedModel, folder: Path) -> None:
    """Save weights and configuration in transformers' layout; ours packs some matrices."""
    own: Any = model.module
    state = {name: weight.detach().cpu().clone() for name, weight in own.state_dict().items()}
    own.save_pretrained(folder, state_dict=state)


def ours(model: LoadedModel, load: Load, rounds: int) -> tuple[Answers, dict[str, float]]:
    """The engine's answers and rates."""
    rates: dict[str, float] = {}
    for name in (FIRST, AHEAD):
        ask = asker(model, load, OURS[name])
        answers = ask()
        rates[name] = max(rate(ask, time.perf_counter) for _ in range(rounds))
        del ask
        free_memory()
    return answers, rates


def compared(
    name: str, folder: Path, load: Load, rounds: int, wanted: Answers, dtype: torch.dtype
) -> Line:
    """The rate of a peer, if it gives the same tokens."""
    served = elsewhere(name, folder, str(dtype).removeprefix("torch."), load, rounds)
    alike = agreement(served["answers"], wanted, dtype)
    found: Line = {"alike": alike, "version": served["version"]}
    if alike < enough(dtype):
        return {**found, "failed": f"{alike:.0%} of its answers are ours"}
    return {**found, "rate": served["rate"], TIMED: sum(load.tokens) / served["rate"]}


def elsewhere(name: str, folder: Path, dtype: str, load: Load, rounds: int) -> dict[str, Any]:
    """The result of a peer in a process of its own; RuntimeError with its last line of stderr."""
    result = folder / f"{name}.result.json"
    request = {"prompts": load.prompts, "tokens": load.tokens}
    (folder / f"{name}.load.json").write_text(json.dumps(request))
    call = f"serve({name!r}, {str(folder)!r}, {dtype!r}, {rounds})"
    code = f"from pagedsim.experiments.benchmarks.servers import serve; {call}"
    command = [sys.executable, "-c", code]  # engines import a main module again
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer within {TIMEOUT} s") from None
    if ended.returncode or not result.exists():
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(last[:200])
    return json.loads(result.read_text())


def serve(name: str, place: str, dtype: str, rounds: int) -> None:
    """Run in that process: serve the load, and write answers and rate."""
    folder = Path(place)
    load = Load(**json.loads((folder / f"{name}.load.json").read_text()))
    ask = SERVERS[name](folder, dtype, load)
    answers = ask()
    best = max(rate(ask, time.perf_counter) for _ in range(rounds))
    result = {"answers": answers, "rate": best, "version": version_of(name)}
    (folder / f"{name}.result.json").write_text(json.dumps(result))


main = main_of(__name__, servers)

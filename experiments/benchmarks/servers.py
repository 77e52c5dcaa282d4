"""Tokens a second of the engine against engines that serve: vLLM and SGLang, where installed.

    python -m experiments.benchmarks.servers --device cuda

The model, prompts and lengths are those of engine.py, greedy and without ends. Its weights are
saved once, and each of the others loads them in a process of its own, when ours has given the GPU
back. All are warm; a rate is the best of `--repeats` rounds by the wall clock, and counts only if
the tokens are as much ours as engine.py asks of its peer. No prefix is cached: rounds repeat the
same prompts. Who is not installed is named. Results go to servers.json.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from experiments.benchmarks.code import ROOT
from experiments.benchmarks.device import Plain, facts, require_gpu, table
from experiments.benchmarks.engine import (
    ALIKE,
    OURS,
    Answers,
    Load,
    agreement,
    asker,
    load_of,
    loaded,
    rate,
)
from experiments.benchmarks.results import folder_of, keep
from experiments.benchmarks.words import Parser, at_least_one
from pagedsim.engine.models import LoadedModel
from pagedsim.run.serving import give_back

FIRST, AHEAD = "pagedsim", "pagedsim, async_scheduling"
PATIENCE = 420
"""Seconds that another may take, its start and its compilations included."""
SHARE = 0.85
"""Of the GPU's memory, for its weights and its cache."""


def vllm(folder: Path, dtype: str, load: Load) -> Callable[[], Answers]:
    """What serves the load with vLLM."""
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
        temperature=0, max_tokens=load.tokens, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in load.prompts]

    def ask() -> Answers:
        answers = llm.generate(prompts, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return ask


def sglang(folder: Path, dtype: str, load: Load) -> Callable[[], Answers]:
    """What serves the load with SGLang."""
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
    params = {"temperature": 0, "max_new_tokens": load.tokens, "ignore_eos": True}

    def ask() -> Answers:
        answers = llm.generate(input_ids=load.prompts, sampling_params=params)
        return [list(answer["output_ids"]) for answer in answers]

    return ask


SERVERS: Mapping[str, Callable[[Path, str, Load], Callable[[], Answers]]] = {
    "vllm": vllm,
    "sglang": sglang,
}


def main(words: Sequence[str] | None = None) -> None:
    """Print all rates and their ratios."""
    words = sys.argv[1:] if words is None else words
    parser = Parser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--prompts", type=at_least_one, help="64; 256 on a GPU")
    parser.add_argument(
        "--tokens", type=at_least_one, help="generated for each prompt: 64; 128 on a GPU"
    )
    parser.add_argument("--repeats", type=at_least_one, default=2)
    parser.add_argument("--out", type=Path, help="a folder for servers.json")
    asked = parser.parse_args(words)
    if cuda := asked.device == "cuda":
        require_gpu()
    device = torch.device(asked.device)
    logging.disable(logging.WARNING)
    place = asked.out or (folder_of(device) if cuda else None)
    absent = {name: "not installed" for name in SERVERS if importlib.util.find_spec(name) is None}
    result: dict[str, Any] = {
        **facts(device, "experiments.benchmarks.servers", words),
        "absent": absent,
    }
    if there := [name for name in SERVERS if name not in absent]:
        model = loaded(device)
        lengths, vocab = (range(64, 321), model.vocab_size) if cuda else (range(8, 65), 250)
        load = load_of(asked.prompts or (256 if cuda else 64), lengths,
                       asked.tokens or (128 if cuda else 64), vocab)  # fmt: skip
        result |= {"model": model.name, "prompts": len(load.prompts), "tokens": load.tokens}
        with TemporaryDirectory() as folder:
            save(model, Path(folder))
            answers, rates = ours(model, load, asked.repeats)
            dtype = model.dtype
            del model
            give_back()
            result |= compared(there, Path(folder), load, asked.repeats, answers, dtype)
        result["rates"] = {**rates, **result["rates"]}
    keep(place, "servers", result)
    print(written(result))
    if result.get("failed"):
        sys.exit(f"not timed: {', '.join(result['failed'])}")


def save(model: LoadedModel, folder: Path) -> None:
    """Its weights and configuration, as transformers has them; ours lie packed in one another."""
    own: Any = model.module
    state = {name: weight.detach().cpu().clone() for name, weight in own.state_dict().items()}
    own.save_pretrained(folder, state_dict=state)


def ours(model: LoadedModel, load: Load, repeats: int) -> tuple[Answers, dict[str, float]]:
    """Tokens, and tokens a second."""
    rates: dict[str, float] = {}
    for name in (FIRST, AHEAD):
        ask = asker(model, load, OURS[name])
        answers = ask()
        rates[name] = max(rate(ask, time.perf_counter) for _ in range(repeats))
        del ask
        give_back()
    return answers, rates


def compared(
    names: Sequence[str],
    folder: Path,
    load: Load,
    repeats: int,
    wanted: Answers,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The rates of others that give the same tokens, and why there is none of some."""
    found: dict[str, dict[str, Any]] = {"rates": {}, "alike": {}, "versions": {}, "failed": {}}
    kind = str(dtype).removeprefix("torch.")
    for name in names:
        try:
            served = elsewhere(name, folder, kind, load, repeats)
        except RuntimeError as problem:
            found["failed"][name] = str(problem)
            continue
        alike = agreement(served["answers"], wanted, dtype)
        found["alike"][name], found["versions"][name] = alike, served["version"]
        if alike >= (1.0 if dtype == torch.float32 else ALIKE):
            found["rates"][name] = served["rate"]
        else:
            found["failed"][name] = f"{alike:.0%} of its answers are ours"
    return found


def elsewhere(name: str, folder: Path, dtype: str, load: Load, repeats: int) -> dict[str, Any]:
    """What another says in a process of its own; RuntimeError with its last words."""
    asked = folder / f"{name}.asked.json"
    said = folder / f"{name}.said.json"
    asked.write_text(json.dumps({"prompts": load.prompts, "tokens": load.tokens}))
    words = ["experiments.benchmarks.servers_child", name, str(folder), dtype, str(repeats)]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer within {PATIENCE} s") from None
    if ended.returncode or not said.exists():
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(last[:200])
    answer: dict[str, Any] = json.loads(said.read_text())
    return answer


def serve(name: str, folder: Path, dtype: str, repeats: int) -> None:
    """In that process: be asked, and leave tokens and rate."""
    asked = json.loads((folder / f"{name}.asked.json").read_text())
    ask = SERVERS[name](folder, dtype, Load(asked["prompts"], asked["tokens"]))
    answers = ask()
    best = max(rate(ask, time.perf_counter) for _ in range(repeats))
    try:
        own: str | None = version(name)
    except PackageNotFoundError:
        own = None
    said = {"answers": answers, "rate": best, "version": own}
    (folder / f"{name}.said.json").write_text(json.dumps(said))


def written(result: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    reasons = {**result["absent"], **result.get("failed", {})}
    rates = result.get("rates", {})
    rows = [[name, f"{own:,.0f}", f"{rates[FIRST] / own:.2f}"] for name, own in rates.items()]
    rows += [[name, reason, ""] for name, reason in reasons.items()]
    head = ["", "tokens per second", "pagedsim is so many times as fast"]
    return f"{result['device']}, {result['date']}\n\n{table(head, rows)}"


if __name__ == "__main__":
    main()

"""What HTTP costs: tokens a second that a server streams.

    python -m experiments.benchmarks.serving

`engine`: 64 requests at once, 32 tokens of prompt and 128 of answer, of a model on one thread of a
CPU: over HTTP, token by token, against `LLM.generate` of the same in a process of its own. They
take turns; the ratio is of the medians, by the wall clock. With the tiny model a token costs so
little that this is mostly a measure of Python; smollm2 is a real one.

`sim`: `backend=sim` with a model that is quicker than any server could be (`speed=` is high), so
that it streams as fast as it can, to 64 and to 1,000 at once, bound to one core; the client is on
another. What counts is the wall clock, beside it the processor's time a token, of all that the
server does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from experiments.benchmarks.code import ROOT
from experiments.benchmarks.device import Plain, table
from experiments.benchmarks.results import keep
from experiments.benchmarks.streams import Streamed, streamed
from experiments.benchmarks.words import Parser, at_least_one
from experiments.child import bind, listening

PROMPTS = [[(7 * i + j) % 250 + 3 for j in range(32)] for i in range(64)]
FAST = ("model=llama-3.1-8b", "hardware=h100", "speed=1000", "server.max_seqs=1024")


def main(words: Sequence[str] | None = None) -> None:
    """Print all rates and the ratio."""
    parser = Parser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--repeats", type=at_least_one, default=5)
    parser.add_argument("--model", default="tiny", help="of the engine: tiny, or smollm2")
    parser.add_argument("--tokens", type=at_least_one, default=128, help="of an answer")
    parser.add_argument("--only", choices=("engine", "sim"))
    parser.add_argument(
        "--streams", type=at_least_one, nargs="+", default=[64, 1000], help="of sim, at once"
    )
    parser.add_argument("--out", type=Path, help="a folder for serving.json")
    asked = parser.parse_args(words)
    result: dict[str, Any] = {"cores": os.cpu_count(), "repeats": asked.repeats}
    if asked.only != "sim":
        result["engine"] = against_generate(asked.model, asked.tokens, asked.repeats)
    if asked.only != "engine":
        result["sim"] = [of_sim(count, asked.tokens, asked.repeats) for count in asked.streams]
    keep(asked.out, "serving", result)
    print(written(result))


def against_generate(model: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Tokens a second of both, in turns."""
    batch = (f"model={model}", "batching=unified", f"server.max_seqs={len(PROMPTS)}")
    rounds: dict[str, list[Spent]] = {"generate": [], "http": []}
    with (
        listening("backend=engine", *batch) as child,
        generator(model, tokens) as (ask, generating),
    ):
        for _ in range(repeats + 1):
            rounds["http"].append(
                spent(child.process.pid, tokens, lambda: streamed(child.url, PROMPTS, tokens).rate)
            )
            rounds["generate"].append(spent(generating.pid, tokens, ask))
    found: dict[str, Any] = {
        name: {
            "rate": median(one.rate for one in some[1:]),  # the first is to get warm
            "microseconds": median(one.microseconds for one in some[1:]),
        }
        for name, some in rounds.items()
    }
    return {"model": model, **found, "ratio": found["http"]["rate"] / found["generate"]["rate"]}


class Spent(NamedTuple):
    """Of one round."""

    rate: float
    """Tokens a second."""
    microseconds: float
    """Of the processor, a token."""


def spent(process: int, tokens: int, serve: Callable[[], float]) -> Spent:
    """The rate that `serve` finds, and what it costs that process."""
    before = processor(process)
    rate = serve()
    return Spent(rate, 1e6 * (processor(process) - before) / (len(PROMPTS) * tokens))


def of_sim(count: int, tokens: int, repeats: int) -> dict[str, Any]:
    """How fast the simulator's tokens come to so many clients, from one core."""
    others = set(range(1, os.cpu_count() or 1)) or {0}
    rounds: list[tuple[Streamed, float]] = []
    with listening(*FAST, core=0) as child, on_cores(others):
        for _ in range(repeats + 1):
            before = processor(child.process.pid)
            found = streamed(child.url, [PROMPTS[i % 64] for i in range(count)], tokens)
            rounds.append((found, processor(child.process.pid) - before))
    return {
        "streams": count,
        "rate": median(found.rate for found, _ in rounds[1:]),
        "microseconds": median(1e6 * spent / found.tokens for found, spent in rounds[1:]),
        "events": rounds[-1][0].events / rounds[-1][0].tokens,
    }


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """The same for a while."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    bind(cores)
    try:
        yield
    finally:
        bind(before)


@contextmanager
def generator(
    model: str, tokens: int
) -> Iterator[tuple[Callable[[], float], subprocess.Popen[str]]]:
    """Tokens a second of `LLM.generate`, each time it is called, in a process of its own."""
    command = [sys.executable, "-m", "experiments.benchmarks.serving_child", model, str(tokens)]
    pipes: Mapping[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        tell, told = process.stdin, process.stdout

        def ask() -> float:
            tell.write("again\n")
            tell.flush()
            return float(told.readline())

        yield ask, process
        tell.close()


def generate(model: str, tokens: int) -> Callable[[], float]:
    """What the child asks of `LLM.generate`, and how fast it was."""
    import torch

    from pagedsim.core import SamplingParams
    from pagedsim.engine.llm import LLM

    torch.set_num_threads(1)
    llm = LLM(model, device="cpu", batching="unified", max_num_seqs=len(PROMPTS))
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def again() -> float:
        begun = time.perf_counter()
        answers = llm.generate(PROMPTS, params, use_tqdm=False)
        said = sum(len(answer.outputs[0].token_ids) for answer in answers)
        return said / (time.perf_counter() - begun)

    return again


def processor(process: int) -> float:
    """Seconds that a process and its threads have computed."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def written(result: Mapping[str, Any]) -> str:
    """Both as tables."""
    lines = []
    if found := result.get("engine"):
        names = {"generate": "LLM.generate", "http": "over HTTP"}
        ratios = {"generate": "", "http": f"{found['ratio']:.3f}"}
        rows = [
            [said, f"{found[n]['rate']:,.0f}", ratios[n], f"{found[n]['microseconds']:.1f}"]
            for n, said in names.items()
        ]
        head = [f"64 requests of {found['model']}", "tokens/s", "ratio", "µs of cores a token"]
        lines.append(table(head, rows))
    if sims := result.get("sim"):
        rows = [
            [f"{one['streams']:,}", f"{one['rate']:,.0f}", f"{one['microseconds']:.1f}"]
            for one in sims
        ]
        lines.append(table(["streams of backend=sim", "tokens/s", "µs of a core a token"], rows))
    return "\n\n".join(lines)


if __name__ == "__main__":
    main()

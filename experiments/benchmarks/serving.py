"""Token rate, memory and isolation of the HTTP server.

    python -m experiments.benchmarks.serving
    python -m experiments.benchmarks.serving soak --backend engine --minutes 30 [model=smollm2]
    python -m experiments.benchmarks.serving greedy --requests 40 --tokens 131000 --stops 64

The first measures the token rate of a server that streams. `engine`: 64 requests at once, of 32
prompt tokens, to a model on one thread of a CPU, over HTTP and in turns with `LLM.generate` in a
process of its own; rates are by the wall clock, and the ratio is of medians. With the tiny model
this mostly measures Python; smollm2 is a real model. `sim`: `backend=sim` with a model faster than
any server (a high `speed=`), bound to one core, with the client on another.

`soak` loads a server for minutes. Clients arrive at random and stream answers of random lengths;
one in four disconnects early. It prints resident memory for each minute (the median of its seconds)
and the ratio of the last minute to the third. At the end no request may be left and every block
must be free.

`greedy` streams to other clients while one client sends many requests at once, each with as many
tokens as the model takes and stop strings that never occur; it prints the longest gap between two
events of the other streams before and while that happens. Both pass other words to `serve`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from experiments.benchmarks.harness import (
    ROOT,
    Parser,
    keep,
    positive_float,
    positive_int,
    run_command,
    table,
)
from experiments.child import bind, listening

# -- a client --------------------------------------------------------------------------------------

EVENT = b'data: {"id"'
"""The beginning of each event with a token or the usage."""
USAGE = b'"usage":{'


@dataclass(frozen=True)
class Streamed:
    """All answers together."""

    tokens: int
    seconds: float
    events: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


async def streamed(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> Streamed:
    """Stream all requests at once, greedily and without stop tokens, and count the answers.

    It does as little work a token as it can. Raises RuntimeError for an incomplete answer.
    """
    begun = time.perf_counter()
    answers = await asyncio.gather(*(_answer(url, list(prompt), tokens) for prompt in prompts))
    seconds = time.perf_counter() - begun
    for answer in answers:
        usage = answer[answer.rindex(USAGE) :]
        count = int(usage.split(b'"completion_tokens":')[1].split(b",")[0].strip(b" }"))
        if count != tokens or b"data: [DONE]" not in usage:
            raise RuntimeError(f"an answer of {tokens} tokens ends with {answer[-300:]!r}")
    return Streamed(tokens * len(answers), seconds, sum(answer.count(EVENT) for answer in answers))


async def _answer(url: str, prompt: list[int], tokens: int) -> bytes:
    reader, writer = await stream(url, prompt, tokens)
    answer = await reader.read(-1)
    writer.close()
    return answer


async def stream(
    url: str, prompt: list[int], tokens: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a streaming request."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return await post(url, {**body, "stream": True, "stream_options": {"include_usage": True}})


async def post(
    url: str, body: Mapping[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request for a completion, on a connection of its own."""
    where, text = urlsplit(url), json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=2**20)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    writer.write(head.encode() + text)
    return reader, writer


# -- token rates -----------------------------------------------------------------------------------

PROMPTS = [[(7 * i + j) % 250 + 3 for j in range(32)] for i in range(64)]
FAST = ("model=llama-3.1-8b", "hardware=h100", "speed=1000", "server.max_seqs=1024")


class Spent(NamedTuple):
    """One round."""

    rate: float
    """Tokens a second."""
    microseconds: float
    """Processor time of the process, a token."""


def rates(words: Sequence[str]) -> None:
    """Print all token rates and the ratio."""
    parser = Parser(__doc__)
    parser.add_argument("--repeats", type=positive_int, default=5)
    parser.add_argument("--model", default="tiny", help="of the engine: tiny, or smollm2")
    parser.add_argument("--tokens", type=positive_int, default=128, help="of an answer")
    parser.add_argument("--only", choices=("engine", "sim"))
    parser.add_argument(
        "--streams", type=positive_int, nargs="+", default=[64, 1000], help="of sim, at once"
    )
    parser.add_argument("--out", type=Path, help="a folder for serving.json")
    asked = parser.parse_args(words)
    result: dict[str, Any] = {"cores": os.cpu_count(), "repeats": asked.repeats}
    if asked.only != "sim":
        result["engine"] = engine_rates(asked.model, asked.tokens, asked.repeats)
    if asked.only != "engine":
        result["sim"] = [sim_rate(count, asked.tokens, asked.repeats) for count in asked.streams]
    keep(asked.out, "serving", result)
    print(written(result))


def engine_rates(model: str, tokens: int, repeats: int) -> dict[str, Any]:
    """The engine over HTTP and by `LLM.generate`, in turns."""
    batch = (f"model={model}", "batching=unified", f"server.max_seqs={len(PROMPTS)}")
    rounds: dict[str, list[Spent]] = {"generate": [], "http": []}
    with listening("backend=engine", *batch) as child, generator(model, tokens) as (ask, process):

        def over_http() -> float:
            return asyncio.run(streamed(child.url, PROMPTS, tokens)).rate

        for _ in range(repeats + 1):
            rounds["http"].append(spent(child.process.pid, tokens, over_http))
            rounds["generate"].append(spent(process.pid, tokens, ask))
    found: dict[str, Any] = {
        name: {
            "rate": median(one.rate for one in some[1:]),  # the first round warms up
            "microseconds": median(one.microseconds for one in some[1:]),
        }
        for name, some in rounds.items()
    }
    return {"model": model, **found, "ratio": found["http"]["rate"] / found["generate"]["rate"]}


def spent(process: int, tokens: int, serve: Callable[[], float]) -> Spent:
    """The rate that `serve` returns, and what it costs the process."""
    before = processor_seconds(process)
    rate = serve()
    return Spent(rate, 1e6 * (processor_seconds(process) - before) / (len(PROMPTS) * tokens))


@contextmanager
def generator(
    model: str, tokens: int
) -> Iterator[tuple[Callable[[], float], subprocess.Popen[str]]]:
    """A process that measures the rate of `LLM.generate` at each call."""
    command = [sys.executable, "-m", "experiments.benchmarks.children", "generate"]
    pipes: Mapping[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, model, str(tokens)], cwd=ROOT, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        to, of = process.stdin, process.stdout

        def ask() -> float:
            to.write("again\n")
            to.flush()
            return float(of.readline())

        yield ask, process
        to.close()


def generate_rate(model: str, tokens: int) -> Callable[[], float]:
    """The measurement in that process."""
    import torch

    from pagedsim.core import SamplingParams
    from pagedsim.engine.llm import LLM

    torch.set_num_threads(1)
    llm = LLM(model, device="cpu", batching="unified", max_num_seqs=len(PROMPTS))
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def again() -> float:
        begun = time.perf_counter()
        answers = llm.generate(PROMPTS, params, use_tqdm=False)
        count = sum(len(answer.outputs[0].token_ids) for answer in answers)
        return count / (time.perf_counter() - begun)

    return again


def sim_rate(count: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Tokens a second of the simulator to so many clients, from one core."""
    others = set(range(1, os.cpu_count() or 1)) or {0}
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    rounds: list[tuple[Streamed, float]] = []
    with listening(*FAST, core=0) as child, on_cores(others):
        for _ in range(repeats + 1):
            before = processor_seconds(child.process.pid)
            found = asyncio.run(streamed(child.url, prompts, tokens))
            rounds.append((found, processor_seconds(child.process.pid) - before))
    return {
        "streams": count,
        "rate": median(found.rate for found, _ in rounds[1:]),
        "microseconds": median(1e6 * spent / found.tokens for found, spent in rounds[1:]),
        "events": rounds[-1][0].events / rounds[-1][0].tokens,
    }


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Bind this process to these cores for a while."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    bind(cores)
    try:
        yield
    finally:
        bind(before)


def processor_seconds(process: int) -> float:
    """Processor time of a process and its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def written(result: Mapping[str, Any]) -> str:
    """Both tables."""
    tables = []
    if found := result.get("engine"):
        names = {"generate": "LLM.generate", "http": "over HTTP"}
        ratios = {"generate": "", "http": f"{found['ratio']:.3f}"}
        rows = [
            [name, f"{found[n]['rate']:,.0f}", ratios[n], f"{found[n]['microseconds']:.1f}"]
            for n, name in names.items()
        ]
        head = [f"64 requests of {found['model']}", "tokens/s", "ratio", "µs of cores a token"]
        tables.append(table(head, rows))
    if sims := result.get("sim"):
        rows = [
            [f"{one['streams']:,}", f"{one['rate']:,.0f}", f"{one['microseconds']:.1f}"]
            for one in sims
        ]
        tables.append(table(["streams of backend=sim", "tokens/s", "µs of a core a token"], rows))
    return "\n\n".join(tables)


# -- memory under load -----------------------------------------------------------------------------

CLIENTS = 48
"""At once."""
WARM_MINUTE = 3
"""The minute that the last one is compared with."""
SOAKED = {
    # A small memory, so that requests are preempted.
    "sim": ("model=llama-3.1-8b", "memory=prefix", "memory.blocks=600", "preemption=swap",
            "speed=10"),
    # All blocks are soon in use: pages of memory that were never written are not resident.
    "engine": ("batching=unified", "memory=prefix", "memory.blocks=600",
               "memory.swap_space_gib=0.1"),
}  # fmt: skip
"""Words of the server."""


def soak(words: Sequence[str]) -> None:
    """Print resident memory minute by minute, and the number of requests."""
    parser = Parser(__doc__)
    parser.add_argument("--backend", choices=tuple(SOAKED), default="sim")
    parser.add_argument("--minutes", type=positive_float, default=10)
    asked, others = parser.parse_known_args(words)
    with listening(f"backend={asked.backend}", *SOAKED[asked.backend], *others) as child:
        resident, served = asyncio.run(load(child.url, child.process.pid, 60 * asked.minutes))
        left = left_behind(child.url)
    minutes = by_minute(resident)
    warm = min(WARM_MINUTE, len(minutes))
    print(f"{served.total():,} requests in {asked.minutes:g} minutes: {dict(served)}")
    print(f"minute {len(minutes)} to minute {warm}: {minutes[-1] / minutes[warm - 1]:.4f}")
    print(f"left behind: {left or 'nothing'}")
    if left or served["broken"]:
        sys.exit("the server kept what it should not, or broke an answer")


def by_minute(resident: Sequence[float]) -> list[float]:
    """The median of each minute that has begun, of values one a second."""
    return [median(resident[at : at + 60]) for at in range(0, len(resident), 60)]


async def load(url: str, process: int, seconds: float) -> tuple[list[int], Counter[str]]:
    """Resident bytes second by second, and the requests by how they ended."""
    until, served = time.monotonic() + seconds, Counter[str]()
    clients = [asyncio.create_task(client(url, i, until, served)) for i in range(CLIENTS)]
    resident: list[int] = []
    begun = time.monotonic()
    while time.monotonic() < until:
        with open(f"/proc/{process}/statm") as file:
            resident.append(int(file.read().split()[1]) * 4096)
        if len(resident) % 60 == 0:
            *_, last = by_minute(resident)
            print(f"minute {len(resident) // 60:3}: {last / 2**20:8.1f} MiB", flush=True)
        await asyncio.sleep(max(begun + len(resident) - time.monotonic(), 0))
    await asyncio.gather(*clients)
    return resident, served


async def client(url: str, number: int, until: float, served: Counter[str]) -> None:
    """Send requests, and disconnect early from some of them."""
    rng = random.Random(number)
    while time.monotonic() < until:
        await asyncio.sleep(rng.expovariate(4))
        prompt = [rng.randrange(3, 200)] * rng.randint(1, 300)
        reader, writer = await stream(url, prompt, rng.randint(1, 120))
        try:
            async with asyncio.timeout(rng.random() if rng.random() < 0.25 else 60):
                answer = await reader.read(-1)
            served["whole" if b"data: [DONE]" in answer else "broken"] += 1
        except TimeoutError:
            served["left"] += 1
        finally:
            writer.transport.abort()


def left_behind(url: str) -> dict[str, float]:
    """Requests and cache use that remain ten seconds after the load."""
    until = time.monotonic() + 10
    while (left := gauges(url)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def gauges(url: str) -> dict[str, float]:
    """The gauges of requests and cache use that are not 0."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    wanted = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    values = {name.partition("{")[0]: float(value) for name, _, value in samples}
    return {name: values[f"vllm:{name}"] for name in wanted if values[f"vllm:{name}"]}


# -- streams beside a client of large requests -----------------------------------------------------

OTHERS = 4
"""Streams that are watched."""
SIM = ("model=llama-3.1-8b", "server.max_model_len=131072", "speed=2")


def greedy(words: Sequence[str]) -> None:
    """Print the longest gap of the other streams, before and after the large requests arrive."""
    parser = Parser(__doc__)
    parser.add_argument("--requests", type=positive_int, default=40)
    parser.add_argument("--tokens", type=positive_int, default=131_000)
    parser.add_argument("--stops", type=positive_int, default=64)
    parser.add_argument("--seconds", type=positive_float, default=5, help="before, and after")
    asked, others = parser.parse_known_args(words)
    stops = [f"no{place}" for place in range(asked.stops)]
    body = {"prompt": [7], "max_tokens": asked.tokens, "stop": stops}
    with listening(*SIM, *others) as child:
        before, after = asyncio.run(gaps(child.url, body, asked.requests, asked.seconds))
    print(f"longest gap of {OTHERS} other streams: {1000 * before:.0f} ms before")
    print(f"{1000 * after:.0f} ms with {asked.requests} requests of {asked.tokens:,} tokens")


async def gaps(
    url: str, body: Mapping[str, Any], requests: int, seconds: float
) -> tuple[float, float]:
    """The longest gap before the requests are sent, and from then on."""
    times: list[list[float]] = [[] for _ in range(OTHERS)]
    readers = [asyncio.create_task(_watch(url, one)) for one in times]
    await asyncio.sleep(seconds)
    sent = time.perf_counter()
    connections = [await post(url, body) for _ in range(requests)]
    await asyncio.sleep(seconds)
    end = time.perf_counter()
    for task in readers:
        task.cancel()
    for _, writer in connections:
        writer.transport.abort()
    return _longest(times, 0.0, sent), _longest(times, sent, end)


async def _watch(url: str, times: list[float]) -> None:
    reader, _ = await stream(url, [5] * 10, 100_000)
    while await reader.readline():
        times.append(time.perf_counter())


def _longest(times: list[list[float]], begin: float, end: float) -> float:
    """The longest time without an event, of those that end between `begin` and `end`."""
    found = []
    for one in times:
        inside = [at for at in one if at < end]
        found += [b - a for a, b in zip(inside, [*inside[1:], end], strict=True) if b > begin]
    return max(found)


COMMANDS = {"rates": rates, "soak": soak, "greedy": greedy}


def main(words: Sequence[str] | None = None) -> None:
    """Run one of the commands."""
    run_command(COMMANDS, words)


if __name__ == "__main__":
    main()

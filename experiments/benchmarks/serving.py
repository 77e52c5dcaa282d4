"""Token rate and memory of the HTTP server.

    python -m pagedsim.experiments.benchmarks.serving [--model smollm2 --tokens 16]
    python -m pagedsim.experiments.benchmarks.serving soak --backend engine --minutes 30
    python -m pagedsim.experiments.benchmarks.serving neighbours --seconds 5

The first streams to clients. `engine`: 64 requests at once, of 32 prompt tokens, to a model on one
thread, over HTTP and in turns with `LLM.generate` in a process of its own, by the wall clock. With
the tiny model this mostly measures Python; smollm2 is a real model. `sim`: `backend=sim` with a
model faster than any server, bound to one core, the client on another, for each number of
`--streams` at once.

`soak` loads a server for minutes. Clients arrive at random and stream answers of random lengths;
one in four disconnects early. It prints resident memory for each minute (the median of its seconds)
and the ratio of the last minute to the third. At the end no request may be left, and every block
must be free.

`neighbours` sends the costliest bodies that are allowed again and again, on two connections, while
another client waits for small answers. It prints the longest of its waits, by body: in the median
of the seconds, and of all, which is that of a shared machine where others take its cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pagedsim.experiments.benchmarks.harness import main_of, parse, table
from pagedsim.experiments.child import bind, listening

if TYPE_CHECKING:
    from pagedsim.engine.llm import LLM

# -- a client --------------------------------------------------------------------------------------

USAGE = b'"usage":{'


async def streamed(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Stream all requests at once, greedily and without stop tokens; the tokens a second.

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
    return tokens * len(answers) / seconds


async def _answer(url: str, prompt: list[int], tokens: int) -> bytes:
    reader, writer = await stream(url, prompt, tokens)
    answer = await reader.read(-1)
    writer.close()
    return answer


async def stream(
    url: str, prompt: list[int], tokens: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a streaming request for a completion, on a connection of its own."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
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


def rates(words: Sequence[str]) -> None:
    """Print all token rates and the ratio."""
    only = {"choices": ("engine", "sim")}
    options = {"--rounds": 5, "--model": "tiny", "--tokens": 128, "--streams": [64, 1000]}
    asked = parse(__doc__, words, {**options, "--only": only})
    if asked.only != "sim":
        found = engine_rates(asked.model, asked.tokens, asked.rounds)
        ratio = found["over HTTP"][0] / found["LLM.generate"][0]
        rows = [
            [name, f"{rate:,.0f}", f"{ratio:.3f}" * (name == "over HTTP"), f"{micros:.1f}"]
            for name, (rate, micros) in found.items()
        ]
        head = [f"64 requests of {asked.model}", "tokens/s", "ratio", "µs of cores a token"]
        print(f"{table(head, rows)}\n")
    if asked.only != "engine":
        rows = []
        for count in asked.streams:
            rate, micros = sim_rate(count, asked.tokens, asked.rounds)
            rows.append([f"{count:,}", f"{rate:,.0f}", f"{micros:.1f}"])
        print(table(["streams of backend=sim", "tokens/s", "µs of a core a token"], rows))


Rate = tuple[float, float]
"""Tokens a second, and processor microseconds of the process a token."""


def engine_rates(model: str, tokens: int, rounds: int) -> dict[str, Rate]:
    """The engine over HTTP and by `LLM.generate`, in turns."""
    batch = (f"model={model}", "batching=unified", f"server.max_seqs={len(PROMPTS)}")
    found: dict[str, list[Rate]] = {"LLM.generate": [], "over HTTP": []}
    with (
        listening("backend=engine", *batch) as child,
        ProcessPoolExecutor(1, get_context("spawn")) as own,
    ):
        pid = own.submit(os.getpid).result()

        def over_http() -> float:
            return asyncio.run(streamed(child.url, PROMPTS, tokens))

        def by_generate() -> float:
            rate: float = own.submit(generate_rate, model, tokens).result()
            return rate

        count = tokens * len(PROMPTS)
        for _ in range(rounds + 1):
            found["over HTTP"].append(spent(child.process.pid, count, over_http))
            found["LLM.generate"].append(spent(pid, count, by_generate))
    return {name: medians(own) for name, own in found.items()}


def spent(process: int, tokens: int, serve: Callable[[], float]) -> Rate:
    """The rate that `serve` returns, and what it costs the process."""
    before = processor_seconds(process)
    rate = serve()
    return rate, 1e6 * (processor_seconds(process) - before) / tokens


def medians(rounds: Sequence[Rate]) -> Rate:
    """Without the first round, which warms up."""
    rate, micros = (median(of) for of in zip(*rounds[1:], strict=True))
    return rate, micros


@cache
def loaded(model: str) -> LLM:
    """The engine with a model on one thread, in a process of its own."""
    import torch

    from pagedsim.engine.llm import LLM

    torch.set_num_threads(1)
    return LLM(model, device="cpu", batching="unified", max_num_seqs=len(PROMPTS))


def generate_rate(model: str, tokens: int) -> float:
    """The rate of `LLM.generate`."""
    from pagedsim.core import SamplingParams

    llm = loaded(model)
    begun = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    answers = llm.generate(PROMPTS, params, use_tqdm=False)
    count = sum(len(answer.outputs[0].token_ids) for answer in answers)
    return count / (time.perf_counter() - begun)


def sim_rate(count: int, tokens: int, rounds: int) -> Rate:
    """The simulator's rate to so many clients, from one core."""
    others = set(range(1, os.cpu_count() or 1)) or {0}
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    with listening(*FAST, core=0) as child, on_cores(others):

        def over_http() -> float:
            return asyncio.run(streamed(child.url, prompts, tokens))

        pid = child.process.pid
        return medians([spent(pid, count * tokens, over_http) for _ in range(rounds + 1)])


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
    asked = parse(__doc__, words, {"--backend": tuple(SOAKED), "--minutes": 10.0})
    with listening(f"backend={asked.backend}", *SOAKED[asked.backend]) as child:
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


# -- a large body and others' latency ------------------------------------------------------------

ATTACKERS = 2
QUICK = json.dumps({"prompt": "a", "max_tokens": 1}).encode()


def neighbours(words: Sequence[str]) -> None:
    """Print how long others wait beside each of the costliest bodies."""
    bodies = costly_bodies()
    only = {"nargs": "+", "choices": bodies, "default": list(bodies)}
    asked = parse(__doc__, words, {"--seconds": 5, "--only": only})
    others, rows = set(range(1, os.cpu_count() or 1)) or {0}, []
    with listening(*FAST, core=0) as child, on_cores(others):
        for name in asked.only:
            with repeating(child.url, body := bodies[name]) as count:
                rounds = [asyncio.run(waits_of(child.url, 1.0)) for _ in range(asked.seconds)]
            longest = [max(waits) for waits in rounds]
            numbers = median(longest), max(longest), median(chain.from_iterable(rounds))
            size = f"{len(body) / 2**20:.2f}" if body else ""
            rate = f"{count.value / asked.seconds:.1f}"
            rows.append([name, size, rate, *(f"{1000 * value:.1f}" for value in numbers)])
    head = ["body", "MiB", "bodies/s", "longest wait of a second (ms)", "of all", "median wait"]
    print(table(head, rows))


def costly_bodies() -> dict[str, bytes]:
    """Bodies of completions and chats, each with as much of something as is allowed."""
    from pagedsim.serve.api import parsing
    from pagedsim.serve.api.app import MAX_BODY

    def padded(before: bytes, piece: bytes, most: int, behind: bytes) -> bytes:
        count = min(most, (MAX_BODY - len(before) - len(behind)) // len(piece))
        return before + piece * count + behind

    ids, fields = parsing.MOST_VALUES - 1, (parsing.MOST_CONTAINERS - 10) // 3
    text = b'{"role":"user","content":"%b"},' % (b"a" * (MAX_BODY // parsing.MOST_MESSAGES - 40))
    return {
        "none": b"",
        "one prompt of ids": padded(b'{"prompt":[', b"1234567,", ids, b"7]}"),
        "256 prompts of ids": b'{"max_tokens":1,"prompt":[%b]}'
        % b",".join([b"[%b7]" % (b"7," * (ids // 256 - 2))] * 256),
        "floats": padded(b'{"prompt":[', b"0.12345,", ids, b"7]}"),
        "long numbers": padded(b'{"prompt":[', b"9" * 4000 + b",", ids, b"7]}"),
        "fields": padded(
            b'{"max_tokens":1,"prompt":"a","metadata":{"a":1',
            b',"%b":[{}]' % (b"a" * 40),
            fields,
            b"}}",
        ),
        "texts": padded(
            b'{"max_tokens":1,"prompt":"a","metadata":[',
            b'"abc",',
            parsing.MOST_TEXTS - 9,
            b"1]}",
        ),
        "one text": padded(b'{"max_tokens":1,"prompt":"', b"\\n", MAX_BODY, b'"}'),
        "brackets in a text": padded(b'{"max_tokens":1,"prompt":"', b',[]\\"', MAX_BODY, b'"}'),
        "messages": padded(
            b'{"max_tokens":1,"messages":[', text, parsing.MOST_MESSAGES - 1, text[:-1] + b"]}"
        ),
    }


@contextmanager
def repeating(url: str, body: bytes) -> Iterator[Any]:
    """A process that sends a body, if there is any, until the block ends; counts the answers."""
    context = get_context("spawn")
    count = context.Value("i", 0)
    process = context.Process(target=repeat, args=(url, body, count), daemon=True)
    process.start()
    try:
        while body and not count.value and process.is_alive():
            time.sleep(0.01)
        yield count
    finally:
        process.kill()
        process.join()


def repeat(url: str, body: bytes, count: Any) -> None:
    """Send a body on each of the attackers' connections again and again."""

    async def attack() -> None:
        async def one() -> None:
            reader, writer = await connect(url)
            while body:
                await answered(reader, writer, body)
                count.value += 1

        await asyncio.gather(*(one() for _ in range(ATTACKERS)))

    asyncio.run(attack())


async def waits_of(url: str, seconds: float) -> list[float]:
    """Seconds until a small completion is answered, again and again."""
    reader, writer = await connect(url)
    await answered(reader, writer, QUICK)  # what comes with the first one
    waits, until = list[float](), time.perf_counter() + seconds
    while (begun := time.perf_counter()) < until:
        await answered(reader, writer, QUICK)
        waits.append(time.perf_counter() - begun)
        await asyncio.sleep(0.002)
    writer.transport.abort()
    return waits


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a server."""
    where = urlsplit(url)
    return await asyncio.open_connection(where.hostname, where.port, limit=2**24)


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
    """Send a body on a connection, and read the answer."""
    path = b"chat/completions" if b'"messages":' in body[:64] else b"completions"
    writer.write(
        b"POST /v1/%b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % (path, len(body)) + body
    )
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    await reader.readexactly(int(length))


main = main_of(__name__, rates, soak, neighbours)

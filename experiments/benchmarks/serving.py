"""Token rate of the HTTP server, and what costly bodies take of others' answers.

    python -m pagedsim.experiments.benchmarks.serving
    python -m pagedsim.experiments.benchmarks.serving neighbours --seconds 5
    python -m pagedsim.experiments.benchmarks.serving router --rate 500

The first streams from `backend=sim` with a model faster than any server, bound to one core, to a
client on another, for each number of `--streams` at once: what the path over HTTP costs.

`neighbours` sends the costliest bodies that are allowed again and again, on two connections, while
another client waits for small answers. It prints the longest of its waits: in the median of the
seconds, and of all, which is that of a shared machine where others take its cores.

`router` sends completions at a rate, in random gaps, to a server that answers from memory
(canned.py), and as many through a router before two of them, in turn, so that both meet the machine
in the same state. It prints the difference of their medians and of their 90 % points, without the
time between a stream's events, and the processor's time in the router's process, which other work
on the machine changes little. A rate at which the direct way takes more than a millisecond in the
median tells nothing of a router, and is marked.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pagedsim.experiments.benchmarks.canned import Way, alternated, canned, on_fast_loop
from pagedsim.experiments.benchmarks.harness import ROOT, main_of, parse, table
from pagedsim.serve.router.upstream import Upstream

FAST = ("model=llama-3.1-8b", "hardware=h100", "speed=1000", "server.max_seqs=1024")
"""Words of a simulated server that is faster than any."""

# -- a server --------------------------------------------------------------------------------------


class Child(NamedTuple):
    """A server that listens."""

    url: str
    process: subprocess.Popen[str]
    said: list[str]
    """Lines it has written to stderr."""


@contextmanager
def listening(*words: str, core: int | None = None) -> Iterator[Child]:
    """`python -m pagedsim serve` with these words, on a port that is free unless they say.

    It is gone when the block ends. On one core alone, where that is asked; exits with what it said
    if it does not come to listen.
    """
    command = [sys.executable, "-m", "pagedsim", "serve", "port=0", *words]
    bound = None if core is None else partial(bind, {core})
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=bound
    )
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if " serves at http" in line:
                yield Child(line.split()[-1], process, said)
                return
        raise SystemExit("".join(said))
    finally:
        process.kill()
        process.wait()


async def answered(server: Upstream, body: bytes) -> bytes:
    """The answer to a body, on a connection that is kept."""
    path = "/v1/chat/completions" if b'"messages":' in body[:64] else "/v1/completions"
    return (await server.ask("POST", path, (), body))[1]


def bind(cores: set[int]) -> None:
    """Have this process run on these cores alone, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


# -- token rates -----------------------------------------------------------------------------------

USAGE = b'"usage":{'


def rates(words: Sequence[str]) -> None:
    """Print the token rate for each number of streams."""
    asked = parse(__doc__, words, {"--rounds": 5, "--tokens": 128, "--streams": [64, 1000]})
    rows = []
    for count in asked.streams:
        with listening(*FAST, core=0) as child, beside_core_0():
            rounds = [spent(child, count, asked.tokens) for _ in range(asked.rounds + 1)]
        seconds, processor = (median(of) for of in zip(*rounds[1:], strict=True))  # warm
        tokens = count * asked.tokens
        rows.append([f"{count:,}", f"{tokens / seconds:,.0f}", f"{1e6 * processor / tokens:.1f}"])
    print(table(["streams of backend=sim", "tokens/s", "µs of a core a token"], rows))


def spent(child: Child, count: int, tokens: int) -> tuple[float, float]:
    """Seconds of so many streams, and of the processor in the server."""
    before, begun = processor_seconds(child.process.pid), time.perf_counter()
    asyncio.run(streamed(child.url, count, tokens))
    seconds = time.perf_counter() - begun
    return seconds, processor_seconds(child.process.pid) - before


async def streamed(url: str, count: int, tokens: int) -> None:
    """Stream all requests at once, each on a connection of its own, with little work a token.
    Raises RuntimeError for an incomplete answer."""
    body: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}

    async def stream(number: int) -> bytes:
        prompt = [(7 * number + at) % 250 + 3 for at in range(32)]
        server = Upstream(url)
        answer = await answered(server, json.dumps({**body, "prompt": prompt}).encode())
        server.close()
        return answer

    for answer in await asyncio.gather(*map(stream, range(count))):
        usage = answer[answer.rindex(USAGE) :]
        ended = int(usage.split(b'"completion_tokens":')[1].split(b",")[0].strip(b" }"))
        if ended != tokens or b"data: [DONE]" not in usage:
            raise RuntimeError(f"an answer of {tokens} tokens ends with {answer[-300:]!r}")


@contextmanager
def beside_core_0() -> Iterator[None]:
    """Bind this process to the other cores for a while, if there are any."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    bind(set(range(1, os.cpu_count() or 1)) or {0})
    try:
        yield
    finally:
        bind(before)


def processor_seconds(process: int) -> float:
    """Processor time of a process and its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- a large body and others' latency --------------------------------------------------------------

ATTACKERS = 2
QUICK = json.dumps({"prompt": "a", "max_tokens": 1}).encode()


def neighbours(words: Sequence[str]) -> None:
    """Print how long others wait beside each of the costliest bodies."""
    bodies = costly_bodies()
    only = {"nargs": "+", "choices": bodies, "default": list(bodies)}
    asked = parse(__doc__, words, {"--seconds": 5, "--only": only})
    rows = []
    with listening(*FAST, core=0) as child, beside_core_0():
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
    texts, messages = parsing.MOST_TEXTS - 9, parsing.MOST_MESSAGES
    message = b'{"role":"user","content":"%b"},' % (b"a" * (MAX_BODY // messages - 40))
    prompt, data = b'{"max_tokens":1,"prompt":', b'{"max_tokens":1,"prompt":"a","metadata":'
    row = b"[%b7]" % (b"7," * (ids // 256 - 2))
    return {
        "none": b"",
        "one prompt of ids": padded(b'{"prompt":[', b"1234567,", ids, b"7]}"),
        "256 prompts of ids": prompt + b"[%b]}" % b",".join([row] * 256),
        "floats": padded(b'{"prompt":[', b"0.12345,", ids, b"7]}"),
        "long numbers": padded(b'{"prompt":[', b"9" * 4000 + b",", ids, b"7]}"),
        "fields": padded(data + b'{"a":1', b',"%b":[{}]' % (b"a" * 40), fields, b"}}"),
        "texts": padded(data + b"[", b'"abc",', texts, b"1]}"),
        "one text": padded(prompt + b'"', b"\\n", MAX_BODY, b'"}'),
        "brackets in a text": padded(prompt + b'"', b',[]\\"', MAX_BODY, b'"}'),
        "messages": padded(
            b'{"max_tokens":1,"messages":[', message, messages - 1, message[:-1] + b"]}"
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

    server = Upstream(url)

    async def attack() -> None:
        async def sending() -> None:
            while body:
                await answered(server, body)
                count.value += 1

        await asyncio.gather(*(sending() for _ in range(ATTACKERS)))

    asyncio.run(attack())


async def waits_of(url: str, seconds: float) -> list[float]:
    """Seconds until a small completion is answered, again and again."""
    server = Upstream(url)
    await answered(server, QUICK)  # what comes with the first one
    waits, until = list[float](), time.perf_counter() + seconds
    while (begun := time.perf_counter()) < until:
        await answered(server, QUICK)
        waits.append(time.perf_counter() - begun)
        await asyncio.sleep(0.002)
    server.close()
    return waits


# -- a router's overhead ---------------------------------------------------------------------------


def router(words: Sequence[str]) -> None:
    """Print what a router adds to the time of a small completion."""
    kinds = {"nargs": "+", "choices": KINDS, "default": list(KINDS)}
    options = {"--rate": 500.0, "--seconds": 10.0, "--routers": ROUTERS, "--answers": kinds}
    asked = parse(__doc__, words, options)
    rows = []
    with canned(2) as urls:
        for name, kind in product(asked.routers, asked.answers):
            backends = f"router.backends=[{','.join(urls)}]"
            with listening(backends, f"router={name}") as front:
                both = compared(front, urls[0], KINDS[kind], asked.rate, asked.seconds)
                rows.append([name, kind, *on_fast_loop(both)])
    head = ["router", "answers", "direct (µs)", "90 %", "added, median", "added, 90 %"]
    print(table([*head, "µs of a core a request"], rows))


async def compared(
    front: Child, backend: str, stream: bool, rate: float, seconds: float
) -> list[str]:
    """Cells with the times of a server, what a router adds, and the processor's time of that."""
    ways = Way(backend, stream), Way(front.url, stream)
    await alternated(ways, rate, 1.0)  # what comes with the first ones
    before = processor_seconds(front.process.pid)
    late = await alternated(ways, rate, seconds)
    processor = processor_seconds(front.process.pid) - before
    direct, through = (
        [median(way.waits), sorted(way.waits)[len(way.waits) * 9 // 10]] for way in ways
    )
    added = [long - short for short, long in zip(direct, through, strict=True)]
    cells = [f"{1e6 * value:,.0f}" for value in (*direct, *added, processor / rate / seconds)]
    if max(direct[0], median(late) - TICK) > QUIET:
        cells[2:] = ["saturated without a router"] * 3
    return cells


ROUTERS = ["round_robin", "least_requests", "prefix_aware"]
KINDS = {"whole": False, "streamed": True}
QUIET, TICK = 0.001, 0.001
"""The most seconds that the client and a server may take alone in the median; and what event loops
round their sleep to, by which requests may be late beyond that."""


main = main_of(__name__, rates, neighbours, router)

"""A server under load for minutes, with clients that vanish: what stays behind?

    python -m experiments.benchmarks.soak --minutes 10
    python -m experiments.benchmarks.soak --minutes 10 backend=engine

Clients come at random, stream answers of random lengths, and one in four cuts its connection in the
middle. The server's resident memory is read every second; its growth is the median of the last
fifth against that of the second fifth, when all is warm. In the end nobody may be left, and every
block must be free. Other words go to `serve`.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from statistics import median

from experiments.benchmarks.device import Plain
from experiments.benchmarks.streams import opened
from experiments.benchmarks.words import Parser, above_zero
from experiments.child import listening

CLIENTS = 48
"""At once."""
SIM = ("model=llama-3.1-8b", "memory=prefix", "memory.blocks=600", "preemption=swap", "speed=10")
"""Of a simulated server where memory runs out."""
ENGINE = ("batching=unified", "memory=prefix", "memory.blocks=600", "memory.swap_space_gib=0.1")
"""Of an engine whose blocks are all in use before long: a page of memory that nobody has touched
yet is not resident."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what was served and how memory grew."""
    parser = Parser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--minutes", type=above_zero, default=10)
    asked, others = parser.parse_known_args(arguments)
    words = ENGINE if "backend=engine" in others else SIM
    with listening(*words, *others) as child:
        resident, served = asyncio.run(soaked(child.url, child.process.pid, 60 * asked.minutes))
        left = unserved(child.url)
    fifth = max(len(resident) // 5, 1)
    warm, last = median(resident[fifth : 2 * fifth]), median(resident[-fifth:])
    print(f"{served.total():,} requests in {asked.minutes:g} minutes: {dict(served)}")
    print(f"memory: {warm / 2**20:.1f} MiB when warm, {last / 2**20:.1f} MiB in the end")
    print(f"growth: {last / warm - 1:+.2%}; left behind: {left or 'nothing'}")
    if left or served["broken"]:
        sys.exit("the server kept what it should not, or broke an answer")


async def soaked(url: str, process: int, seconds: float) -> tuple[list[int], Counter[str]]:
    """Resident bytes second by second, and what became of the requests."""
    until, served = time.monotonic() + seconds, Counter[str]()
    clients = [asyncio.create_task(client(url, i, until, served)) for i in range(CLIENTS)]
    resident: list[int] = []
    while time.monotonic() < until:
        resident.append(resident_bytes(process))
        await asyncio.sleep(1)
    await asyncio.gather(*clients)
    return resident, served


async def client(url: str, number: int, until: float, served: Counter[str]) -> None:
    """Ask, read, sometimes leave; again and again."""
    rng = random.Random(number)
    while time.monotonic() < until:
        await asyncio.sleep(rng.expovariate(4))
        prompt = [rng.randrange(3, 200)] * rng.randint(1, 300)
        tokens = rng.randint(1, 120)
        reader, writer = await opened(url, prompt, tokens)
        try:
            async with asyncio.timeout(rng.random() if rng.random() < 0.25 else 60):
                answer = await reader.read(-1)
            served["whole" if b"data: [DONE]" in answer else "broken"] += 1
        except TimeoutError:
            served["left"] += 1
        finally:
            writer.transport.abort()


def resident_bytes(process: int) -> int:
    """What a process has in memory."""
    with open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * 4096


def unserved(url: str) -> dict[str, float]:
    """What is not as it was before anybody came; it has ten seconds to become so."""
    until = time.monotonic() + 10
    while (left := busy(url)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def busy(url: str) -> dict[str, float]:
    """Who is there, and what they hold."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    wanted = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    told = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    values = {name.partition("{")[0]: float(value) for name, _, value in told}
    return {name: values[f"vllm:{name}"] for name in wanted if values[f"vllm:{name}"]}


if __name__ == "__main__":
    main()

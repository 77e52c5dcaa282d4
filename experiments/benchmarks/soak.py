"""A server under steady load for minutes: is its memory flat, and is anything left behind?

    python -m experiments.benchmarks.soak --backend sim --minutes 30
    python -m experiments.benchmarks.soak --backend engine --minutes 30
    python -m experiments.benchmarks.soak --backend engine --minutes 30 model=smollm2

Clients arrive at random, stream answers of random lengths, and one in four cuts its connection
before the end. Resident memory is printed for each minute (the median of its seconds), with the
ratio of the last minute to the third, when the server is warm. In the end no request may be left,
and every block must be free. Other words go to `serve`.
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
WARM = 3
"""The minute that the last one is compared with."""
WORDS = {
    # Memory runs out, so that requests are preempted.
    "sim": ("model=llama-3.1-8b", "memory=prefix", "memory.blocks=600", "preemption=swap",
            "speed=10"),
    # All blocks are in use before long: a page of memory that was never touched is not resident.
    "engine": ("batching=unified", "memory=prefix", "memory.blocks=600",
               "memory.swap_space_gib=0.1"),
}  # fmt: skip
"""What is served."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print resident memory minute by minute, and what was served."""
    parser = Parser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--backend", choices=tuple(WORDS), default="sim")
    parser.add_argument("--minutes", type=above_zero, default=10)
    asked, others = parser.parse_known_args(arguments)
    with listening(f"backend={asked.backend}", *WORDS[asked.backend], *others) as child:
        resident, served = asyncio.run(soaked(child.url, child.process.pid, 60 * asked.minutes))
        left = unserved(child.url)
    minutes = by_minute(resident)
    warm = min(WARM, len(minutes))
    print(f"{served.total():,} requests in {asked.minutes:g} minutes: {dict(served)}")
    print(f"minute {len(minutes)} to minute {warm}: {minutes[-1] / minutes[warm - 1]:.4f}")
    print(f"left behind: {left or 'nothing'}")
    if left or served["broken"]:
        sys.exit("the server kept what it should not, or broke an answer")


def by_minute(resident: Sequence[float]) -> list[float]:
    """The median of each minute that has begun, of values one a second."""
    return [median(resident[at : at + 60]) for at in range(0, len(resident), 60)]


async def soaked(url: str, process: int, seconds: float) -> tuple[list[int], Counter[str]]:
    """Resident bytes second by second, and what became of the requests."""
    until, served = time.monotonic() + seconds, Counter[str]()
    clients = [asyncio.create_task(client(url, i, until, served)) for i in range(CLIENTS)]
    resident: list[int] = []
    begun = time.monotonic()
    while time.monotonic() < until:
        resident.append(resident_bytes(process))
        if len(resident) % 60 == 0:
            *_, last = by_minute(resident)
            print(f"minute {len(resident) // 60:3}: {last / 2**20:8.1f} MiB", flush=True)
        await asyncio.sleep(max(begun + len(resident) - time.monotonic(), 0))
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

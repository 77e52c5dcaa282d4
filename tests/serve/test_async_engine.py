"""Many clients of one engine: each gets its own outputs, and a disconnect leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy, Request, SamplingParams
from pagedsim.core.batch_state import ServerState
from pagedsim.serve.async_engine import AsyncLLMEngine, Closing, EngineDead, Overloaded
from pagedsim.serve.realtime_sim import RealtimeSimulator
from pagedsim.serve.worker import Engine
from tests.sim.harness import Constant

T = TypeVar("T")


SGLANG: dict[str, Any] = {"memory": "radix", "batching": "sglang", "policy": "lpm"}
with_sglang = pytest.mark.parametrize("settings", [{}, SGLANG], ids=["prefill_first", "sglang"])


def paced(
    step: float = 0.001, cost: Constant | None = None, memory: str = "paged", **settings: Any
) -> RealtimeSimulator:
    made = make_memory(memory, blocks=400, block_size=4)
    return RealtimeSimulator(make_scheduler(memory=made, **settings), cost or Constant(step))


def run(engine: Engine, clients: Callable[[AsyncLLMEngine], Awaitable[T]], **settings: Any) -> T:
    """Run clients; afterwards no request is left and all memory is free."""

    async def served() -> T:
        serving = AsyncLLMEngine(engine, **settings)
        try:
            async with asyncio.timeout(60):
                found = await clients(serving)
                while serving.unfinished:  # aborted requests leave with the next step
                    await asyncio.sleep(0.001)
                return found
        finally:
            await serving.close()

    found = asyncio.run(served())
    assert not engine.has_unfinished_requests()
    memory = engine.scheduler.memory
    assert memory.free == memory.total
    return found


async def text_of(serving: AsyncLLMEngine, tokens: int = 5, **settings: Any) -> str:
    params = SamplingParams(max_tokens=tokens)
    said = [
        output.outputs[0].text
        async for output in serving.generate([1, 2], params, delta=True, **settings)
    ]
    return "".join(said)


async def reason_of(serving: AsyncLLMEngine, tokens: int, **settings: Any) -> str | None:
    params, reason = SamplingParams(max_tokens=tokens), None
    async for output in serving.generate([1, 2], params, **settings):
        reason = output.outputs[0].finish_reason
    return reason


@with_sglang
def test_each_of_many_clients_gets_its_tokens_once_and_in_order(settings: dict[str, Any]) -> None:
    async def clients(serving: AsyncLLMEngine) -> list[str]:
        return await asyncio.gather(*(text_of(serving, 1 + i % 40) for i in range(100)))

    said = run(paced(**settings), clients)
    assert said == ["".join(f" {n}" for n in range(1, 2 + i % 40)) for i in range(100)]


@pytest.mark.parametrize("own", [True, False])
def test_a_request_beyond_its_timeout_is_aborted(own: bool) -> None:
    async def clients(serving: AsyncLLMEngine) -> str | None:
        return await reason_of(serving, 1000, timeout=0.02 if own else None)

    assert run(paced(), clients, timeout=None if own else 0.02) == "timeout"


def test_policies_see_client_priority_deadline_and_more() -> None:
    seen: list[Request] = []

    class Sees(Policy):
        def rank(self, request: Request, state: ServerState) -> float:
            seen.append(request)
            return 0

    async def clients(serving: AsyncLLMEngine) -> None:
        more = {"tenant": "a"}
        await text_of(serving, 1, priority=-3, client="me", deadline=2.5, extra=more)

    run(paced(policy=Sees()), clients)
    request = seen[0]
    assert (request.priority, request.client, request.extra) == (-3, "me", {"tenant": "a"})
    assert request.deadline is not None and request.arrival is not None
    assert request.deadline == request.arrival + 2.5


def test_asking_a_dead_or_closed_engine_raises() -> None:
    def die(engine: Engine) -> None:
        raise SystemExit("gone")

    async def served() -> None:
        for end, error in ((die, EngineDead), (None, Closing)):
            serving = AsyncLLMEngine(paced())
            questions = [serving.ask(die if end else lambda engine: None) for _ in range(2)]
            async with asyncio.timeout(10):
                answers = await asyncio.gather(*questions, return_exceptions=True)
                assert all(isinstance(one, EngineDead) == bool(end) for one in answers)
                await serving.close()
                with pytest.raises(error):
                    await serving.ask(lambda engine: None)

    asyncio.run(served())


def test_a_model_that_is_as_slow_as_can_be_is_waited_for() -> None:
    async def clients(serving: AsyncLLMEngine) -> str | None:
        return await reason_of(serving, 1, timeout=0.05)

    engine = RealtimeSimulator(
        make_scheduler(memory=make_memory(blocks=4)), Constant(1.0), speed=1e-12
    )
    assert run(engine, clients) == "timeout"


def test_retry_after_is_in_seconds_of_ours() -> None:
    async def clients(serving: AsyncLLMEngine) -> int:
        for _ in range(5):
            await reason_of(serving, 1)
        waiting = [asyncio.create_task(reason_of(serving, 9)) for _ in range(40)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await reason_of(serving, 1)
        await asyncio.gather(*waiting)
        return refused.value.retry_after

    memory = make_memory(blocks=400)
    engine = RealtimeSimulator(make_scheduler(memory=memory), Constant(30.0), speed=10_000.0)
    assert run(engine, clients, max_waiting=40) == 1  # of the model's it would be 60


def test_all_streams_end_with_the_error_of_a_dead_engine() -> None:
    class Dies(RealtimeSimulator):
        def step(self) -> Any:
            raise SystemError("gone")

        def abort_request(self, request_id: Any) -> Any:
            raise SystemError("gone")

    async def served() -> None:
        engine = Dies(make_scheduler(memory=make_memory(blocks=4)), Constant(0.001))
        serving = AsyncLLMEngine(engine)
        with pytest.raises(EngineDead, match="SystemError: gone"):
            await reason_of(serving, 5)
        assert not serving.healthy
        with pytest.raises(EngineDead):
            await reason_of(serving, 5)
        with pytest.raises(EngineDead):
            await serving.ask(lambda engine: None)
        await serving.close()

    asyncio.run(served())

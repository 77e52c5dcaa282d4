"""What a request asks of the engine, from its first output to its end or its client's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from pagedsim.core import PagedsimError, SamplingParams
from pagedsim.engine.output import RequestOutput
from pagedsim.serve.api.problem import problem_of, refuse_lost
from pagedsim.serve.async_engine import AsyncLLMEngine
from pagedsim.serve.stream import Stream


@dataclass(frozen=True)
class Asked:
    """Prompts that are to be answered together."""

    name: str
    """The request's id; the engine's, too, where there is one prompt."""
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    labels: dict[str, Any]
    """As `AsyncLLMEngine.open` takes them."""

    @contextmanager
    def opened(self, engine: AsyncLLMEngine, *, stream: bool) -> Iterator[list[Stream]]:
        """A stream for each prompt; with `stream` of what is new, else of the last output."""
        alone = len(self.prompts) == 1
        with ExitStack() as stack:
            yield [
                stack.enter_context(
                    engine.open(
                        prompt,
                        self.params,
                        self.name if alone else f"{self.name}-{place}",
                        stream=stream,
                        delta=stream,
                        **self.labels,
                    )
                )
                for place, prompt in enumerate(self.prompts)
            ]


async def taken(stream: Stream) -> list[RequestOutput]:
    """What is new; raises Problem if the request has failed."""
    try:
        outputs = await stream.take()
    except PagedsimError as error:
        raise problem_of(error) from error
    if outputs:
        refuse_lost(outputs[-1])
    return outputs


async def accepted(engine: AsyncLLMEngine, streams: Sequence[Stream]) -> None:
    """Wait until the engine has looked at all of them; raises Problem if it refuses one."""
    await engine.ask(lambda served: None)  # which comes after them
    for stream in streams:
        if stream.error is not None:
            raise problem_of(stream.error)


async def whole(streams: Sequence[Stream]) -> list[RequestOutput]:
    """The last output of each; raises Problem if one has failed."""
    outputs = []
    for stream in streams:
        last = []
        while news := await taken(stream):
            last = news
        outputs += last[-1:]
    return outputs


@asynccontextmanager
async def while_present(receive: Receive) -> AsyncIterator[None]:
    """A block that is left as soon as the client has gone; what comes after it is not read."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
    finally:
        watcher.cancel()

"""The application: every path that the server answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.responses import StreamingResponse

from pagedsim.core import SamplingParams
from pagedsim.serve.async_engine import AsyncLLMEngine
from pagedsim.serve.made import Made


def make_app(
    engine: AsyncLLMEngine, found: Made, *, api_key: str | None = None, max_body: int = 2**23
) -> FastAPI:
    """The server's application over an engine."""
    app = FastAPI(title="pagedsim")

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if engine.healthy else 503)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        body = await request.json()
        params = SamplingParams(max_tokens=body["max_tokens"], temperature=0, ignore_eos=True)
        if not body.get("stream"):
            with engine.open(body["prompt"], params, stream=False) as stream:
                (output,) = await stream.take()
            return JSONResponse({"choices": [{"text": output.outputs[0].text}]})

        async def events() -> AsyncIterator[bytes]:
            with engine.open(body["prompt"], params, delta=True) as stream:
                while outputs := await stream.take():
                    yield b"".join(
                        b'data: {"choices":[{"text":%s,"index":0}]}\n\n'
                        % json.dumps(output.outputs[0].text).encode()
                        for output in outputs
                    )
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app

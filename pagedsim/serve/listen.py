"""A server on a socket: it says where it listens, serves, and drains when it is told to end."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

import uvicorn

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole
from pagedsim.serve.api.app import make_app
from pagedsim.serve.async_engine import AsyncLLMEngine
from pagedsim.serve.made import made


def listen(config: Mapping[str, Any]) -> None:
    """Serve what a configuration describes until SIGTERM or Ctrl-C."""
    require_whole("port", config["port"], 0, 65535)
    require_whole("max_body", config["max_body"], 1)
    require_number("drain", config["drain"], 0)
    with _socket(config["host"], config["port"]) as listening:
        found = made(config)
        engine = AsyncLLMEngine(
            found.engine, max_waiting=config["max_waiting"], timeout=config["timeout"]
        )
        key = config["api_key"] or os.environ.get("PAGEDSIM_API_KEY") or None
        app = make_app(engine, found, api_key=key, max_body=config["max_body"])
        settings = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
        host, port = listening.getsockname()[:2]
        _say(f"{found.model} on {found.backend}, {found.policy}: http://{host}:{port}")
        asyncio.run(_Listener(settings, engine, config["drain"]).serve([listening]))


class _Listener(uvicorn.Server):
    """Drains the engine before it closes its connections."""

    def __init__(self, config: uvicorn.Config, engine: AsyncLLMEngine, drain: float) -> None:
        super().__init__(config)
        self._engine, self._drain = engine, drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if unfinished := self._engine.unfinished:
            _say(f"ending: {unfinished} requests have {self._drain:g} s; Ctrl-C again gives up")
        drained = await self._engine.drain(self._drain)
        _say(f"ended: {drained.finished} requests finished, {drained.aborted} aborted")
        await super().shutdown(sockets)
        await self._engine.close()


def _socket(host: str, port: int) -> socket.socket:
    """Bound before anything is loaded, so that a port that is taken is found out at once."""
    try:
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.socket(kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        raise ConfigError(f"host={host}, port={port}: cannot listen: {error.strerror}") from error
    return bound


def _say(text: str) -> None:
    print(f"pagedsim: {text}", file=sys.stderr, flush=True)

"""Where a server is, whether it answers, and what it serves."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from pagedsim.core import ConfigError

PATIENCE = 10.0
"""Seconds that a server has to say what it serves."""
KEY = "OPENAI_API_KEY"
"""The variable of the environment with a key, which is sent and told nowhere else."""
MOST_READ = 1 << 20
"""Bytes of what it says that are read."""


def base_of(url: str | None) -> str:
    """The address without a path of the API's; raises ConfigError for what is none.

    >>> base_of("localhost:8000"), base_of("https://example.org/llm/v1/")
    ('http://localhost:8000', 'https://example.org/llm')
    """
    if url is None:
        raise ConfigError("backend.url: must be given: backend.url=http://host:port")
    said = str(url).strip()
    parts = urlsplit(said if "://" in said else f"http://{said}")
    try:
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        fine = False
    if not fine or parts.query or parts.fragment:
        raise ConfigError(f"backend.url={said}: must be an address such as http://host:port")
    if parts.username is not None:
        raise ConfigError(f"backend.url: must be without a name and a key; {KEY} is for keys")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def headers() -> dict[str, str]:
    """What goes along with every request."""
    key = os.environ.get(KEY, "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True)
class Address:
    """A server that answers, and the name of the model that is asked for."""

    base: str
    model: str

    @classmethod
    def found(cls, url: str | None, model: str | None) -> Address:
        """Ask the server what it serves; ConfigError where it is not there, or does not say."""
        base = base_of(url)
        served = _models(base, needed=model is None)
        if model is not None:
            return cls(base, model)
        if not served:
            raise ConfigError(
                f"backend.url={base}: /v1/models names no model; name one: backend.model=..."
            )
        return cls(base, served[0])


def _models(base: str, needed: bool) -> list[str]:
    """What /v1/models names; where that is not `needed`, nothing but a server must be there."""
    where = f"backend.url={base}"
    opener = build_opener(ProxyHandler({}))  # the load goes through none, either
    asked = Request(f"{base}/v1/models")
    for name, value in headers().items():
        asked.add_unredirected_header(name, value)  # a key is for this server alone
    try:
        with opener.open(asked, timeout=PATIENCE) as said:
            return _names(json.loads(said.read(MOST_READ)))
    except HTTPError as error:
        error.close()
        if error.code in (401, 403):
            raise ConfigError(
                f"{where}: refuses us (HTTP {error.code}); it takes the key in {KEY}"
            ) from None
        if not needed:
            return []
        raise ConfigError(
            f"{where}: /v1/models gives HTTP {error.code}; name the model: backend.model=..."
        ) from None
    except ValueError:
        if not needed:
            return []
        raise ConfigError(
            f"{where}: /v1/models is not what OpenAI's is; name the model: backend.model=..."
        ) from None
    except (URLError, OSError, HTTPException) as error:
        raise ConfigError(f"{where}: cannot be reached: {_why(error)}") from None


def _names(said: Any) -> list[str]:
    rows = said.get("data") if isinstance(said, dict) else None
    if not isinstance(rows, list):
        raise ValueError(said)
    return [str(row["id"]) for row in rows if isinstance(row, dict) and row.get("id")]


def _why(error: BaseException) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, TimeoutError):
        return f"no answer within {PATIENCE:g} s"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason) or type(reason).__name__

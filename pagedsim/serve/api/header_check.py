"""Middleware: cross-site request protection by headers, and the time of arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pagedsim.serve.api.errors import APIError

ARRIVAL = "pagedsim.arrival"
"""Scope key of the arrival time on the engine's clock, taken before the body is read."""


class HeaderCheck:
    """Refuse requests by their headers, before the body is read.

    - Host: must be a name of this server (against DNS rebinding).
    - Origin, if sent: must be the server's own page.
    - Content-Type, if sent: must be JSON; browsers send other types cross-site without preflight.
    """

    def __init__(
        self, app: ASGIApp, *, now: Callable[[], float], hosts: Iterable[str] | None = None
    ) -> None:
        """`hosts`: accepted names besides IP addresses and localhost; None accepts any."""
        self._app, self._now = app, now
        self._hosts = None if hosts is None else {_plain(host) for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or respond with the error."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope[ARRIVAL] = self._now()
        try:
            self._check(scope["method"], Headers(scope=scope))
        except APIError as problem:
            return await problem.response(scope, receive, send)
        await self._app(scope, receive, send)

    def _check(self, method: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if not self._known(name := _name(host)):
            raise APIError(
                403, f"Host: {name!r} is not a name of this server; hosts=[...] adds some"
            )
        origin = headers.get("origin")
        if origin is not None and not self._same(origin, host):
            raise APIError(403, f"Origin: {origin!r} is another site than {host!r}")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind and kind != "application/json":
            raise APIError(415, f"Content-Type: {kind!r}: must be application/json")

    def _known(self, name: str) -> bool:
        if self._hosts is None or name in self._hosts:
            return True
        return name == "localhost" or name.endswith(".localhost") or _is_address(name)

    def _same(self, origin: str, host: str) -> bool:
        """Whether `origin` is this server, or one of `hosts`."""
        try:
            site = urlsplit(origin)
            where = _plain(site.netloc)
        except ValueError:
            return False
        default = {"http": ":80", "https": ":443"}.get(site.scheme, "")
        same = where.removesuffix(default) == _plain(host).removesuffix(default)
        return same or (self._hosts is not None and _name(where) in self._hosts)


def _plain(host: str) -> str:
    return host.strip().lower()


def _name(host: str) -> str:
    """A host without its port.

    >>> [_name(host) for host in ("LocalHost:8000", "[::1]:8000", "::1", "10.0.0.1")]
    ['localhost', '::1', '::1', '10.0.0.1']
    """
    host = _plain(host)
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]


def _is_address(name: str) -> bool:
    """Whether it is an IP address, which DNS cannot rebind."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True

"""Guard of the endpoint's connections: their number, slow and malformed requests, foreign hosts and browsers."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import resource
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from aiohttp import web

from torchrl_rloo.agents.session import Reply

_KEEP_ALIVE_S = 75.0  # time until an idle connection is closed
_LINGER_S = 1.0  # time for which the rest of a refused body is read
_MAX_CONNECTIONS = 4096


def default_max_connections() -> int:
    """Return half of the number of files that this process may open, but at most 4096."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(_MAX_CONNECTIONS, soft // 2))


def foreign_host(request: web.Request, hosts: Collection[str]) -> str | None:
    """Return why a request's ``Host`` or ``Origin`` is refused, None if they are accepted.

    A page in a browser that rebinds a name to this address sends that name. Addresses and ``localhost`` are accepted.
    """
    if "Origin" in request.headers:
        return "requests of web pages are refused; call without an Origin"
    names = request.headers.getall("Host", [])
    if len(names) != 1:
        return f"a request must have one Host, got {len(names)}"
    name = names[0].rpartition("]")[0].lstrip("[") or names[0].partition(":")[0]
    if name.lower() in {"localhost", *hosts}:
        return None
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return f"Host={names[0][:100]!r} is unknown; call the endpoint by its address"
    return None


def error_body(path: str, message: str, code: str) -> dict[str, Any]:
    """Return the body of an error, in the format of the path's clients."""
    if path.endswith("/messages"):
        return {"type": "error", "error": {"type": code, "message": message}}
    return {"error": {"message": message, "type": code, "code": code, "param": None}}


class Connection(web.RequestHandler):
    """Connection that waits for a request no longer than a time limit, and notes whether replies were read.

    It is a stranger's until a request has shown a key: an error closes it, and it makes room for others.
    """

    __slots__ = ("_admitted", "_busy", "_gate", "_late", "_sent")

    def __init__(self, gate: Gate, manager: web.Server, **kwargs: Any):
        super().__init__(manager, **kwargs)
        self._gate, self._admitted, self._busy = gate, False, False
        self._late: asyncio.TimerHandle | None = None
        self._sent: list[Reply] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, in the place of the oldest stranger's, or answer that there are too many."""
        gate = self._gate
        if gate.open >= gate.max_connections and gate.strangers:
            next(iter(gate.strangers)).give_way()
        if gate.open >= gate.max_connections:
            self._refuse(transport, "connections", 503, f"{gate.max_connections} connections are open")
            return
        self._admitted, gate.strangers[self] = True, None
        gate.open += 1
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, whose request must be complete within the time limit."""
        if not self._admitted:
            return
        if self._late is None and not self._busy:
            self._watch()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Note that replies were not read, if the client's system discarded them."""
        if self._late is not None:
            self._late.cancel()
        self._leave()
        if isinstance(exc, ConnectionResetError | BrokenPipeError):
            for reply in self._sent:
                reply.call.deliveries -= 1
                if not reply.call.delivered:
                    self._gate.counts["endpoint/unread_replies"] += 1
        self._sent = []
        super().connection_lost(exc)

    @property
    def is_stranger(self) -> bool:
        """True until a request has shown a key."""
        return self in self._gate.strangers

    def admit(self) -> None:
        """Note that a request has shown a key."""
        self._gate.strangers.pop(self, None)

    def give_way(self) -> None:
        """Close the connection for another one."""
        self._leave()
        self._refuse(self.transport, "connections", 503, "other clients need the connection; send requests at once")

    def _leave(self) -> None:
        if self._admitted:
            self._admitted = False
            self._gate.open -= 1
        self.admit()

    def begin(self) -> None:
        """Note that a request's head has arrived. A client that sends another one has read its last replies."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self._busy, self._sent = True, []

    def end(self) -> None:
        """Note that a request has been answered."""
        self._busy = False

    def sent(self, replies: list[Reply]) -> None:
        """Note the replies that were written last."""
        self._sent = replies

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer a malformed request in one line, and close the connection."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        self.begin()
        self.end()
        self._gate.counts["endpoint/requests"] += 1
        self._gate.counts["endpoint/refused/http"] += 1
        line = " ".join((message or "malformed HTTP").split())[:200]
        response = web.json_response(error_body("", line, "malformed_http"), status=status)
        response.force_close()
        return response

    def _watch(self) -> None:
        self._late = self._loop.call_later(self._gate.read_timeout, self._expire)

    def _expire(self) -> None:
        if self.transport is not None:
            self._refuse(self.transport, "slow", 408, f"no request within {self._gate.read_timeout:g} s")

    def _refuse(self, transport: asyncio.BaseTransport, reason: str, status: int, message: str) -> None:
        self._gate.counts[f"endpoint/refused/{reason}"] += 1
        body = json.dumps(error_body("", message, reason)).encode()
        head = f"HTTP/1.1 {status} Refused\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        transport.write(f"{head}Retry-After: 1\r\nConnection: close\r\n\r\n".encode() + body)
        transport.close()


class Gate:
    """Limits of a server's connections."""

    def __init__(self, counts: Counter[str], max_connections: int, read_timeout: float):
        self.counts, self.max_connections, self.read_timeout, self.open = counts, max_connections, read_timeout, 0
        self.strangers: dict[Connection, None] = {}

    def connections(self, server: web.Server) -> Callable[[], Connection]:
        """Return the factory of the connections of an aiohttp server. It must be called on the server's loop."""
        loop = asyncio.get_running_loop()
        options = {"keepalive_timeout": _KEEP_ALIVE_S, "lingering_time": _LINGER_S, "access_log": None}
        return lambda: Connection(self, server, loop=loop, **options)

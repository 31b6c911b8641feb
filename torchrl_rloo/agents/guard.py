"""Guard of the endpoint: limits of its connections, and requests that clients repeat after a lost one.

:class:`Gate` limits connections, slow and malformed requests, foreign hosts and browsers. :class:`Exchanges` gives a
repeated request the replies of the first.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from torchrl_rloo.agents.chat_format import FormatError
from torchrl_rloo.agents.session import Reply

_KEEP_ALIVE_S = 75.0  # time until an idle connection is closed
_LINGER_S = 1.0  # time for which the rest of a refused body is read
_MAX_CONNECTIONS = 4096


def default_max_connections() -> int:
    """Return half of the number of files that this process may open, but at most 4096."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(_MAX_CONNECTIONS, soft // 2))


def foreign_host(request: web.Request) -> str | None:
    """Return why a request's ``Host`` or ``Origin`` is refused, None if they are accepted.

    A page in a browser that rebinds a name to this address sends that name. Addresses and ``localhost`` are accepted.
    """
    if "Origin" in request.headers:
        return "requests of web pages are refused; call without an Origin"
    names = request.headers.getall("Host", [])
    if len(names) != 1:
        return f"a request must have one Host, got {len(names)}"
    name = names[0].rpartition("]")[0].lstrip("[") or names[0].partition(":")[0]
    if name.lower() == "localhost":
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
    """Limits of a server's connections; strangers are those on which no request has shown a key yet, oldest first."""

    def __init__(self, counts: Counter[str], max_connections: int, read_timeout: float):
        self.counts, self.max_connections, self.read_timeout, self.open = counts, max_connections, read_timeout, 0
        self.strangers: dict[Connection, None] = {}

    def connections(self, server: web.Server) -> Callable[[], Connection]:
        """Return the factory of the connections of an aiohttp server. It must be called on the server's loop."""
        loop = asyncio.get_running_loop()
        options = {"keepalive_timeout": _KEEP_ALIVE_S, "lingering_time": _LINGER_S, "access_log": None}
        return lambda: Connection(self, server, loop=loop, **options)


_MAX_KEY = 256  # characters of an idempotency key
_CLOSING_S = 0.1  # time for the connection of an earlier attempt to close


@dataclass(eq=False)
class Exchange:
    """Request and its replies."""

    digest: bytes  # of path and body
    replies: asyncio.Future[list[Reply]]  # task that samples them
    waiters: int = 0  # connections that wait for them
    connections: list[asyncio.BaseTransport] = field(default_factory=list)  # of the request and its repetitions
    repetitions: int = 0  # later requests that shared the replies
    sending: int = 0  # of these, the ones that are not answered yet

    def is_sampled(self) -> bool:
        """Return whether the replies are there."""
        return self.replies.done() and not self.replies.cancelled() and self.replies.exception() is None

    def is_lost(self) -> bool:
        """Return whether a reply was sampled, but not sent or not read, and is not being sent again."""
        return (
            self.is_sampled() and not self.sending and not all(reply.call.delivered for reply in self.replies.result())
        )

    def is_answered(self) -> bool:
        """Return whether the agent has continued one of the replies, which it must have read."""
        return self.is_sampled() and any(reply.call.continued for reply in self.replies.result())


class Exchanges:
    """Requests of one session. A repeated request gets the replies of the first, if they have been sampled.

    A request is repeated if it has the ``Idempotency-Key`` of an earlier one. Without a key, it must be identical to
    one whose connections are closed. Either it has an ``X-Stainless-Retry-Count`` above 0, as clients of OpenAI and
    Anthropic send it, or the earlier replies were not sent or not read. Sampling stops once no connection waits for it,
    so a later repetition samples again.
    """

    def __init__(self) -> None:
        self._keyed: dict[str, Exchange] = {}
        self._equal: dict[bytes, list[Exchange]] = {}

    async def find(self, path: str, body: bytes, key: str | None, retries: str | None) -> tuple[bytes, Exchange | None]:
        """Return the digest of a request, and the exchange that it repeats; None if it is new."""
        digest = hashlib.blake2b(path.encode() + b"\0" + body, digest_size=16).digest()
        if key is not None:
            if not 0 < len(key) <= _MAX_KEY:
                raise FormatError(f"Idempotency-Key of {len(key)} characters must have 1 to {_MAX_KEY}")
            found = self._keyed.get(key)
            if found is not None and found.digest != digest:
                raise FormatError("Idempotency-Key belongs to another request; use a new key")
        else:
            attempt = int(retries[:9]) if retries is not None and retries.isdecimal() else 0
            found = await self._find_equal(digest, attempt)
        if found is not None:
            found.repetitions += 1
            found.sending += 1  # until the caller has answered
        return digest, found

    async def _find_equal(self, digest: bytes, attempt: int) -> Exchange | None:
        """Return the request that an attempt repeats, if its connections close soon."""
        deadline = time.monotonic() + _CLOSING_S
        while True:
            # Each of several equal requests is repeated once by its first retry
            equal = [
                exchange
                for exchange in self._equal.get(digest, ())
                if exchange.is_lost() or (exchange.repetitions < attempt and not exchange.is_answered())
            ]
            closed = (e for e in equal if all(connection.is_closing() for connection in e.connections))
            if (found := next(closed, None)) is not None or not equal or time.monotonic() > deadline:
                return found
            await asyncio.sleep(_CLOSING_S / 20)

    async def replies(
        self,
        digest: bytes,
        repeated: Exchange | None,
        key: str | None,
        connection: asyncio.BaseTransport,
        sample: Callable[[], Awaitable[list[Reply]]],
    ) -> list[Reply]:
        """Return the replies of a request; cancelling the last one that waits stops sampling."""
        exchange = repeated
        if exchange is None:
            exchange = Exchange(digest, asyncio.ensure_future(sample()))
            if key is None:
                self._equal.setdefault(digest, []).append(exchange)
            else:
                self._keyed[key] = exchange
        exchange.connections.append(connection)
        exchange.waiters += 1
        try:
            return await asyncio.shield(exchange.replies)
        except BaseException:
            # A failed or cancelled request leaves nothing to repeat
            if exchange.waiters == 1:
                self._forget(exchange, key)
                exchange.replies.cancel()
            raise
        finally:
            exchange.waiters -= 1

    def _forget(self, exchange: Exchange, key: str | None) -> None:
        if exchange.is_sampled():
            return  # sampled in the moment of the cut; the next attempt gets it
        if key is None:
            self._equal[exchange.digest].remove(exchange)
        elif self._keyed.get(key) is exchange:
            del self._keyed[key]

"""Exchanges: requests of a session that a client repeats after a lost connection, and the replies that they get."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from torchrl_rloo.agents.chat_format import FormatError
from torchrl_rloo.agents.session import Reply

_MAX_KEY = 256  # characters of an idempotency key
_CLOSING_S = 0.1  # time for the connection of an earlier attempt to close


@dataclass(eq=False)
class Exchange:
    """Request and its replies."""

    digest: bytes
    replies: asyncio.Future[list[Reply]]
    waiters: int = 0
    connections: list[asyncio.BaseTransport] = field(default_factory=list)
    repetitions: int = 0
    sending: int = 0

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

"""JSON requests with retries, for remote rewards whose service may be slow, overloaded or briefly unavailable."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from random import SystemRandom
from typing import Any

_JITTER = SystemRandom()  # leaves the state of the seeded global generator unchanged
_MAX_WAIT = 30.0  # maximum backoff in seconds
_RETRIED_STATUSES = frozenset({408, 425, 429})  # in addition to 5xx


class RemoteRewardError(RuntimeError):
    """Error of a service that gave no usable answer.

    Attributes:
        status: HTTP status of the last reply; None without a reply.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.status)


class _TransientError(Exception):
    """Failed attempt that may succeed when it is retried."""

    def __init__(self, message: str, status: int | None = None, wait: float = 0.0):
        super().__init__(message)
        self.status, self.wait = status, wait


@dataclass(frozen=True)
class JsonEndpoint:
    """Endpoint that accepts JSON by POST and answers with JSON.

    Connection errors, time-outs, replies that are not JSON, and the statuses 408, 425, 429 and 5xx are retried. The
    wait is ``backoff`` seconds, doubled each time up to 30, minus a random share of at most one half. A ``Retry-After``
    header may extend it. Other statuses, including redirects, fail at once.

    Attributes:
        url: address, http or https.
        timeout: seconds per attempt.
        total_timeout: seconds per request, with all attempts and waits.
        retries: maximum number of attempts after the first.
        backoff: seconds before the second attempt.
        concurrency: maximum number of requests in flight in one :meth:`session`.
        headers: headers of each request. They are pickled, so pass a key through ``api_key_env`` instead.
        api_key_env: environment variable that holds a key, sent as ``Authorization: Bearer``. It is read when a session
            opens and is not stored. None sends no key.

    Raises:
        ValueError: if a setting is out of range.

    Example::

        endpoint = JsonEndpoint("http://localhost:8000/score", retries=2)
        async with endpoint.session() as session:
            reply = await session.post({"completions": ["It is 4."]})
    """

    url: str
    timeout: float = 60.0
    total_timeout: float = 300.0
    retries: int = 4
    backoff: float = 0.5
    concurrency: int = 16
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url!r} must start with http:// or https://")
        for name in ("timeout", "total_timeout", "backoff"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be a positive, finite number of seconds")
        if self.retries < 0 or self.concurrency < 1:
            raise ValueError(f"retries={self.retries} must be >= 0 and concurrency={self.concurrency} >= 1")

    @asynccontextmanager
    async def session(self) -> AsyncIterator[JsonSession]:
        """Open connections in the running event loop and close them on exit.

        Raises:
            RemoteRewardError: if the environment variable ``api_key_env`` is not set.
        """
        import aiohttp

        key = None
        if self.api_key_env is not None and not (key := os.environ.get(self.api_key_env)):
            raise RemoteRewardError(
                f"{self.url}: environment variable {self.api_key_env} is not set; export the key in it, or use "
                "api_key_env=None for a server without keys"
            )
        headers = {**self.headers, "Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        connector = aiohttp.TCPConnector(limit=0)  # a wait for a connection would count towards the time limit
        async with aiohttp.ClientSession(connector=connector, headers=headers) as client:
            yield JsonSession(self, client, key)


class JsonSession:
    """Session of requests to a :class:`JsonEndpoint` within one event loop."""

    def __init__(self, endpoint: JsonEndpoint, client: Any, key: str | None):
        self._endpoint, self._client, self._key = endpoint, client, key
        self._slots = asyncio.Semaphore(endpoint.concurrency)

    async def post(self, body: Any) -> Any:
        """Post a request and return the decoded reply.

        Raises:
            RemoteRewardError: if no attempt succeeds, with the answer of the server.
            TypeError: if ``body`` is not JSON.
        """
        data = json.dumps(body, default=_to_json).encode()
        async with self._slots:  # held during backoff, so that an overloaded server gets fewer requests
            return await self._post_with_retries(data)

    async def _post_with_retries(self, data: bytes) -> Any:
        settings, clock = self._endpoint, asyncio.get_running_loop().time
        deadline = clock() + settings.total_timeout
        attempts = 0
        while True:
            attempts += 1
            # Give an attempt at most the time that is left
            try:
                return await self._attempt(data, max(0.001, min(settings.timeout, deadline - clock())))
            except _TransientError as error:
                failed = f"{settings.url}: {attempts} attempts failed, the last with: {error}"
                if attempts > settings.retries:
                    raise RemoteRewardError(failed, error.status) from error
                # Wait longer after each failure, for a random time so that requests spread out
                wait = max(error.wait, min(_MAX_WAIT, settings.backoff * 2 ** (attempts - 1)) * _JITTER.uniform(0.5, 1))
                if clock() + wait >= deadline:
                    limit = f"total_timeout={settings.total_timeout} s leaves no time to wait {wait:.3g} s more"
                    raise RemoteRewardError(f"{failed}; {limit}", error.status) from error
            await asyncio.sleep(wait)

    async def _attempt(self, data: bytes, timeout: float) -> Any:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            # Refuse redirects: they could turn the POST into a GET, or send the key to another host
            async with self._client.post(self._endpoint.url, data=data, timeout=limit, allow_redirects=False) as reply:
                text = (await reply.read()).decode(errors="replace")
        except asyncio.TimeoutError as error:
            raise _TransientError(f"no answer within {timeout:.3g} s") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _TransientError(f"{type(error).__name__}: {error}") from error
        except aiohttp.ClientError as error:
            raise RemoteRewardError(f"{self._endpoint.url}: {type(error).__name__}: {error}") from error
        # Retry only statuses that may be temporary
        status = reply.status
        if status >= 300:
            message = f"{status} {reply.reason}: {self._redact(text)}"
            if status in _RETRIED_STATUSES or status >= 500:
                raise _TransientError(message, status, _retry_after(reply.headers.get("Retry-After")))
            target = f" (redirects to {reply.headers['Location']})" if "Location" in reply.headers else ""
            raise RemoteRewardError(f"{self._endpoint.url}: {message}{target}", status)
        try:
            return json.loads(text)
        except ValueError as error:
            raise _TransientError(f"status {status} and no JSON: {self._redact(text)}", status) from error

    def _redact(self, text: str) -> str:
        """Truncate an answer of the server and mask the key that it may echo."""
        return (text.replace(self._key, "***") if self._key else text)[:1000]


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await coroutines concurrently and return their results in order.

    The first exception cancels the others and is raised after they have ended.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # no effect on finished tasks
        await asyncio.gather(*tasks, return_exceptions=True)


def _retry_after(value: str | None) -> float:
    """Parse a ``Retry-After`` header, a number of seconds or a date, into seconds; 0 if it is neither."""
    if value is None:
        return 0.0
    try:
        return max(0.0, float(value)) if value.strip().replace(".", "", 1).isdigit() else _seconds_until(value)
    except (ValueError, TypeError):
        return 0.0


def _seconds_until(date: str) -> float:
    then = parsedate_to_datetime(date)
    then = then if then.tzinfo else then.replace(tzinfo=timezone.utc)
    return max(0.0, (then - datetime.now(timezone.utc)).total_seconds())


def _to_json(value: Any) -> Any:
    """Convert arrays, tensors and numpy scalars to JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.100} ({type(value).__name__}) cannot be sent as JSON")

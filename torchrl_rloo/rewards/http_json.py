"""JSON requests to a service that may be slow, overloaded or away for a while; what remote rewards are made of."""

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

_JITTER = SystemRandom()  # the global generator belongs to the run's seed
_MAX_WAIT = 30.0  # seconds; backing off grows no further
_PASSING = frozenset({408, 425, 429})  # statuses below 500 that a later attempt may not meet


class RemoteRewardError(RuntimeError):
    """A service gave no usable answer.

    Attributes:
        status: HTTP status of the last reply; None if there was none.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.status)


class _Passing(Exception):
    """An attempt failed in a way that another one may not."""

    def __init__(self, message: str, status: int | None = None, wait: float = 0.0):
        super().__init__(message)
        self.status, self.wait = status, wait


@dataclass(frozen=True)
class JsonEndpoint:
    """An address that takes JSON by POST and answers with JSON.

    Connection errors, time-outs, replies that are not JSON, and the statuses 408, 425, 429 and 5xx are tried again
    after ``backoff`` seconds, doubled each time up to 30, less a random share of up to a half; later if the server's
    ``Retry-After`` says so. Other statuses, redirects too, fail at once.

    Attributes:
        url: where to post to.
        timeout: seconds one attempt may take.
        total_timeout: seconds one request may take with all its attempts and the waits between them.
        retries: further attempts after the first.
        backoff: seconds before the second attempt.
        concurrency: requests under way at a time in one :meth:`session`.
        headers: sent with each request. They are pickled: a key belongs into an environment variable.
        api_key_env: environment variable that holds a key, sent as ``Authorization: Bearer``. It is read when a session
            opens and kept nowhere.

    Raises:
        ValueError: for a setting out of range.
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
        """Connections that belong to the running event loop, closed on leaving.

        Raises:
            RemoteRewardError: if ``api_key_env`` is named but not set.
        """
        import aiohttp

        key = None
        if self.api_key_env is not None and not (key := os.environ.get(self.api_key_env)):
            raise RemoteRewardError(
                f"{self.url}: the environment variable {self.api_key_env} is not set: export the key in it, or pass "
                "api_key_env=None for a server that asks for none"
            )
        headers = {**self.headers, "Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        connector = aiohttp.TCPConnector(limit=0)  # waiting for a connection would count as time of an attempt
        async with aiohttp.ClientSession(connector=connector, headers=headers) as client:
            yield JsonSession(self, client, key)


class JsonSession:
    """Requests to a :class:`JsonEndpoint` within one event loop."""

    def __init__(self, endpoint: JsonEndpoint, client: Any, key: str | None):
        self._endpoint, self._client, self._key = endpoint, client, key
        self._slots = asyncio.Semaphore(endpoint.concurrency)

    async def post(self, body: Any) -> Any:
        """The decoded reply to one request.

        Raises:
            RemoteRewardError: if there is none, with the server's own words.
            TypeError: if ``body`` is not JSON.
        """
        data = json.dumps(body, default=_plain).encode()
        async with self._slots:  # also while backing off: an overloaded server gets fewer requests
            return await self._persist(data)

    async def _persist(self, data: bytes) -> Any:
        settings, clock = self._endpoint, asyncio.get_running_loop().time
        deadline = clock() + settings.total_timeout
        attempts = 0
        while True:
            attempts += 1
            try:
                return await self._attempt(data, max(0.001, min(settings.timeout, deadline - clock())))
            except _Passing as error:
                failed = f"{settings.url}: {attempts} attempts failed, the last with: {error}"
                if attempts > settings.retries:
                    raise RemoteRewardError(failed, error.status) from error
                wait = max(error.wait, min(_MAX_WAIT, settings.backoff * 2 ** (attempts - 1)) * _JITTER.uniform(0.5, 1))
                if clock() + wait >= deadline:
                    limit = f"total_timeout={settings.total_timeout} s leaves no time to wait {wait:.3g} s more"
                    raise RemoteRewardError(f"{failed}; {limit}", error.status) from error
            await asyncio.sleep(wait)

    async def _attempt(self, data: bytes, timeout: float) -> Any:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            # a redirect would turn the POST into a GET, or hand the key to another host
            async with self._client.post(self._endpoint.url, data=data, timeout=limit, allow_redirects=False) as reply:
                text = (await reply.read()).decode(errors="replace")
        except asyncio.TimeoutError as error:
            raise _Passing(f"no answer within {timeout:.3g} s") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        except aiohttp.ClientError as error:
            raise RemoteRewardError(f"{self._endpoint.url}: {type(error).__name__}: {error}") from error
        status = reply.status
        if status >= 300:
            words = f"{status} {reply.reason}: {self._shown(text)}"
            if status in _PASSING or status >= 500:
                raise _Passing(words, status, _retry_after(reply.headers.get("Retry-After")))
            target = f" (redirects to {reply.headers['Location']})" if "Location" in reply.headers else ""
            raise RemoteRewardError(f"{self._endpoint.url}: {words}{target}", status)
        try:
            return json.loads(text)
        except ValueError as error:
            raise _Passing(f"status {status} and no JSON: {self._shown(text)}", status) from error

    def _shown(self, text: str) -> str:
        """The server's own words, without the key that it may have echoed."""
        return (text.replace(self._key, "***") if self._key else text)[:1000]


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results in order; the first exception ends the others, and is raised once they have ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # does nothing to those that are done
        await asyncio.gather(*tasks, return_exceptions=True)


def _retry_after(value: str | None) -> float:
    """Seconds of a ``Retry-After`` header, which is a number of seconds or a date; 0 if it is neither."""
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


def _plain(value: Any) -> Any:
    """Arrays and tensors, numbers of numpy among them, as JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.100} ({type(value).__name__}) is not JSON")

"""Scores of a remote service over HTTP, with retries while it is slow, overloaded or briefly unavailable."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from itertools import count
from numbers import Real
from random import SystemRandom
from typing import Any

from torchrl_rloo.images.parts import place_images
from torchrl_rloo.images.shown import data_uri
from torchrl_rloo.rewards.protocol import MalformedScoresError, final_text, take_columns
from torchrl_rloo.runtime.http import (
    ENCODINGS,
    OversizedReplyError,
    Redactor,
    ReplyError,
    decode,
    read_body,
    strict_json,
)

_JITTER = SystemRandom()  # leaves the state of the seeded global generator unchanged
_MAX_WAIT = 30.0  # maximum backoff in seconds
_RETRIED_STATUSES = frozenset({408, 425, 429})  # in addition to 5xx


class RemoteRewardError(RuntimeError):
    """Error of a service that gave no usable answer, with the HTTP status of the last reply; None without a reply."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.status)


@dataclass(frozen=True)
class _Failure:
    """Failed attempt, with a message without secrets."""

    message: str
    status: int | None = None
    transient: bool = False  # whether another attempt may succeed
    wait: float = 0.0  # seconds that the server asks for


@dataclass(frozen=True)
class JsonEndpoint:
    """Endpoint that accepts JSON by POST and answers with JSON; :class:`RemoteScorer` documents its settings.

    Errors mask the key, the user, password and query of ``url``, and values of ``headers`` from four characters on.

    Connection errors, time-outs, replies that are not JSON, and the statuses 408, 425, 429 and 5xx are retried. The
    wait is ``backoff`` seconds, doubled each time up to 30, minus a random share of at most one half. A ``Retry-After``
    header may extend it. Other statuses, including redirects, fail at once. So does a reply of more than ``max_bytes``,
    before or after it is unpacked. The key is read when a session opens and is not stored.
    """

    url: str = field(repr=False)  # may hold a password
    timeout: float = 60.0
    total_timeout: float = 300.0
    retries: int = 4
    backoff: float = 0.5
    concurrency: int = 16
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_key_env: str | None = None
    max_bytes: int = 1 << 24

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.redactor()(self.url)!r} must start with http:// or https://")
        for name in ("timeout", "total_timeout", "backoff"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be a positive, finite number of seconds")
        if self.retries < 0 or self.concurrency < 1:
            raise ValueError(f"retries={self.retries} must be >= 0 and concurrency={self.concurrency} >= 1")
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes={self.max_bytes} must be at least 1")

    def redactor(self, key: str | None = None) -> Redactor:
        """Return a function that masks the secrets of requests with a key."""
        return Redactor(self.url, self.headers, [key])

    @asynccontextmanager
    async def session(self) -> AsyncIterator[JsonSession]:
        """Open connections in the running event loop; raise ``RemoteRewardError`` if the key is missing."""
        import aiohttp

        key = None
        if self.api_key_env is not None and not (key := os.environ.get(self.api_key_env)):
            raise RemoteRewardError(
                f"{self.redactor()(self.url)}: environment variable {self.api_key_env} is not set; export the key in "
                "it, or use api_key_env=None for a server without keys"
            )
        headers = {**self.headers, "Content-Type": "application/json", "Accept-Encoding": ENCODINGS}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        limits = aiohttp.ClientTimeout()  # none, since a session limits a whole attempt
        connector = aiohttp.TCPConnector(limit=0)  # a wait for a connection would count towards the time limit
        async with aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=limits, auto_decompress=False
        ) as client:
            yield JsonSession(self, client, self.redactor(key))


class JsonSession:
    """Session of requests to a :class:`JsonEndpoint` within one event loop; ``redact`` masks secrets in a text."""

    def __init__(self, endpoint: JsonEndpoint, client: Any, redact: Redactor):
        self._endpoint, self._client, self.redact = endpoint, client, redact
        self.name = redact(endpoint.url)
        self._slots = asyncio.Semaphore(endpoint.concurrency)

    async def post(self, body: Any) -> Any:
        """Post a request and return the decoded reply; raise ``RemoteRewardError`` if no attempt succeeds."""
        data = json.dumps(body, default=_to_json).encode()
        async with self._slots:  # held during backoff, so that an overloaded server gets fewer requests
            return await self._post_with_retries(data)

    async def _post_with_retries(self, data: bytes) -> Any:
        settings, clock = self._endpoint, asyncio.get_running_loop().time
        deadline = clock() + settings.total_timeout
        for attempts in count(1):
            # Give an attempt at most the time that is left
            result = await self._attempt(data, max(0.001, min(settings.timeout, deadline - clock())))
            if not isinstance(result, _Failure):
                return result
            if not result.transient:
                raise RemoteRewardError(f"{self.name}: {result.message}", result.status)
            failed = f"{self.name}: {attempts} attempts failed, the last with: {result.message}"
            if attempts > settings.retries:
                raise RemoteRewardError(failed, result.status)
            # Wait longer after each failure, for a random time so that requests spread out
            wait = max(result.wait, min(_MAX_WAIT, settings.backoff * 2 ** (attempts - 1)) * _JITTER.uniform(0.5, 1))
            if clock() + wait >= deadline:
                limit = f"total_timeout={settings.total_timeout} s leaves no time to wait {wait:.3g} s more"
                raise RemoteRewardError(f"{failed}; {limit}", result.status)
            await asyncio.sleep(wait)

    async def _attempt(self, data: bytes, timeout: float) -> Any:
        """Return the decoded reply or a :class:`_Failure`: the errors of aiohttp hold the headers of the request."""
        import aiohttp

        try:
            return await asyncio.wait_for(self._exchange(data), timeout)
        except asyncio.TimeoutError:
            return _Failure(f"no answer within {timeout:.3g} s", transient=True)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return self._failure(f"{type(error).__name__}: {error}", transient=True)
        except OversizedReplyError as error:
            return self._failure(str(error))
        except (aiohttp.ClientError, ValueError, OSError) as error:  # invalid addresses and headers, broken replies
            return self._failure(f"{type(error).__name__}: {error}", transient=isinstance(error, ReplyError))

    async def _exchange(self, data: bytes) -> Any:
        # Refuse redirects: they could turn the POST into a GET, or send the key to another host
        async with self._client.post(self._endpoint.url, data=data, allow_redirects=False) as reply:
            body = await read_body(reply, self._endpoint.max_bytes)
        status = reply.status
        if status < 300:
            try:
                return await decode(body, strict_json)
            except ReplyError as error:
                message = f"status {status} and no usable JSON: {error}: {_text(body)}"
                return self._failure(message, status, transient=True)
        # Retry only statuses that may be temporary
        target = f" (redirects to {reply.headers['Location']})" if "Location" in reply.headers else ""
        transient = status in _RETRIED_STATUSES or status >= 500
        wait = _retry_after(reply.headers.get("Retry-After"))
        return self._failure(f"{status} {reply.reason}{target}: {_text(body)}", status, transient=transient, wait=wait)

    def _failure(self, message: str, status: int | None = None, **more: Any) -> _Failure:
        return _Failure(self.redact.line(message), status, **more)


def _text(body: bytes) -> str:
    """Return the begin of a body as text, for a message."""
    return body[: 1 << 16].decode(errors="replace")


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await coroutines concurrently; the first exception cancels the others and is raised after they have ended."""
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
        if value.strip().replace(".", "", 1).isdigit():
            return max(0.0, float(value))
        then = parsedate_to_datetime(value)
        then = then if then.tzinfo else then.replace(tzinfo=timezone.utc)
        return max(0.0, (then - datetime.now(timezone.utc)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def _to_json(value: Any) -> Any:
    """Convert arrays, tensors and numpy scalars to JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.100} ({type(value).__name__}) cannot be sent as JSON")


_JOINED, _FINAL = "prompts+completions", "final_text"
_MAX_EXCERPT = 300  # characters of a reply in an error


def with_data(messages: Any) -> Any:
    """Return messages with ``data:`` URIs in place of the paths of their images."""
    if isinstance(messages, str) or not any(isinstance(message.get("content"), list) for message in messages):
        return messages
    try:
        return place_images(messages, None, data_uri, "a message")
    except ValueError as error:  # missing or changed
        raise RemoteRewardError(f"an image cannot be sent: {error}") from error


class RemoteScorer:
    """Reward from a service that accepts JSON by POST, one score per trajectory.

    A request holds lists of up to ``batch_size`` values, under the names in ``fields``. The reply holds as many numbers
    (null abstains), under the name in ``scores_field``:

    .. code-block:: text

        {"prompts": ["1+1?", "2+2?"], "completions": ["2", "5"]}  ->  {"rewards": [1.0, 0.0]}

    If a request fails for good, the call raises and cancels its other requests. ``concurrency`` limits the requests of
    one call, and also the number of calls in flight. The object holds no connections, so it can be pickled and called
    by several threads and event loops.

    Args:
        url: address of the service.
        fields: name in the request -> source of the values. ``"prompts"`` and ``"completions"`` are texts or messages,
            as in the environment, and ``"prompts+completions"`` joins them. ``"final_text"`` is that of the last
            assistant message. Other sources are ``"completion_ids"``, ``"truncated"`` and dataset columns. Default:
            prompts and completions. Images are sent as ``data:`` URIs.
        scores_field: path of the scores in the reply, with dots between the names of nested objects. None means that
            the reply is the list.
        batch_size: maximum number of rows per request.
        timeout: seconds per attempt.
        total_timeout: seconds per request, with all attempts.
        retries: maximum number of attempts after the first, for connection errors, time-outs, replies that are not
            JSON, 408, 425, 429 and 5xx.
        backoff: seconds before the second attempt, doubled for each later one.
        concurrency: maximum number of requests in flight.
        headers: headers of each request. They are pickled, so they must not hold secrets.
        api_key_env: environment variable with a key, sent as ``Authorization: Bearer`` and read at each call. None
            sends no key.
        max_bytes: maximum size of a reply.
        name: name in logs.

    Raises:
        ValueError: if a setting is out of range, or ``fields`` is empty.

    Example:
        >>> scorer = RemoteScorer(  # a server for OpenRLHF's remote_rm_url
        ...     "http://localhost:5000/get_reward",
        ...     fields={"query": "prompts+completions", "prompts": "prompts", "labels": "answer"},
        ... )
    """

    def __init__(
        self,
        url: str,
        *,
        fields: Mapping[str, str] | None = None,
        scores_field: str | None = "rewards",
        batch_size: int = 64,
        timeout: float = 60.0,
        total_timeout: float = 300.0,
        retries: int = 4,
        backoff: float = 0.5,
        concurrency: int = 8,
        headers: Mapping[str, str] | None = None,
        api_key_env: str | None = None,
        max_bytes: int = 1 << 24,
        name: str = "remote",
    ):
        self.fields = {"prompts": "prompts", "completions": "completions"} if fields is None else dict(fields)
        if not self.fields:
            raise ValueError("fields={} must not be empty; map names in the request to 'prompts', 'completions', ...")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1 row per request")
        self.scores_field, self.batch_size, self.__name__ = scores_field, batch_size, name
        self.concurrency = concurrency  # also the number of calls in flight
        self.endpoint = JsonEndpoint(
            url, timeout, total_timeout, retries, backoff, concurrency, dict(headers or {}), api_key_env, max_bytes
        )

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return ``B`` scores, None where the service abstains.

        Raises:
            RemoteRewardError: if a request fails after all attempts, or with a status that is not retried.
            MalformedScoresError: if a reply does not hold one number or null per row.
        """
        available = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        payload = {field: self._values(source, available) for field, source in self.fields.items()}
        async with self.endpoint.session() as session:
            starts = range(0, len(completions), self.batch_size)
            parts = await gather_all(self._score_rows(session, payload, start, len(completions)) for start in starts)
        return [score for part in parts for score in part]

    def _values(self, source: str, available: Mapping[str, Any]) -> Sequence[Any]:
        if source == _JOINED:
            rows = zip(available["prompts"], available["completions"], strict=True)
            return [p + c if isinstance(p, str) else with_data([*p, *c]) for p, c in rows]
        if source == _FINAL:
            return [final_text(completion) for completion in available["completions"]]
        values = take_columns(self.__name__, [source], available)[0]
        return [with_data(value) for value in values] if source in ("prompts", "completions") else values

    async def _score_rows(
        self, session: JsonSession, payload: Mapping[str, Any], start: int, total: int
    ) -> list[float | None]:
        stop = min(start + self.batch_size, total)
        reply = await session.post({field: list(values[start:stop]) for field, values in payload.items()})
        scores = self._find_scores(reply, session)
        if not isinstance(scores, list) or not all(
            s is None or (isinstance(s, Real) and not isinstance(s, bool)) for s in scores
        ):
            got = session.redact.line(json.dumps(scores))[:_MAX_EXCERPT]
            raise MalformedScoresError(f"{session.name} must reply with numbers or nulls, got {got}")
        if len(scores) != stop - start:
            raise MalformedScoresError(f"{session.name} returned {len(scores)} scores for {stop - start} rows")
        return scores

    def _find_scores(self, reply: Any, session: JsonSession) -> Any:
        value = reply
        for part in self.scores_field.split(".") if self.scores_field is not None else ():
            if not isinstance(value, dict) or part not in value:
                got = session.redact.line(json.dumps(reply))[:_MAX_EXCERPT]
                raise MalformedScoresError(
                    f"{session.name}: no {self.scores_field!r} in the reply {got}; set scores_field"
                )
            value = value[part]
        return value

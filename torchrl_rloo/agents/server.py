"""EndpointServer: HTTP faces of the sessions of a process, for clients of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from aiohttp import web

from torchrl_rloo.agents import chat_format, messages_format, responses_format
from torchrl_rloo.agents.agents import MODEL
from torchrl_rloo.agents.chat_format import FormatError
from torchrl_rloo.agents.guard import Exchanges, Gate, default_max_connections, error_body, foreign_host
from torchrl_rloo.agents.session import AgentSession, Ask, RefusedCallError, Reply
from torchrl_rloo.engines.base import EngineDeadError
from torchrl_rloo.runtime.event_loop import EventLoop
from torchrl_rloo.runtime.http import ReplyError, strict_json

_LOGGER = logging.getLogger(__name__)
Sampling = Callable[[Callable[[], Awaitable[list[Reply]]]], Awaitable[list[Reply]]]
_HOST = "127.0.0.1"
_MAX_BODY = 16 * 2**20  # bytes of a request
_MAX_WAITING = 64  # calls of a session at a time; others are answered with status 429
_READ_TIMEOUT_S = 30.0  # time within which the head of a request must arrive, and then its body
_START_TIMEOUT_S = 30.0
_ALIVE_PERIOD_S = 15.0  # time between two comments of a stream that waits for its reply
_CLOSE_TIMEOUT_S = 0.2  # time for the calls in flight when the server closes; then they are cancelled


_CODES = {"key": "invalid_api_key", "request": "invalid_request", "size": "too_large"}  # others are the reason


class RequestTimeoutError(Exception):
    """Body of a request that does not arrive in time."""


class EndpointServer:
    """HTTP server of any number of sessions, on a thread of this process.

    A key of 256 random bits names the session of a call: as bearer token, as ``x-api-key``, or in the path
    ``/k/KEY/v1/...``. A role follows the key after a dot, or is the model. Other keys are refused. Paths are
    ``/v1/chat/completions``, ``/v1/responses``, ``/v1/messages`` and ``/v1/models``.
    """

    def __init__(self, counts: Counter[str]):
        self.counts, self.max_waiting = counts, _MAX_WAITING
        self.gate = Gate(counts, default_max_connections(), _READ_TIMEOUT_S)
        self.port = 0  # a free one, once it listens
        self._sessions: dict[str, dict[str, tuple[AgentSession, Exchanges]]] = {}
        self._calls: Counter[str] = Counter()
        self._loop: EventLoop | None = None
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Address of the server, without a path."""
        return f"http://{_HOST}:{self.port}"

    def start(self) -> EndpointServer:
        """Listen, if it does not yet."""
        if self._loop is None:
            self._loop = EventLoop("endpoint")
            try:
                self._loop.run(asyncio.wait_for(self._listen(), _START_TIMEOUT_S))
            except BaseException:
                self.close()
                raise
        return self

    async def _listen(self) -> None:
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._guard()])
        for path, answer in {
            "/v1/chat/completions": self._chat,
            "/v1/responses": self._responses,
            "/v1/messages": self._messages,
        }.items():
            for prefix in ("", "/k/{key}"):
                app.router.add_post(prefix + path, self._with_session(answer))
        for prefix in ("", "/k/{key}"):
            app.router.add_get(prefix + "/v1/models", self._with_session(self._models))
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_TIMEOUT_S)
        await self._runner.setup()
        loop, factory = asyncio.get_running_loop(), self.gate.connections(self._runner.server)
        self._listener = await loop.create_server(factory, _HOST, 0, backlog=1024)
        self.port = self._listener.sockets[0].getsockname()[1]

    def add(self, sessions: Mapping[str, AgentSession]) -> str:
        """Add the sessions of a conversation by role, and return its key; without roles the only name is ``""``."""
        key = secrets.token_urlsafe(32)
        self._sessions[key] = {role: (session, Exchanges()) for role, session in sessions.items()}
        return key

    def remove(self, key: str) -> None:
        """Forget a conversation; its key is refused from now on."""
        self._sessions.pop(key, None)
        self._calls.pop(key, None)

    def close(self) -> None:
        """Stop listening. Calls in flight are cancelled."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            loop.run(self._end())
        finally:
            loop.close()

    async def _end(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # Requests

    def _guard(self) -> Any:
        """Return a middleware that refuses foreign hosts and unknown paths, and answers errors in one line."""

        @web.middleware
        async def guard(request: web.Request, handler: Callable[..., Awaitable[Any]]) -> web.StreamResponse:
            request.protocol.begin()
            self.counts["endpoint/requests"] += 1
            try:
                if (reason := foreign_host(request)) is not None:
                    return self._refuse(request, "host", 403, reason)
                return await handler(request)
            except (FormatError, ReplyError, UnicodeError) as error:
                return self._refuse(request, "request", 400, str(error))
            except web.HTTPRequestEntityTooLarge:
                return self._refuse(request, "size", 413, f"a request must have at most {_MAX_BODY} bytes")
            except RequestTimeoutError:
                return self._refuse(request, "slow", 408, f"no body within {self.gate.read_timeout:g} s")
            except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
                return self._refuse(
                    request, "path", error.status, f"{request.method} {request.path[:100]}: no such path"
                )
            except RefusedCallError as error:
                return _error(request, 400, str(error), error.code)
            except EngineDeadError as error:
                return _error(request, 503, str(error), "engine_dead")
            except asyncio.CancelledError:
                self.counts["endpoint/disconnected"] += 1
                raise
            except ConnectionError:  # during the body; the answer is not sent
                self.counts["endpoint/disconnected"] += 1
                return _error(request, 400, "the connection was lost", "disconnected")
            except web.HTTPException:
                raise
            except Exception as error:
                _LOGGER.warning("a call of an agent failed", exc_info=error)
                return _error(request, 500, f"{type(error).__name__}: {error}"[:1000], "policy_failed")
            finally:
                request.protocol.end()

        return guard

    def _refuse(self, request: web.Request, reason: str, status: int, message: str) -> web.Response:
        self.counts[f"endpoint/refused/{reason}"] += 1
        return _error(request, status, " ".join(message.split()), _CODES.get(reason, reason))

    def _with_session(self, answer: Callable[..., Awaitable[web.StreamResponse]]) -> Callable[..., Any]:
        """Return a handler that finds the session of a request, and limits its calls."""

        async def handle(request: web.Request) -> web.StreamResponse:
            key, _, role = _key(request).partition(".")
            sessions = self._sessions.get(key)
            if sessions is None or (role and role not in sessions):
                message = "the key is unknown, or its session has ended; use the key of a session that runs"
                return self._refuse(request, "key", 401, message)
            request.protocol.admit()
            if self._calls[key] >= self.max_waiting:
                return self._refuse(request, "busy", 429, f"{self.max_waiting} calls of this session are in flight")
            self._calls[key] += 1
            exchange = None
            try:
                if request.method != "POST":
                    return await answer(request)
                body, repeated = await self._read(request)
                asked = self._parse(body)
                session, exchanges = sessions[role if role in sessions else _role(asked, sessions)]
                digest, exchange = await exchanges.find(request.path, body, *repeated)
                if request.transport is None:
                    raise ConnectionResetError
                replies = partial(exchanges.replies, digest, exchange, repeated[0], request.transport)
                self.counts["endpoint/retried"] += exchange is not None
                return await answer(request, session, asked, replies)
            finally:
                if exchange is not None:
                    exchange.sending -= 1
                self._calls[key] -= 1
                if self._calls[key] <= 0:
                    del self._calls[key]

        return handle

    async def _read(self, request: web.Request) -> tuple[bytes, tuple[str | None, str | None]]:
        """Return the body of a request, and what it says of being repeated."""
        if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
            raise FormatError(f"Content-Encoding={encoding[:50]!r} must be identity; send the body uncompressed")
        try:
            body = await asyncio.wait_for(request.read(), self.gate.read_timeout)
        except TimeoutError:
            raise RequestTimeoutError from None
        headers = request.headers
        return body, (headers.get("Idempotency-Key"), headers.get("X-Stainless-Retry-Count"))

    def _parse(self, data: bytes) -> dict[str, Any]:
        body = strict_json(data)
        if not isinstance(body, dict):
            raise FormatError(f"the request must be a JSON object, got {type(body).__name__}")
        if any(body.get(name) is not None for name in chat_format.SAMPLING):
            self.counts["endpoint/ignored_sampling"] += 1
        return body

    async def _chat(
        self, request: web.Request, session: AgentSession, body: dict[str, Any], replies: Sampling
    ) -> web.StreamResponse:
        ask, choices = _read_request(chat_format, body)
        named = {"model": _model(body), "number": secrets.token_hex(12), "tokenizer": session.env.tokenizer}
        named["log_probs"] = bool(body.get("logprobs"))
        found = replies(partial(_sample, session, ask, choices))
        if not body.get("stream"):
            found = await found
            return await _deliver(request, found, named["number"], chat_format.response(found, **named))
        options = body.get("stream_options") or {}
        with_usage = isinstance(options, dict) and bool(options.get("include_usage"))

        def events(replies: list[Reply]) -> Iterable[str]:
            for chunk in chat_format.chunks(replies, with_usage=with_usage, **named):
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"

        return await _stream(request, found, named["number"], events)

    async def _responses(
        self, request: web.Request, session: AgentSession, body: dict[str, Any], replies: Sampling
    ) -> web.StreamResponse:
        return await _answer_one(request, session, body, replies, responses_format)

    async def _messages(
        self, request: web.Request, session: AgentSession, body: dict[str, Any], replies: Sampling
    ) -> web.StreamResponse:
        return await _answer_one(request, session, body, replies, messages_format)

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "torchrl_rloo"}
        return web.json_response({"object": "list", "data": [model]})


def _key(request: web.Request) -> str:
    bearer = request.headers.get("Authorization", "")
    bearer = bearer[len("Bearer ") :].strip() if bearer.startswith("Bearer ") else ""
    return request.match_info.get("key") or bearer or request.headers.get("x-api-key", "")


def _read_request(form: ModuleType, body: dict[str, Any]) -> Any:
    """Return what a request asks for in a format."""
    try:
        return form.read_request(body)
    except FormatError:
        raise
    except Exception as error:  # values of any type in any place
        raise FormatError(f"the request is not of the format: {type(error).__name__}: {error}"[:1000]) from error


def _role(body: dict[str, Any], roles: Collection[str]) -> str:
    """Return the role that a request names as its model."""
    if not isinstance(name := body.get("model"), str) or name not in roles:
        raise FormatError(f"model={name!r:.100} must be one of the roles {list(roles)}")
    return name


def _model(body: dict[str, Any]) -> str:
    return body["model"] if isinstance(body.get("model"), str) else MODEL


async def _sample(session: AgentSession, ask: Ask, choices: int = 1) -> list[Reply]:
    """Return a session's replies, sampled on the session's loop. Cancelling it cancels the requests."""
    calls = [
        asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session.reply(ask), session.loop)) for _ in range(choices)
    ]
    try:
        return list(await asyncio.gather(*calls))
    finally:
        for call in calls:  # the other choices of one that failed
            call.cancel()


async def _answer_one(
    request: web.Request, session: AgentSession, body: dict[str, Any], replies: Sampling, form: ModuleType
) -> web.StreamResponse:
    """Answer a request of a format with one reply."""
    named = {"model": _model(body), "number": secrets.token_hex(12)}
    found = replies(partial(_sample, session, _read_request(form, body)))
    if not body.get("stream"):
        found = await found
        return await _deliver(request, found, named["number"], form.response(found[0], **named))
    return await _stream(request, found, named["number"], lambda found: form.events(found[0], **named))


async def _deliver(request: web.Request, replies: list[Reply], number: str, value: Any) -> web.Response:
    """Send a response, and note whether the agent received it."""
    response = web.json_response(value)
    with _noting_delivery(request, replies, number):
        await response.prepare(request)
        await response.write_eof()
    return response


async def _stream(
    request: web.Request,
    sampling: Awaitable[list[Reply]],
    number: str,
    events: Callable[[list[Reply]], Iterable[str]],
) -> web.StreamResponse:
    """Send a stream of events once the replies are there, and comments before."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    replies = asyncio.ensure_future(sampling)
    try:
        done, _ = await asyncio.wait({replies}, timeout=_ALIVE_PERIOD_S)
        if done:
            replies.result()  # an error before the first byte has its own status
        await response.prepare(request)
        while not (await asyncio.wait({replies}, timeout=_ALIVE_PERIOD_S))[0]:
            await response.write(b": waiting\n\n")
    except BaseException:
        replies.cancel()
        raise
    try:
        found = replies.result()
    except Exception as error:
        body = json.dumps(error_body(request.path, str(error), "failed"))
        await response.write(f"event: error\ndata: {body}\n\n".encode())
        await response.write_eof()
        return response
    with _noting_delivery(request, found, number):
        # In one piece: a client that closes after the last event has then read everything
        await response.write_eof("".join(events(found)).encode())
    return response


class _noting_delivery:  # noqa: N801  a context manager
    """Mark replies as delivered, unless sending them fails. An agent may end before the sender runs again."""

    def __init__(self, request: web.Request, replies: list[Reply], number: str):
        self._request, self._replies = request, replies
        for i, reply in enumerate(replies):
            reply.call.names.add(number if len(replies) == 1 else f"{number}:{i}")

    def __enter__(self) -> None:
        for reply in self._replies:
            reply.call.deliveries += 1

    def __exit__(self, error_type: type | None, *_: Any) -> None:
        if error_type is None:
            self._request.protocol.sent(self._replies)
            return
        for reply in self._replies:
            reply.call.deliveries -= 1


def _error(request: web.Request, status: int, message: str, code: str) -> web.Response:
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    response = web.json_response(error_body(request.path, message, code), status=status, headers=headers)
    if request.protocol.is_stranger:
        response.force_close()
    return response

"""EndpointServer: HTTP faces of the sessions of a process, for clients of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web

from torchrl_rloo._http import ReplyError, strict_json
from torchrl_rloo.engines.base import EngineDeadError
from torchrl_rloo.envs.agents import chat_format, messages_format, responses_format
from torchrl_rloo.envs.agents.agents import MODEL
from torchrl_rloo.envs.agents.chat_format import FormatError
from torchrl_rloo.envs.agents.session import AgentSession, Ask, RefusedCallError, Reply
from torchrl_rloo.envs.event_loop import EventLoop

_LOGGER = logging.getLogger(__name__)
_START_TIMEOUT_S = 30.0
_ALIVE_PERIOD_S = 15.0  # time between two comments of a stream that waits for its reply


class EndpointServer:
    """HTTP server of any number of sessions, on a thread of this process.

    A key of 256 random bits names the session of a call: as bearer token, as ``x-api-key``, or in the path
    ``/k/KEY/v1/...``. Other keys are refused. Paths are ``/v1/chat/completions``, ``/v1/responses``, ``/v1/messages``
    and ``/v1/models``.

    Args:
        host: address to listen on. Others than those of this machine let other machines call.
        port: port to listen on; 0 takes a free one.
        max_body: maximum bytes of a request.
        max_waiting: maximum number of calls of a session at a time; others are answered with status 429.
        counts: counter to use; None makes one.

    Attributes:
        counts: ``"endpoint/requests"``; of these, ``"endpoint/foreign_keys"``, ``"endpoint/bad_requests"``,
            ``"endpoint/busy"``, ``"endpoint/disconnected"`` before the reply, and
            ``"endpoint/ignored_sampling"``, whose sampling parameters are not the policy's.

    Raises:
        OSError: at :meth:`start`, if the address cannot be used.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body: int = 16 * 2**20,
        max_waiting: int = 64,
        counts: Counter[str] | None = None,
    ):
        if max_body < 1 or max_waiting < 1:
            raise ValueError(f"max_body={max_body} and max_waiting={max_waiting} must be at least 1")
        self.host, self.port, self.max_body, self.max_waiting = host, port, max_body, max_waiting
        self.counts: Counter[str] = Counter() if counts is None else counts
        self._sessions: dict[str, AgentSession] = {}
        self._calls: Counter[str] = Counter()
        self._loop: EventLoop | None = None
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Address of the server, without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

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
        app = web.Application(client_max_size=self.max_body)
        for path, answer in {
            "/v1/chat/completions": self._chat,
            "/v1/responses": self._responses,
            "/v1/messages": self._messages,
        }.items():
            for prefix in ("", "/k/{key}"):
                app.router.add_post(prefix + path, self._guarded(answer))
        for prefix in ("", "/k/{key}"):
            app.router.add_get(prefix + "/v1/models", self._guarded(self._models))
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def add(self, session: AgentSession) -> str:
        """Add a session, and return its key."""
        key = secrets.token_urlsafe(32)
        self._sessions[key] = session
        return key

    def remove(self, key: str) -> None:
        """Forget a session; its key is refused from now on."""
        self._sessions.pop(key, None)
        self._calls.pop(key, None)

    def close(self) -> None:
        """Stop listening. Calls in flight are cancelled."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            if self._runner is not None:
                loop.run(self._runner.cleanup())
        finally:
            loop.close()

    # Requests

    def _guarded(self, answer: Callable[..., Awaitable[web.StreamResponse]]) -> Callable[..., Any]:
        """Return a handler that finds the session of a request, and answers errors in the client's format."""

        async def handle(request: web.Request) -> web.StreamResponse:
            self.counts["endpoint/requests"] += 1
            key = _key(request)
            session = self._sessions.get(key)
            if session is None:
                self.counts["endpoint/foreign_keys"] += 1
                return _error(request, 401, "the key is unknown; use the key of a session that runs", "invalid_api_key")
            if self._calls[key] >= self.max_waiting:
                self.counts["endpoint/busy"] += 1
                return _error(request, 429, f"{self.max_waiting} calls of this session are in flight", "busy")
            self._calls[key] += 1
            try:
                body = await self._read(request) if request.method == "POST" else {}
                return await answer(request, session, body)
            except (FormatError, ReplyError) as error:
                self.counts["endpoint/bad_requests"] += 1
                return _error(request, 400, str(error), "invalid_request")
            except web.HTTPRequestEntityTooLarge:
                self.counts["endpoint/bad_requests"] += 1
                return _error(request, 413, f"a request must have at most {self.max_body} bytes", "too_large")
            except RefusedCallError as error:
                return _error(request, 400, str(error), error.code)
            except EngineDeadError as error:
                return _error(request, 503, str(error), "engine_dead")
            except asyncio.CancelledError:
                self.counts["endpoint/disconnected"] += 1
                raise
            except web.HTTPException:
                raise
            except Exception as error:
                _LOGGER.warning("a call of an agent failed", exc_info=error)
                return _error(request, 500, f"{type(error).__name__}: {error}"[:1000], "policy_failed")
            finally:
                self._calls[key] -= 1
                if self._calls[key] <= 0:
                    del self._calls[key]

        return handle

    async def _read(self, request: web.Request) -> dict[str, Any]:
        body = strict_json(await request.read())
        if not isinstance(body, dict):
            raise FormatError(f"the request must be a JSON object, got {type(body).__name__}")
        if any(body.get(name) is not None for name in chat_format.SAMPLING):
            self.counts["endpoint/ignored_sampling"] += 1
        return body

    async def _chat(self, request: web.Request, session: AgentSession, body: dict[str, Any]) -> web.StreamResponse:
        ask, choices = chat_format.read_request(body)
        named = {"model": _model(body), "number": secrets.token_hex(12), "tokenizer": session.env.tokenizer}
        named["log_probs"] = bool(body.get("logprobs"))
        replies = asyncio.gather(*(_sample(session, ask) for _ in range(choices)))
        if not body.get("stream"):
            replies = await replies
            return await _deliver(replies, _json(request, chat_format.response(replies, **named)))
        options = body.get("stream_options") or {}
        with_usage = isinstance(options, dict) and bool(options.get("include_usage"))

        def events(replies: list[Reply]) -> Iterable[str]:
            for chunk in chat_format.chunks(replies, with_usage=with_usage, **named):
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"

        return await _stream(request, replies, events)

    async def _responses(self, request: web.Request, session: AgentSession, body: dict[str, Any]) -> web.StreamResponse:
        ask = responses_format.read_request(body)
        named = {"model": _model(body), "number": secrets.token_hex(12)}
        replies = asyncio.gather(_sample(session, ask))
        if not body.get("stream"):
            replies = await replies
            return await _deliver(replies, _json(request, responses_format.response(replies[0], **named)))
        return await _stream(request, replies, lambda found: responses_format.events(found[0], **named))

    async def _messages(self, request: web.Request, session: AgentSession, body: dict[str, Any]) -> web.StreamResponse:
        ask = messages_format.read_request(body)
        named = {"model": _model(body), "number": secrets.token_hex(12)}
        replies = asyncio.gather(_sample(session, ask))
        if not body.get("stream"):
            replies = await replies
            return await _deliver(replies, _json(request, messages_format.response(replies[0], **named)))
        return await _stream(request, replies, lambda found: messages_format.events(found[0], **named))

    async def _models(self, request: web.Request, session: AgentSession, body: dict[str, Any]) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "torchrl_rloo"}
        return web.json_response({"object": "list", "data": [model]})


def _key(request: web.Request) -> str:
    bearer = request.headers.get("Authorization", "")
    bearer = bearer[len("Bearer ") :].strip() if bearer.startswith("Bearer ") else ""
    return request.match_info.get("key") or bearer or request.headers.get("x-api-key", "")


def _model(body: dict[str, Any]) -> str:
    return body["model"] if isinstance(body.get("model"), str) else MODEL


async def _sample(session: AgentSession, ask: Ask) -> Reply:
    """Return a session's reply, sampled on the session's loop. Cancelling it cancels the request."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session.reply(ask), session.loop))


def _json(request: web.Request, value: Any) -> tuple[web.Request, web.Response]:
    return request, web.json_response(value)


async def _deliver(replies: list[Reply], answer: tuple[web.Request, web.Response]) -> web.Response:
    """Send a response, and note whether the agent received it."""
    request, response = answer
    with _noting_delivery(replies):
        await response.prepare(request)
        await response.write_eof()
    return response


async def _stream(
    request: web.Request, replies: asyncio.Future[list[Reply]], events: Callable[[list[Reply]], Iterable[str]]
) -> web.StreamResponse:
    """Send a stream of events once the replies are there, and comments before."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
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
        await response.write(
            f"event: error\ndata: {json.dumps(_error_body(request, str(error), 'failed'))}\n\n".encode()
        )
        await response.write_eof()
        return response
    with _noting_delivery(found):
        await response.write("".join(events(found)).encode())
        await response.write_eof()
    return response


class _noting_delivery:  # noqa: N801  a context manager
    """Mark replies as delivered, unless sending them fails. An agent may end before the sender runs again."""

    def __init__(self, replies: list[Reply]):
        self._replies = replies

    def __enter__(self) -> None:
        self._mark(True)

    def __exit__(self, error_type: type | None, *_: Any) -> None:
        if error_type is not None:
            self._mark(False)

    def _mark(self, delivered: bool) -> None:
        for reply in self._replies:
            reply.call.delivered = delivered


def _error(request: web.Request, status: int, message: str, code: str) -> web.Response:
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return web.json_response(_error_body(request, message, code), status=status, headers=headers)


def _error_body(request: web.Request, message: str, code: str) -> dict[str, Any]:
    if request.path.endswith("/messages"):
        return {"type": "error", "error": {"type": code, "message": message}}
    return {"error": {"message": message, "type": code, "code": code, "param": None}}

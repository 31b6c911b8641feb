from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

Answer = Callable[[int, web.Request, Any], Awaitable[Any]]


class Service:
    """HTTP server in a thread. ``answer(n, request, body)`` returns the reply to request ``n``, counted from 1.

    Attributes:
        bodies: JSON of the requests so far, in the order of their arrival.
        headers: headers of these requests.
        most: maximum number of requests in flight.
    """

    def __init__(self, answer: Answer):
        self.answer, self.bodies, self.headers, self.most, self._now = answer, [], [], 0, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        self.url = f"http://127.0.0.1:{port}"

    async def _start(self) -> int:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.method == "POST" else None
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            reply = await self.answer(len(self.bodies), request, body)
        finally:
            self._now -= 1
        return reply if isinstance(reply, web.StreamResponse) else web.json_response(reply)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def serve():
    """Function ``serve(answer)`` that starts a :class:`Service`; all are closed after the test."""
    services: list[Service] = []

    def start(answer: Answer) -> Service:
        services.append(Service(answer))
        return services[-1]

    yield start
    for service in services:
        service.close()

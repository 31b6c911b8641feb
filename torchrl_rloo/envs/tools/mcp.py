"""Tools of a Model Context Protocol (MCP) server. Requires the extra ``tools``."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import math
import os
import re
import shutil
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from threading import Event
from time import monotonic
from typing import Any

from torchrl_rloo.envs.tools import mcp_relay
from torchrl_rloo.envs.tools.mcp_relay import MAX_LINE_BYTES
from torchrl_rloo.envs.tools.tool import Tool, ToolError
from torchrl_rloo.runtime import event_loop
from torchrl_rloo.runtime.http import Redactor
from torchrl_rloo.runtime.processes import reaped_command


def format_result(result: Any) -> str | list[Any]:
    """Return the SDK's ``CallToolResult`` as what the policy is shown: text, or a list of texts and images."""
    parts = [_part(content) for content in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    if all(isinstance(part, str) for part in parts) or result.is_error:
        return "\n".join(part if isinstance(part, str) else "[image]" for part in parts) or "(nothing)"
    return parts


def _part(content: Any) -> str | dict[str, str]:
    if content.type == "text":
        return content.text
    if content.type == "image":
        return {"type": "image", "url": f"data:{content.mime_type.replace(',', '')};base64,{content.data}"}
    if content.type == "audio":
        return f"[audio: {content.mime_type}, {len(content.data) * 3 // 4} bytes]"
    if content.type == "resource_link":
        return f"[link: {content.name}, {content.uri}]"
    resource = content.resource
    if hasattr(resource, "text"):
        return resource.text
    return f"[file: {resource.uri}, {resource.mime_type}, {len(resource.blob) * 3 // 4} bytes]"


_LOGGERS = ("mcp", "client", "httpx2", "httpcore2")  # of the SDK and its HTTP client, and below


class HTTPTransport:
    """Function that opens the SDK's transport to an endpoint."""

    def __init__(self, url: str, headers: Mapping[str, str]):
        self._url, self._headers = url, dict(headers)
        self.redact = Redactor(url, self._headers)
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.redact(url)!r} must start with http:// or https://")

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Any]:
        """Open the transport."""
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        settings = {
            "headers": {**self._headers, "Accept-Encoding": "identity"},
            "timeout": httpx2.Timeout(30.0, read=300.0),  # for silent streams; each call has a separate limit
            "event_hooks": {"response": [_limit]},
        }
        with _redacted_logs(self.redact):
            async with (
                httpx2.AsyncClient(**settings) as client,
                streamable_http_client(self._url, http_client=client, max_sse_event_size=MAX_LINE_BYTES) as streams,
            ):
                yield streams


async def _limit(response: Any) -> None:
    """Limit the body of a reply. The SDK limits each event of a stream, which may have no end."""
    response.headers.pop("Content-Encoding", None)  # never unpack: the request names no encoding
    if not response.headers.get("Content-Type", "").lower().startswith("text/event-stream"):
        response.stream = _limited(response.stream)


def _limited(stream: Any) -> Any:
    import httpx2

    class Limited(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for chunk in stream:
                size += len(chunk)
                if size > MAX_LINE_BYTES:
                    raise httpx2.StreamError(f"the reply has more than the limit of {MAX_LINE_BYTES} bytes; send less")
                yield chunk

        async def aclose(self) -> None:
            await stream.aclose()

    return Limited()


@contextmanager
def _redacted_logs(redact: Redactor) -> Iterator[None]:
    """Mask secrets in the records of the SDK, which quote replies and URLs."""

    def clean(record: logging.LogRecord) -> bool:
        error = record.exc_info and record.exc_info[1]
        text = f"{record.getMessage()}: {type(error).__name__}: {error}" if error else record.getMessage()
        record.msg, record.args, record.exc_info, record.exc_text = redact.line(text), None, None, None
        return True

    known = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _LOGGERS]
    loggers = [logging.getLogger(name) for name in known]
    for logger in loggers:
        logger.addFilter(clean)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(clean)


def open_stdio(
    command: str, args: Sequence[str], env: Mapping[str, str] | None, cwd: str | os.PathLike | None
) -> AbstractAsyncContextManager[Any]:
    """Return the SDK's transport to a program behind :mod:`torchrl_rloo.envs.tools.mcp_relay`, below a reaper."""
    from mcp.client.stdio import StdioServerParameters, stdio_client

    # Find the program as its process would: its directory and its PATH count
    place = os.path.join(cwd or "", command) if os.sep in command else command
    if (found := shutil.which(place, path=(env or {}).get("PATH"))) is None:
        raise FileNotFoundError(f"command={command!r} is no program; correct the path")
    relay = [sys.executable, "-I", "-S", mcp_relay.__file__, str(mcp_relay.MAX_LINE_BYTES), os.path.abspath(found)]
    program, *words = reaped_command([*relay, *args])
    options = {"env": None if env is None else dict(env), "cwd": cwd and os.fspath(cwd)}
    server = StdioServerParameters(command=program, args=words, **options)
    return stdio_client(server, errlog=sys.__stderr__ or sys.stderr)


_LOGGER = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 10.0  # the SDK itself kills a process that does not end within 4 s
_MAX_ERROR = 20_000  # characters of an error
_MAX_PAGES, _MAX_TOOLS = 100, 1000  # of a server's list of tools, which might be endless

Transport = Callable[[], AbstractAsyncContextManager[Any]]


class ConnectionLostError(ToolError):
    """Error of a server that could not be reached, or whose connection was lost during a call."""


class MCPTools(Sequence[Tool]):
    """Sequence of the tools of an MCP server, to combine with others: ``[*MCPTools.stdio("my-server"), calculator]``.

    Names, descriptions and schemas are the server's; other characters of a name become ``_``. The result of a call is
    the server's texts, joined by line breaks, and its images; audio and links are described. Errors, timeouts and lost
    connections become texts for the policy.

    The next call reconnects to a server that was lost. Without ``per_trajectory``, a lost call is repeated once if the
    server declares the tool read-only or idempotent. Others are not repeated: they may have had their effect.

    All trajectories share one connection, over which any number of calls run concurrently. ``per_trajectory=True`` is
    for servers with state: each trajectory has a separate session from its first call to its end, and its calls run
    one at a time. Over stdio a session is a process; over HTTP the server must support sessions.

    Args:
        transport: function that opens a transport such as :func:`mcp.client.stdio.stdio_client`; see :meth:`stdio` and
            :meth:`http`. An attribute ``redact`` of it, if any, masks secrets in errors.
        timeout: limit of a call, in seconds.
        connect_timeout: limit of connecting, in seconds, with the start of the server's process.
        per_trajectory: True for a separate session in each trajectory.
        prefix: prefix of the tools' names, for servers whose tools share names.
        sessions: True to use the handshake of those protocol versions that have sessions over HTTP.

    Raises:
        ConnectionLostError: if the server cannot be reached.
        ValueError: if a limit is not above 0, or the server has more than 1000 tools, or one with an invalid name or
            schema.
        ImportError: if ``mcp`` is not installed.

    Example:
        >>> import sys
        >>> server = '''
        ... from mcp.server import MCPServer
        ... sums = MCPServer("sums")
        ... @sums.tool()
        ... def add(a: int, b: int) -> int:
        ...     "Adds two numbers."
        ...     return a + b
        ... sums.run()
        ... '''
        >>> with MCPTools.stdio(sys.executable, ["-c", server]) as tools:
        ...     print([(tool.name, tool.description) for tool in tools])
        ...     print(event_loop.run(event_loop.call(tools[0].call, None, a=2, b=3)))
        [('add', 'Adds two numbers.')]
        5
    """

    def __init__(
        self,
        transport: Transport,
        *,
        timeout: float = 20.0,
        connect_timeout: float = 30.0,
        per_trajectory: bool = False,
        prefix: str = "",
        sessions: bool = False,
    ):
        for name, value in (("timeout", timeout), ("connect_timeout", connect_timeout)):
            if not value > 0:
                raise ValueError(f"{name}={value} must be above 0")
        _import_mcp()
        self.timeout, self.connect_timeout, self.closed = timeout, connect_timeout, False
        self._transport, self._mode = transport, "legacy" if sessions else "auto"
        self._connections: set[_Connection] = set()
        self._shared: _Connection | None = None
        weakref.finalize(self, _leave, self._connections).atexit = False
        _OPEN.add(self)
        tool_class = _SessionTool if per_trajectory else _SharedTool
        # List the tools now, because their schemas are part of the prompts
        try:
            specs = event_loop.run(event_loop.call(self._list))
            self._tools: list[Tool] = [tool_class(self, spec, prefix) for spec in specs]
        except BaseException:
            self.close()
            raise
        # Close the connection that listed them: each conversation opens its own
        if per_trajectory:
            _leave(self._connections)

    @classmethod
    def stdio(
        cls,
        command: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike | None = None,
        **settings: Any,
    ) -> MCPTools:
        """Start a server as a process and connect to it; its process tree ends with :meth:`close` or this process.

        A line of its output, such as a result, has at most 8 MiB; a longer one ends the server, which counts as lost.
        Lines that are no JSON objects are dropped.
        """
        _import_mcp()

        return cls(lambda: open_stdio(command, args, env, cwd), **settings)

    @classmethod
    def http(cls, url: str, *, headers: Mapping[str, str] | None = None, **settings: Any) -> MCPTools:
        """Connect to a server over streamable HTTP.

        A reply, or an event of a stream, has at most 8 MiB; a larger one fails the call. Errors and logs show neither
        the values of ``headers`` nor the secrets of ``url``; results are not searched for them.
        """
        _import_mcp()
        per_trajectory = settings.get("per_trajectory", False)
        return cls(HTTPTransport(url, headers or {}), **{"sessions": per_trajectory, **settings})

    def __getitem__(self, index):
        return self._tools[index]

    def __len__(self) -> int:
        return len(self._tools)

    def __enter__(self) -> MCPTools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all sessions and their processes, and refuse later calls."""
        self.closed = True
        deadline = monotonic() + _CLOSE_TIMEOUT_S
        connections = list(self._connections)
        _leave(connections)
        ended = [connection.left.wait(max(0.0, deadline - monotonic())) for connection in connections]
        if not all(ended):
            _LOGGER.warning(
                "%d of %d MCP sessions did not end within %g s", ended.count(False), len(ended), _CLOSE_TIMEOUT_S
            )

    def _connect(self) -> _Connection:
        """Start to connect, on the loop of user code."""
        if self.closed:
            raise ToolError("the tool's server was closed")
        return _Connection(self._transport, self._mode, self.connect_timeout, self._connections)

    async def _list(self) -> list[Any]:
        self._shared = self._connect()
        client, specs, cursor = await self._shared.client(), [], None
        for _ in range(_MAX_PAGES):
            page = await self._shared.page(client.list_tools(cursor=cursor), self.connect_timeout)
            specs += page.tools
            if (cursor := page.next_cursor) is None:
                break
        if cursor is not None or len(specs) > _MAX_TOOLS:
            raise ValueError(f"the server lists more than {_MAX_TOOLS} tools or {_MAX_PAGES} pages; use another server")
        return specs

    def _shared_connection(self) -> _Connection:
        if not self._shared.usable:
            self._shared.leave()
            self._shared = self._connect()
        return self._shared


_OPEN: weakref.WeakSet[MCPTools] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close servers at exit, because some would outlive this process."""
    for tools in list(_OPEN):
        tools.close()


class _MCPTool(Tool):
    """Tool of a server."""

    def __init__(self, server: MCPTools, spec: Any, prefix: str):
        name = prefix + re.sub(r"[^A-Za-z0-9_.-]", "_", spec.name)
        super().__init__(name, spec.description or spec.title or "", spec.input_schema, timeout=None)
        self.server, self._server_name = server, spec.name
        hints = spec.annotations
        self._is_repeatable = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)


class _SharedTool(_MCPTool):
    async def call(self, state: None, /, **arguments: Any) -> str | list[Any]:
        try:
            return await self.server._shared_connection().call(self._server_name, arguments, self.server.timeout)
        except ConnectionLostError:
            if not self._is_repeatable:
                raise
        return await self.server._shared_connection().call(self._server_name, arguments, self.server.timeout)


class _SessionTool(_MCPTool):
    def __init__(self, server: MCPTools, spec: Any, prefix: str):
        super().__init__(server, spec, prefix)
        self.state_key = server  # all tools of the server share one session

    async def open(self, columns: Mapping[str, Any]) -> _Session:
        session = _Session(self.server._connect())
        await session.connection.client()
        return session

    async def call(self, state: _Session, /, **arguments: Any) -> str | list[Any]:
        if not state.connection.usable:
            state.connection.leave()
            state.connection = self.server._connect()
        try:
            return await state.connection.call(self._server_name, arguments, self.server.timeout)
        except ConnectionLostError as error:
            raise ConnectionLostError(f"{error}; its state of this conversation is lost") from error

    async def close(self, state: _Session) -> None:
        await state.connection.close()


@dataclass
class _Session:
    connection: _Connection  # replaced after the server was lost


class _Connection:
    """Client of the SDK, entered and left by one task of the current loop, as the SDK's task groups require."""

    def __init__(self, transport: Transport, mode: str, seconds: float, connections: set[_Connection]):
        self.loop, self.owner = asyncio.get_running_loop(), os.getpid()
        self.lost, self.left = False, Event()
        self._redact = getattr(transport, "redact", str)
        self._leaving, self._client = asyncio.Event(), self.loop.create_future()
        self._connections = connections
        connections.add(self)
        self._task = self.loop.create_task(self._hold(transport, mode, seconds))

    @property
    def usable(self) -> bool:
        """True if the running loop is this connection's and the server is not known to be lost."""
        return not self.lost and asyncio.get_running_loop() is self.loop

    async def _hold(self, transport: Transport, mode: str, seconds: float) -> None:
        import anyio
        from mcp import Client

        failure: BaseException | None = None
        try:
            # Limit the time to connect and to close, but not the time in between
            with anyio.move_on_after(seconds) as limit:
                async with Client(transport(), mode=mode, cache=None) as client:
                    limit.deadline = math.inf
                    self._client.set_result(client)
                    await self._leaving.wait()
                    limit.deadline = anyio.current_time() + _CLOSE_TIMEOUT_S
            if limit.cancelled_caught:
                failure = TimeoutError(f"no answer within {seconds:g} s")
        except BaseException as error:  # includes exception groups and cancellation: the task ends here anyway
            failure = error
        finally:
            # Tell callers that still wait why there is no client
            self.lost = True
            self._connections.discard(self)
            if not self._client.done():
                reason = f"the tool's server cannot be reached: {self._reason(failure)}"
                self._client.set_exception(ConnectionLostError(reason))
                self._client.exception()  # mark it as retrieved: there may be no waiter left
            elif failure is not None:
                _LOGGER.warning("the connection to an MCP server ended: %s", self._reason(failure))
            self.left.set()

    async def client(self) -> Any:
        """Wait for the connection and return the SDK's client; raise ConnectionLostError if connecting fails."""
        return await asyncio.shield(self._client)

    async def call(self, name: str, arguments: dict[str, Any], seconds: float) -> str | list[Any]:
        """Call a tool of the server and return its result; errors carry a message for the policy."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, REQUEST_TIMEOUT

        client = await self.client()
        try:
            result = await client.call_tool(name, arguments, read_timeout_seconds=seconds)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                raise TimeoutError(f"the server did not answer within {seconds:g} s") from None
            if error.code in (CONNECTION_CLOSED, INVALID_REQUEST):  # a server that forgot the session sends the latter
                self.lost = True
                self.leave()
                reason = self._redacted(f"the tool's server was lost during the call ({error})")
                raise ConnectionLostError(reason) from None
            raise ToolError(self._redacted(str(error))) from None
        except Exception as error:  # such as a result of another shape
            raise ToolError(self._reason(error)) from None
        # A tool that fails says so in its result
        shown = format_result(result)
        if result.is_error:
            raise ToolError(self._redacted(shown))
        return shown

    async def page(self, request: Any, seconds: float) -> Any:
        """Wait for a page of a server's tools."""
        try:
            return await asyncio.wait_for(request, seconds)
        except Exception as error:
            reason = " ".join(self._reason(error).split())
            raise ConnectionLostError(f"the tool's server did not list its tools: {reason:.500}") from None

    def _reason(self, error: BaseException | None) -> str:
        """Describe the innermost error of nested exception groups."""
        while getattr(error, "exceptions", None):
            error = error.exceptions[0]
        if error is None:
            return "it was closed before it was connected"
        return self._redacted(f"{type(error).__name__}: {error}")

    def _redacted(self, text: str) -> str:
        return self._redact(text[:_MAX_ERROR])

    def leave(self) -> None:
        """Ask the connection to end, from any thread."""
        if self.owner == os.getpid():  # a forked process must not end its parent's connection
            self.loop.call_soon_threadsafe(self._leaving.set)
        else:
            self.left.set()

    async def close(self) -> None:
        self.leave()
        if asyncio.get_running_loop() is self.loop:
            await asyncio.wait({self._task}, timeout=_CLOSE_TIMEOUT_S)


def _leave(connections: Iterable[_Connection]) -> None:
    for connection in list(connections):
        connection.leave()


def _import_mcp() -> None:
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ImportError("mcp is not installed: pip install 'torchrl_rloo[tools]'") from error

"""Tool calls of one trajectory, with the trajectory's state of each tool."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from torchrl_rloo.envs.tools.parsers import MalformedCall, ToolCall, ToolResult
from torchrl_rloo.envs.tools.tool import Tool, ToolError, ToolHostError, ToolRegistry, fit_arguments
from torchrl_rloo.images.parts import content_text
from torchrl_rloo.images.shown import has_images, result_content
from torchrl_rloo.images.store import ImageStore, is_picture
from torchrl_rloo.runtime import event_loop
from torchrl_rloo.runtime.call_pool import CallLimit
from torchrl_rloo.runtime.lookup import is_async

_LOGGER = logging.getLogger(__name__)


def _default(value: Any) -> str:
    if is_picture(value):
        raise TypeError("an image within a result cannot be shown; return the image, or a list of texts and images")
    return str(value)


_JSON = json.JSONEncoder(ensure_ascii=False, default=_default)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolSession:
    """Session that makes the calls of one trajectory and opens a tool's state at the first call that needs it.

    It may be used on any event loop, and closed on another one. Errors of a call become texts for the policy. A call
    that is cancelled or exceeds its limit is abandoned, and its tool's state is closed, so that no later call uses it.
    ``timeout`` limits a call, the opening of a state and its closing; a tool's shorter limit applies. The time in which
    a call waits for a thread or for ``limits``, which sessions share, does not count. Images of results go to
    ``store``; None is for models that read text only.
    """

    def __init__(
        self,
        tools: ToolRegistry,
        columns: Mapping[str, Any],
        *,
        timeout: float = 30.0,
        max_chars: int = 10_000,
        limits: Mapping[str, CallLimit] | None = None,
        store: ImageStore | None = None,
    ):
        self.store = store
        self.tools, self.columns, self.timeout, self.max_chars = tools, columns, timeout, max_chars
        self.limits = dict(limits or {})
        self._states: dict[Hashable, _State] = {}
        self._closing: set[Future[None]] = set()
        # Not asyncio's locks, which belong to one event loop; both are first come, first served
        self._order_locks: defaultdict[Hashable, CallLimit] = defaultdict(partial(CallLimit, 1))
        self.closed = False

    async def call(self, call: ToolCall | MalformedCall, *, deadline: float = float("inf")) -> ToolResult:
        """Make one call."""
        if isinstance(call, MalformedCall):
            return ToolResult("", self._error(f"the call could not be read: {call.error}"), "malformed")
        if call.name not in self.tools:
            name = call.name if _NAME.fullmatch(call.name) else ""
            return ToolResult(name, self._error(self.tools.unknown_message(call.name)), "unknown")
        tool = self.tools[call.name]
        try:
            arguments = fit_arguments(call.arguments, tool.parameters, untyped=call.untyped)
        except (ValueError, RecursionError) as error:
            return ToolResult(tool.name, self._error(str(error)), "invalid")
        if not tool.sequential:
            return await self._make(tool, arguments, deadline)
        async with self._order_locks[tool.state_key]:
            return await self._make(tool, arguments, deadline)

    async def open_state(self, tool: Tool) -> Any:
        """Return the trajectory's state of a tool, opened if no call has done that."""
        async with self._order_locks[tool.state_key]:
            outcome = await self._state(tool, self.timeout, float("inf"))
        if not outcome.ok:
            raise RuntimeError(f"the state of tool {tool.name} could not be opened: {outcome.value}")
        return outcome.value

    async def _make(self, tool: Tool, arguments: dict[str, Any], deadline: float) -> ToolResult:
        limit = self.timeout if tool.timeout is None else min(self.timeout, tool.timeout)
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return ToolResult(tool.name, self._error(f"there was no time left for {tool.name}"), "timed_out")
        # Open the state of the tool if necessary, then call it
        try:
            outcome = await self._state(tool, limit, deadline)
            if outcome.ok:
                outcome = await self._call(tool, outcome.value, arguments, limit, deadline)
        except (TimeoutError, asyncio.TimeoutError):
            lost = " and its state is lost" if tool.sequential and tool.state_key not in self._states else ""
            message = f"{tool.name} took longer than {min(limit, remaining):.3g} s{lost}"
            return ToolResult(tool.name, self._error(message), "timed_out")
        if outcome.host_error is not None:
            raise outcome.host_error
        if outcome.ok:
            parts = outcome.value if isinstance(outcome.value, list) else None
            return ToolResult(tool.name, content_text(outcome.value), "ok", parts)
        return ToolResult(tool.name, self._error(outcome.value), "timed_out" if outcome.timed_out else "failed")

    async def _call(self, tool: Tool, state: Any, arguments: dict[str, Any], limit: float, deadline: float) -> _Outcome:
        work = _guard(tool, tool.call, (state,), arguments, self._content)
        held, remaining = self._states.get(tool.state_key), max(0.0, deadline - time.monotonic())
        calling = event_loop.call(work, timeout=min(limit, remaining), limit=self.limits.get(tool.name))
        try:
            # The caller's deadline also ends a call that waits for its start
            return await (calling if remaining == float("inf") else asyncio.wait_for(calling, remaining))
        except (TimeoutError, asyncio.TimeoutError, asyncio.CancelledError):
            if self._states.get(tool.state_key) is held:  # a concurrent call may have dropped it already
                self._drop(tool.state_key)
            raise

    def _content(self, value: Any) -> Any:
        """Return a result as text, or as parts if it has images."""
        shown = has_images(value)
        return result_content(value, _text, self.max_chars, self.store) if shown else _text(value, self.max_chars)

    async def _state(self, tool: Tool, limit: float, deadline: float) -> _Outcome:
        if not _has_state(tool):
            return _Outcome(True, None)
        if self.closed:
            raise RuntimeError(f"the session is closed: {tool.name} cannot be called")
        if tool.state_key not in self._states:
            columns = copy.deepcopy(self.columns)  # rewards and other trajectories read the same values
            self._states[tool.state_key] = _State(tool, event_loop.begin(_guard(tool, tool.open, (columns,))))
        held = self._states[tool.state_key]
        # Wait for at most the limit from the start of the function, or from now if it has started before
        opening, limit = asyncio.wrap_future(held.opening.future), limit + held.opening.elapsed()
        while not opening.done():
            remaining = min(deadline - time.monotonic(), event_loop.remaining_time(held.opening, limit))
            if remaining <= 0:
                raise TimeoutError
            await asyncio.wait({opening}, timeout=remaining)
        if not opening.result().ok and self._states.get(tool.state_key) is held:
            del self._states[tool.state_key]
        return opening.result()

    def _drop(self, state_key: Hashable) -> None:
        """Close a state in the background."""
        state = self._states.pop(state_key, None)
        if state is not None:
            closing = asyncio.run_coroutine_threadsafe(
                self._close(state.tool, state.opening.future), asyncio.get_running_loop()
            )  # its future may be awaited on any loop
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close(self, tool: Tool, opening: Future[_Outcome]) -> None:
        await asyncio.wait({asyncio.wrap_future(opening)})
        if opening.cancelled() or not opening.result().ok:
            return
        state = opening.result()
        try:
            outcome = await event_loop.call(_guard(tool, tool.close, (state.value,)), timeout=self.timeout)
        except TimeoutError:
            _LOGGER.warning("closing the state of tool %s took longer than %g s", tool.name, self.timeout)
        else:
            if not outcome.ok:
                _LOGGER.warning("closing the state of tool %s failed: %s", tool.name, outcome.value)

    async def close(self) -> None:
        """Close each state exactly once, and stop waiting after ``timeout`` seconds."""
        self.closed = True
        for state_key in list(self._states):
            self._drop(state_key)
        if self._closing:
            await asyncio.wait(set(map(asyncio.wrap_future, set(self._closing))), timeout=self.timeout)

    def _error(self, message: str) -> str:
        return _text(f"Error: {message}", self.max_chars)


class _State(NamedTuple):
    """State of a trajectory, with the tool that opened it."""

    tool: Tool
    opening: event_loop.Running  # continues if its waiter is cancelled


class _Outcome(NamedTuple):
    """Result of a tool's method, or the message of the error that it raised."""

    ok: bool
    value: Any
    timed_out: bool = False
    host_error: ToolHostError | None = None


def _has_state(tool: Tool) -> bool:
    return type(tool).open is not Tool.open


def _guard(
    tool: Tool,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    arguments: Mapping[str, Any] | None = None,
    convert: Callable[[Any], Any] = lambda value: value,
) -> Callable[[], Any]:
    """Wrap a call of a tool's method and the conversion of its result, so that it raises nothing.

    It also catches ``SystemExit``, which would end the loop.
    """
    arguments = arguments or {}
    if is_async(method):

        async def work() -> _Outcome:
            try:
                return _Outcome(True, convert(await method(*args, **arguments)))
            except BaseException as error:
                return _failed(method, error)

    else:

        def work() -> _Outcome:
            try:
                return _Outcome(True, convert(method(*args, **arguments)))
            except BaseException as error:
                return _failed(method, error)

    work.__qualname__ = f"tool {tool.name}"  # for messages
    return work


def _failed(method: Callable[..., Any], error: BaseException) -> _Outcome:
    try:
        message = str.__str__(str(error))  # a subclass might format itself in any way
    except BaseException as another:
        message = f"(its message raised {type(another).__name__})"
    if not isinstance(error, ToolError):
        _LOGGER.debug("%s raised", method, exc_info=error)
        message = f"{type(error).__name__}: {message}"
    timed_out = isinstance(error, (TimeoutError, asyncio.TimeoutError))
    return _Outcome(False, message, timed_out, error if isinstance(error, ToolHostError) else None)


def _text(value: Any, max_chars: int) -> str:
    """Return a result as text for the policy, cut to the limit, with characters that every tokenizer can encode."""
    text, ended = (str.__str__(value), True) if isinstance(value, str) else _json(value, max_chars)
    if len(text) > max_chars:
        more = len(text) - max_chars if ended else "all"
        text = f"{text[:max_chars]}\n[{more} more characters are left out]"
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")


def _json(value: Any, max_chars: int) -> tuple[str, bool]:
    """Return the beginning of a value's JSON, longer than the limit unless it ends before, and whether it ends."""
    pieces, length = [], 0
    for piece in _JSON.iterencode(value):  # piece by piece: a value may be huge, or not end
        pieces.append(piece)
        length += len(piece)
        if length > max_chars:
            return "".join(pieces), False
    return "".join(pieces), True

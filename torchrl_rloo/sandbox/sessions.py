"""Python sessions: sandboxed processes that run calls one after another and keep their variables.

The sandbox is that of :mod:`torchrl_rloo.sandbox.sandbox`, see the table there. A session has no network, processes,
signals or tracing, reads no files but the standard library's, and has limited memory. It cannot write files at all.
The following applies in addition:

=============================  =========================================================================================
A session tries                Protection
=============================  =========================================================================================
endless loops, sleeping        Another process enforces limits on the time and CPU time of a call.
work between calls             The session is stopped then, with its threads and timers.
huge output                    The kernel limits a call to 1 MB, of which head and tail are shown.
reading other sessions         Sessions fork from a process that saw no call; none may open ``/proc`` or trace.
false answers                  They end the session; with the call's token they only falsify the session's own result.
too many sessions              The longest idle session is ended.
=============================  =========================================================================================
"""

from __future__ import annotations

import itertools
import json
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_rloo.sandbox.sandbox import Starter, check_limits

_LOGGER = logging.getLogger(__name__)

_SERVER = Path(__file__).with_name("python_keeper")
_MAX_OUTPUT_BYTES = 1 << 20  # that a call may print before it is stopped
_MAX_CODE_BYTES = 1 << 16
GRACE_S = 30.0  # seconds that the keeper may take in addition to a call's timeout
_LOST = {"reason": "lost", "ended": True}


@dataclass(frozen=True)
class SessionResult:
    """Result of a call.

    Attributes:
        reason: ``"ok"``; ``"error"`` (the code raised); ``"memory"``, ``"output"``, ``"timed_out"``, ``"cpu"`` or
            ``"threads"`` (it exceeded that limit); ``"killed"`` (the process ended in another way); ``"too_long"`` (the
            code was not run); ``"closed"`` (the session was closed); ``"unavailable"`` (the system could not start a
            process); ``"lost"`` (all sessions were closed or killed).
        output: printed output and the value of the code's last expression; a note replaces the middle of long output.
        error: report of the exception.
        ended: True if the session's process has ended. Its variables are lost, and the next call starts another.
        restarted: True if the process ended after the previous call, so that earlier variables were lost.
    """

    reason: str
    output: str = ""
    error: str = ""
    ended: bool = False
    restarted: bool = False


class PythonSessions:
    """Pool of sandboxed Python processes, one for each session; the module's docstring describes the sandbox.

    A keeper process watches them, and a zygote process forks them. Both start with this object and end with it or with
    this process. A pickled copy and a forked process start their own.

    Args:
        timeout: limit of a call, in seconds.
        cpu_seconds: limit of a call in CPU seconds, summed over its threads. None is ``timeout``, rounded up.
        memory: limit of a session's address space in bytes, of which Python takes about 30 MB.
        max_output: bytes of a call's output that are shown.
        max_sessions: limit of processes at a time; an idle one takes about 2 MB. Beyond it, the longest idle process
            ends; if none is idle, calls wait.
        allow_weaker: True to also run where the kernel lacks a layer of the sandbox; see
            :class:`~torchrl_rloo.sandbox.sandbox.Sandbox`.

    Attributes:
        missing: one line for each layer that the system lacks; empty unless ``allow_weaker``.

    Raises:
        ValueError: if a limit is not positive, ``memory`` is below 64 MB, or ``max_output`` above 1 MB.
        SandboxUnavailableError: if a layer is missing and ``allow_weaker`` is False, or the system is not Linux.

    Example:
        >>> session = PythonSessions().open()
        >>> session.run("x = 41").reason, session.run("x + 1").output
        ('ok', '42\\n')
    """

    def __init__(
        self,
        *,
        timeout: float = 10.0,
        cpu_seconds: int | None = None,
        memory: int = 256 << 20,
        max_output: int = 5_000,
        max_sessions: int = 1024,
        allow_weaker: bool = False,
    ):
        self.cpu_seconds = check_limits(timeout, cpu_seconds, memory, max_output)
        if max_output > _MAX_OUTPUT_BYTES:
            raise ValueError(f"max_output={max_output} must be at most {_MAX_OUTPUT_BYTES} bytes")
        if max_sessions < 1:
            raise ValueError(f"max_sessions={max_sessions} must be at least 1")
        self.timeout, self.memory, self.max_output, self.max_sessions = timeout, memory, max_output, max_sessions
        self.allow_weaker = allow_weaker
        self.__setstate__({})
        self.missing: list[str] = self._running().starter.missing

    def open(self) -> PythonSession:
        """Open a session; its process starts at the first call."""
        return PythonSession(self, next(self._ids))

    def close(self) -> None:
        """End all sessions and the processes that serve them; a later call starts them again."""
        with self._lock:
            keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.starter.close()

    def _running(self) -> _Keeper:
        with self._lock:
            if self._keeper is None or not self._keeper.alive:
                limits = {"cpu_seconds": None, "memory": self.memory, "max_output": _MAX_OUTPUT_BYTES}
                names = ("timeout", "cpu_seconds", "max_output", "max_sessions", "allow_weaker")
                settings = {name: getattr(self, name) for name in names}
                self._keeper = _Keeper(settings | {"limits": limits, "serve": str(_SERVER)})
            return self._keeper

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_keeper", "_lock", "_ids")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._keeper: _Keeper | None = None
        self._lock, self._ids = threading.Lock(), itertools.count()


class PythonSession:
    """Session of one trajectory with its variables, made by :meth:`PythonSessions.open`."""

    def __init__(self, sessions: PythonSessions, number: int):
        self._sessions, self._number = sessions, number
        self._has_state = self._closed = False  # has state: an earlier call may have left variables

    def run(self, code: str) -> SessionResult:
        """Run code and wait for its result; see :meth:`submit`."""
        return self.submit(code).result()

    def submit(self, code: str) -> Future[SessionResult]:
        """Queue code after the session's earlier calls; its future always gets a result.

        Args:
            code: source code, run in the session's namespace.

        Raises:
            SandboxUnavailableError: if the keeper process has ended and another cannot start.
        """
        done: Future[SessionResult] = Future()
        done.set_running_or_notify_cancel()
        text = code.encode(errors="replace")
        if self._closed or len(text) > _MAX_CODE_BYTES:
            done.set_result(SessionResult("closed" if self._closed else "too_long"))
            return done

        def finish(reply: dict[str, Any]) -> None:
            restarted = reply.pop("new", False) and self._has_state
            self._has_state = not reply["ended"]
            done.set_result(SessionResult(**reply, restarted=restarted))

        self._sessions._running().send({"session": self._number, "code": text.decode()}, finish)
        return done

    def close(self) -> None:
        """End the session and its running call."""
        keeper = self._sessions._keeper
        if not self._closed and keeper is not None and keeper.alive:
            keeper.send({"session": self._number})
        self._closed = True


class _Keeper:
    """Handle of the keeper process (``python_keeper.py``) and of the calls that it has not answered."""

    def __init__(self, settings: dict[str, Any]):
        self.starter = Starter(settings)
        patience = struct.pack("ll", int(GRACE_S), 0)
        self.starter.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        self._calls, self._sending, self._ids = _Calls(), threading.Lock(), itertools.count()
        # The thread must not refer to this object, or it would keep it alive
        listener = self.starter.channel.dup(), self.starter.end, self._calls, settings["timeout"] + GRACE_S
        threading.Thread(target=_listen, args=listener, daemon=True, name="python sessions").start()

    @property
    def alive(self) -> bool:
        return self.starter.is_usable() and not self._calls.over

    def send(self, request: dict[str, Any], finish: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Send a request; another thread calls ``finish`` once with its answer."""
        if finish is not None:
            request["call"] = next(self._ids)
            if not self._calls.add(request["call"], finish):
                return
        try:
            with self._sending:
                self.starter.channel.sendall(json.dumps(request).encode() + b"\n")
        except OSError:  # the process ended or hangs; the listener then answers its calls
            self.starter.end()


class _Calls:
    """Calls in flight, with the functions that receive their answers."""

    def __init__(self) -> None:
        self.over = False
        self.since = 0.0  # time of the last answer, or of the first call after a pause
        self._waiting: dict[int, Callable[[dict[str, Any]], None]] = {}
        self._lock = threading.Lock()

    def add(self, number: int, finish: Callable[[dict[str, Any]], None]) -> bool:
        with self._lock:
            if not self._waiting:
                self.since = time.monotonic()
            if not self.over:
                self._waiting[number] = finish
                return True
        finish(_LOST.copy())
        return False

    def answer(self, reply: dict[str, Any]) -> None:
        with self._lock:
            self.since = time.monotonic()
            finish = self._waiting.pop(reply.pop("call"))
        finish(reply)

    def overdue(self, patience: float) -> bool:
        with self._lock:
            return bool(self._waiting) and time.monotonic() > self.since + patience

    def end(self) -> None:
        with self._lock:
            self.over, waiting = True, list(self._waiting.values())
            self._waiting.clear()
        for finish in waiting:
            finish(_LOST.copy())


def _listen(channel: socket.socket, end: Callable[[], object], calls: _Calls, patience: float) -> None:
    """Distribute answers until the process ends, or leaves a call unanswered for longer than ``patience`` seconds.

    Args:
        channel: socket to the process.
        end: function that kills the process.
        calls: calls in flight.
        patience: limit between two answers.
    """
    poll, text = select.poll(), b""
    poll.register(channel, select.POLLIN)
    try:
        # Wake up once a second, to notice overdue calls
        while not calls.overdue(patience):
            if not poll.poll(1000):
                continue
            if not (part := channel.recv(1 << 16)):
                break
            *lines, text = (text + part).split(b"\n")
            for line in lines:
                calls.answer(json.loads(line))
    except ConnectionError:
        _LOGGER.debug("the keeper process of Python sessions has ended", exc_info=True)
    finally:
        # No answer can arrive after this: end the calls that wait
        end()
        channel.close()
        calls.end()

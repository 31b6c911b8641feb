"""Sessions of a sandbox: Python interpreters that keep their variables, and workspaces with files and a shell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrl_rloo.runtime import processes

if TYPE_CHECKING:
    from torchrl_rloo.sandbox.sandbox import Policy, Sandbox, Starter

GRACE_S = 30.0  # seconds that a keeper may take in addition to a request's timeout
_START_SECONDS = 60.0
_EDIT_SECONDS = 10.0
_CLOSE_SECONDS = 10.0
_ROOM_SECONDS = 0.05  # between checks whether another process may start
_MAX_CODE_BYTES = 1 << 16
_READ_BYTES = 1 << 16


class WorkspaceLostError(RuntimeError):
    """Error of a workspace whose keeper process has ended or does not answer; its folder is lost."""


@dataclass(frozen=True)
class SessionResult:
    """Result of a call of Python code, or of a command of a workspace.

    Attributes:
        reason: ``"ok"`` or ``"error"`` (the code raised); of a command ``"exit"`` (it ended). ``"memory"``,
            ``"output"``, ``"timed_out"``, ``"cpu"``, ``"threads"`` or ``"processes"`` (it exceeded that limit).
            ``"killed"`` (the process ended in another way); ``"too_long"`` (the code was not run); ``"closed"`` (the
            session was closed); ``"unavailable"`` (the system could not start a process); ``"lost"`` (the session's
            keeper was killed).
        output: printed output and the value of the code's last expression; a note replaces the middle of long output.
        error: report of the exception.
        code: exit code of a command, or minus the number of the signal that ended it; None if a limit did.
        ended: True if the session's process has ended. Its variables are lost, and the next call starts another.
        images: base64 of the image files that Python code passed to ``display``; the output has ``[image]`` in their
            places.
        restarted: True if the process ended after the previous call, so that earlier variables were lost.
    """

    reason: str
    output: str = ""
    error: str = ""
    code: int | None = None
    ended: bool = False
    restarted: bool = False
    images: Sequence[str] = ()


class Link:
    """Channel to the keeper process of one session, with one request at a time; requests and replies are JSON lines."""

    def __init__(self, starter: Starter):
        self._starter, self._channel = starter, starter.connect()
        self._channel.setblocking(False)
        self._hello: dict[str, Any] | None = None
        self._in_flight = self._closed = False

    def is_usable(self) -> bool:
        """Return whether the keeper may live and belongs to this process."""
        return not self._closed and self._starter.is_usable()

    def greet(self) -> dict[str, Any]:
        """Wait for the keeper's first message, which says what is missing, and return it."""
        self._hello = self._starter.receive(_START_SECONDS, self._channel)
        return self._hello or {"missing": ["the keeper process ended"], "place": None}

    async def exchange(self, request: dict[str, Any], patience: float, files: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request and return the reply; ``ConnectionError`` without one for ``patience`` seconds."""
        self._in_flight = True
        try:
            return await asyncio.wait_for(self._exchange(json.dumps(request).encode() + b"\n", files), patience)
        except asyncio.TimeoutError:
            self.close(0.0)
            raise ConnectionError("no answer") from None
        except (OSError, asyncio.CancelledError):
            self.close()  # no later request may read this one's answer
            raise
        finally:
            self._in_flight = False
            if self._closed:
                self._channel.close()

    async def _exchange(self, request: bytes, files: Sequence[int]) -> dict[str, Any]:
        if self._hello is None:
            self._hello = await self._receive()
        if files:
            socket.send_fds(self._channel, [request[:1]], files)
            request = request[1:]
        await asyncio.get_running_loop().sock_sendall(self._channel, request)
        return await self._receive()

    async def _receive(self) -> dict[str, Any]:
        text = bytearray()
        while not text.endswith(b"\n"):
            if not (part := await asyncio.get_running_loop().sock_recv(self._channel, _READ_BYTES)):
                raise ConnectionResetError("the keeper process has ended")
            text += part
        return json.loads(text)

    def close(self, patience: float = _CLOSE_SECONDS) -> None:
        """End the keeper and its processes. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        # A keeper ends when this end is shut; then its own end closes, which also wakes a request of another thread
        if self._starter.is_usable():
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_WR)
            if not self._is_ended(patience):
                processes.kill_tree(self._hello["pid"]) if self._hello else self._starter.end()
        if not self._in_flight:  # else the request closes it: a loop may still wait for it
            self._channel.close()

    def _is_ended(self, timeout: float) -> bool:
        """Return whether the other end closes within a time limit; drop what it still sends."""
        poll, deadline = select.poll(), time.monotonic() + timeout
        # It has ended, or the request that waited has closed this end, whose number is then -1
        with contextlib.suppress(OSError, ValueError):
            poll.register(self._channel, select.POLLIN)
            while (left := deadline - time.monotonic()) > 0:
                with contextlib.suppress(BlockingIOError):
                    if poll.poll(1000 * left) and not self._channel.recv(_READ_BYTES):
                        return True
            return False
        return True


class PythonSession:
    """Session of one conversation with its variables, made by :meth:`Sandbox.open`; its process starts at a call.

    Calls run one at a time.
    """

    def __init__(self, sandbox: Sandbox, places: Places):
        self._sandbox, self._places = sandbox, places
        self._has_state = self._closed = False  # has state: an earlier call may have left variables
        # Guarded by the lock of the places
        self.link: Link | None = None
        self.used, self.is_busy = 0.0, False

    def run(self, code: str) -> SessionResult:
        """Run code and wait for its result; see :meth:`call`."""
        return asyncio.run(self.call(code))

    async def call(self, code: str) -> SessionResult:
        """Run code in the session's namespace; ``SandboxUnavailableError`` if the starter cannot start again."""
        code = code.encode(errors="replace").decode()
        if self._closed or len(code.encode()) > _MAX_CODE_BYTES:
            return SessionResult("closed" if self._closed else "too_long")
        while not self._places.take(self):
            await asyncio.sleep(_ROOM_SECONDS)
        try:
            if self.link is None:
                self.link = Link(self._sandbox.host())
            reply = await self.link.exchange({"code": code}, self._sandbox.policy.patience)
        except OSError:
            self._has_state = False
            return SessionResult("closed" if self._closed else "lost", ended=True)
        finally:
            self.is_busy = False
        restarted, self._has_state = reply.pop("new") and self._has_state, not reply["ended"]
        return SessionResult(**reply, restarted=restarted)

    def close(self) -> None:
        """End the session and its running call."""
        self._closed = True
        if self.link is not None:
            self.link.close()


class Places:
    """Limit on the Python sessions that have processes; the longest idle one makes room for another."""

    def __init__(self, limit: int):
        self._limit, self._lock = limit, threading.Lock()
        self._sessions: weakref.WeakSet[PythonSession] = weakref.WeakSet()

    def take(self, session: PythonSession) -> bool:
        """Return whether a call of a session may start, and mark it as busy."""
        with self._lock:
            if session.link is not None and not session.link.is_usable():
                session.link = None
            if session.link is None:
                live = [other for other in self._sessions if other is not session and (other.link or other.is_busy)]
                idle = [other for other in live if not other.is_busy]
                if len(live) >= self._limit:
                    if not idle:
                        return False
                    oldest = min(idle, key=lambda other: other.used)
                    oldest.link.close()
                    oldest.link = None
                self._sessions.add(session)
            session.is_busy, session.used = True, time.monotonic()
            return True


class WorkspaceSession:
    """Folder of one conversation, made by :meth:`Sandbox.open`; close it to remove the folder and its processes.

    Requests run one at a time.

    Attributes:
        pid: id of the process that keeps the workspace.
    """

    def __init__(self, link: Link, hello: Mapping[str, Any], files: dict[str, str], policy: Policy):
        self._link, self._files, self._policy = link, files, policy
        self.pid, self._place = hello["pid"], hello["place"]  # place: of a folder that is not in memory

    def run(self, command: str, timeout: float | None = None) -> SessionResult:
        """Run a command and wait for its result; see :meth:`call`."""
        return asyncio.run(self.call(command, timeout))

    async def call(self, command: str, timeout: float | None = None) -> SessionResult:
        """Run a command of the shell (``bash``, or ``sh`` where there is none) in the folder.

        A timeout of None is the policy's. All methods raise ``WorkspaceLostError`` if the keeper has ended or hangs.
        """
        timeout = self._policy.timeout if timeout is None else timeout
        reply = await self._request("run", timeout, command=command.replace("\0", ""))
        return SessionResult(reply["reason"], reply["output"], code=reply.get("code"))

    async def edit(self, operation: str, **arguments: Any) -> tuple[bool, str]:
        """Do a file operation of ``workspace_files``; return whether it succeeded, and the text for the policy."""
        reply = await self._request(operation, _EDIT_SECONDS, arguments=arguments)
        if reply["reason"] != "exit" or reply["code"] != 0:
            return False, f"the file operation was stopped ({reply['reason']}): try a smaller file"
        result = json.loads(reply["output"])
        return result["ok"], result["text"]

    async def judge(self, tests: Mapping[str, Any], program: Mapping[str, Any], timeout: float) -> str:
        """Run tests and their program as :meth:`Sandbox.judge` does, for ``timeout`` seconds; return the output."""
        with contextlib.ExitStack() as stack:
            files = []
            for task in (tests, program):
                files.append(memory_file(json.dumps(task).encode()))
                stack.callback(os.close, files[-1])
            return (await self._request("test", timeout, files))["output"]

    async def _request(self, operation: str, timeout: float, files: Sequence[int] = (), **values: Any) -> Any:
        if self._files:
            first, self._files = self._files, {}
            written, text = await self.edit("write_all", files=first)
            if not written:
                self.close()
                raise ValueError(f"the first files of a workspace cannot be written: {text}")
        request = {"operation": operation, "timeout": timeout} | values
        try:
            return await self._link.exchange(request, timeout + GRACE_S, files)
        except OSError as error:
            self.close()
            raise WorkspaceLostError(f"the keeper process of a workspace was lost: {error}") from None

    def close(self) -> None:
        """End all processes of the folder and remove it. Later calls do nothing."""
        self._link.close()
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)

    def __enter__(self) -> WorkspaceSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def memory_file(content: bytes) -> int:
    """Return the descriptor of a new file in memory, at its beginning."""
    file = os.memfd_create("program")
    with open(file, "wb", closefd=False) as stream:
        stream.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    return file

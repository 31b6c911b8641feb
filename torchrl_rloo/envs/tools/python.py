"""Python interpreter for the policy: one sandboxed process per trajectory, which keeps its variables between calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from torchrl_rloo.envs.tools.tool import Tool, ToolError, ToolTimeoutError
from torchrl_rloo.sandbox.sessions import GRACE_S, PythonSession, PythonSessions, SessionResult

_MESSAGES = {
    "error": "The code raised an exception:",
    "timed_out": "The code ran for longer than {timeout:g} s and was stopped.",
    "cpu": "The code took more than {cpu_seconds} s of CPU time and was stopped.",
    "memory": "The code exceeded the memory limit of {megabytes} MB.",
    "output": "The code printed more than 1 MB and was stopped.",
    "threads": "The code started too many threads and was stopped.",
    "killed": "The interpreter's process ended while the code ran.",
    "closed": "The session is closed.",
    "unavailable": "No interpreter could be started for the code.",
    "lost": "The interpreter was killed from outside.",
    "too_long": "The code is longer than 64 kB and was not run.",
}


class PythonInterpreter(Tool):
    """Tool ``python``, which runs code in a sandboxed process of the trajectory.

    The policy reads what its code printed and the value of the code's last expression. An exception or an exceeded
    limit makes the call fail with a text that says what happened and whether variables are lost.

    Args:
        timeout: limit of a call, in seconds.
        **limits: limits of :class:`~torchrl_rloo.sandbox.sessions.PythonSessions`.

    Attributes:
        sessions: sessions that run the code; close them to end all processes at once.

    Raises:
        ValueError: if a limit is not positive, or ``memory`` is below 64 MB.
        SandboxUnavailableError: if the system lacks a layer of the sandbox, unless ``allow_weaker``.

    Example:
        >>> python = PythonInterpreter(timeout=5)
        >>> python.name, python.parameters["required"]
        ('python', ['code'])
    """

    def __init__(self, *, timeout: float = 10.0, **limits: Any):
        self.sessions = PythonSessions(timeout=timeout, **limits)
        code = {"type": "string", "description": "Python source code."}
        super().__init__(
            "python",
            "Runs Python code and returns what it prints and the value of its last expression. Variables persist "
            "between calls. The standard library is available; network and file access are not.",
            {"type": "object", "properties": {"code": code}, "required": ["code"]},
            timeout=timeout + GRACE_S,
        )

    async def open(self, columns: Mapping[str, Any]) -> PythonSession:
        """Open a session; its process starts at the first call."""
        return self.sessions.open()

    async def call(self, state: PythonSession, /, code: str) -> str:
        """Run code in the trajectory's session and return what the policy reads.

        Raises:
            ToolError: if the code raised, exceeded a limit or was not run; a timeout is also a ``TimeoutError``.
        """
        result = await asyncio.wrap_future(state.submit(code))
        text = self._text(result)
        if result.reason == "ok":
            return text
        raise ToolTimeoutError(text) if result.reason in ("timed_out", "cpu") else ToolError(text)

    async def close(self, state: PythonSession) -> None:
        """End the session's process."""
        state.close()

    def _text(self, result: SessionResult) -> str:
        """Return what the policy reads."""
        sessions = self.sessions
        limits = {name: getattr(sessions, name) for name in ("timeout", "cpu_seconds")}
        limits["megabytes"] = sessions.memory >> 20
        output = result.output.rstrip("\n")
        if output and result.reason != "ok":
            output = f"Before that it had printed:\n{output}"
        parts = [
            _MESSAGES.get(result.reason, "").format(**limits),
            result.error,
            output,
            "The interpreter was restarted before this call: earlier variables are lost." * result.restarted,
            "All variables are lost." * result.ended,
        ]
        return "\n".join(part for part in parts if part) or "(no output)"

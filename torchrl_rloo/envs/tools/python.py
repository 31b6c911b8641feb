"""Python interpreter for the policy: one sandboxed process per trajectory, which keeps its variables between calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchrl_rloo.envs.tools.tool import Tool, ToolError, ToolHostError, ToolTimeoutError
from torchrl_rloo.rewards.remote import RemoteRewardError
from torchrl_rloo.rewards.remote_sandbox import RemoteSandbox, make_sandbox
from torchrl_rloo.runtime.lookup import import_room

if TYPE_CHECKING:
    from torchrl_rloo.sandbox import PythonSession, SessionResult

_CODE = {"type": "string", "description": "Python source code."}
_PARAMETERS = {"type": "object", "properties": {"code": _CODE}, "required": ["code"]}
_MAX_OUTPUT_BYTES = 1 << 20  # that a call may print before it is stopped
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
    limit makes the call fail with a text that says what happened and whether variables are lost. ``display(data)``
    shows the bytes of an image file, which count as output; images of a failed call are left out.

    Args:
        timeout: limit of a call, in seconds.
        cpu_seconds: limit of a call in CPU seconds, summed over its threads. None is ``timeout``, rounded up.
        memory: limit of a session's address space in bytes, of which Python takes about 30 MB.
        max_output: bytes of a call's output that are shown. A call that prints more than 1 MB is stopped.
        max_sessions: limit of processes at a time; an idle one takes about 4 MB. Beyond it, the longest idle process
            ends; if none is idle, calls wait.
        images: True to tell the policy about ``display``.
        allow_weaker: True to also run where the kernel lacks a layer of the sandbox.

    Attributes:
        sandbox: :class:`~torchrl_rloo.sandbox.Sandbox` that runs the code; close it to end all processes at once.

    Raises:
        ValueError: if a limit is not positive, ``memory`` is below 64 MB, or ``max_output`` above 1 MB.
        SandboxUnavailableError: if the system lacks a layer of the sandbox, unless ``allow_weaker``.

    Example:
        >>> python = PythonInterpreter(timeout=5)
        >>> python.name, python.parameters["required"]
        ('python', ['code'])
    """

    def __init__(
        self,
        *,
        timeout: float = 10.0,
        cpu_seconds: int | None = None,
        memory: int = 256 << 20,
        max_output: int = 5_000,
        max_sessions: int = 1024,
        images: bool = False,
        allow_weaker: bool = False,
    ):
        if not 1 <= max_output <= _MAX_OUTPUT_BYTES:
            raise ValueError(f"max_output={max_output} must be from 1 to {_MAX_OUTPUT_BYTES} bytes")
        if max_sessions < 1:
            raise ValueError(f"max_sessions={max_sessions} must be at least 1")
        self.sandbox = import_room("sandbox", "PythonInterpreter").Sandbox(
            timeout=timeout,
            cpu_seconds=cpu_seconds,
            memory=memory,
            max_output=_MAX_OUTPUT_BYTES,
            shown=max_output,
            sessions=max_sessions,
            allow_weaker=allow_weaker,
        )
        super().__init__(
            "python",
            "Runs Python code and returns what it prints and the value of its last expression. Variables persist "
            "between calls. The standard library is available; network and file access are not."
            + " display(data) shows the bytes of an image file."
            * images,
            _PARAMETERS,
            timeout=self.sandbox.policy.patience,
        )
        self.returns_images = images

    async def open(self, columns: Mapping[str, Any]) -> PythonSession:
        """Open a session; its process starts at the first call."""
        return self.sandbox.open()

    async def call(self, state: PythonSession, /, code: str) -> str | list[Any]:
        """Run code in the trajectory's session and return what the policy reads."""
        result = await state.call(code)
        text = self._text(result)
        if result.reason == "ok":
            images = [{"type": "image", "url": f"data:image/png;base64,{image}"} for image in result.images]
            return [text, *images] if images else text
        raise ToolTimeoutError(text) if result.reason in ("timed_out", "cpu") else ToolError(text)

    async def close(self, state: PythonSession) -> None:
        """End the session's process."""
        state.close()

    def _text(self, result: SessionResult) -> str:
        """Return what the policy reads."""
        policy = self.sandbox.policy
        limits = {"timeout": policy.timeout, "cpu_seconds": policy.cpu_limit, "megabytes": policy.memory >> 20}
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


class RemotePython(Tool):
    """Tool ``python`` that runs each call as a separate program in a remote sandbox; no variables are kept.

    A program that raises or takes too long makes the call fail, as with :class:`PythonInterpreter`. If the server
    fails, the conversation abstains. The transform's time limit must leave the server time for its attempts: a call
    that exceeds it is a time-out of the policy.

    Args:
        sandbox: :class:`~torchrl_rloo.rewards.RemoteSandbox`, its URL, or a mapping of its arguments.

    Example:
        >>> RemotePython("http://127.0.0.1:8080/run_code").name
        'python'
    """

    def __init__(self, sandbox: RemoteSandbox | str | Mapping[str, Any]):
        self.sandbox = make_sandbox(sandbox)
        text = "Runs a Python program and returns what it prints. Variables do not persist between calls."
        super().__init__("python", text, _PARAMETERS, timeout=self.sandbox.endpoint.total_timeout)

    async def call(self, state: None, /, code: str) -> str:
        """Run a program and return what the policy reads."""
        try:
            result = await self.sandbox.run_async(code)
        except RemoteRewardError as error:
            raise ToolHostError(str(error)) from error
        if result.ok:
            return result.stdout.rstrip("\n") or "(no output)"
        if result.reason == "timed_out":
            raise ToolTimeoutError(_MESSAGES["timed_out"].format(timeout=self.sandbox.policy.timeout))
        raise ToolError("\n".join(part for part in (_MESSAGES["error"], result.stderr.strip(), result.stdout) if part))

"""Workspaces: a folder for each conversation, and the sandbox in which commands work on it.

Each workspace is a small separate system, made of Linux namespaces (users, mounts, processes, network, IPC):

=============================  =========================================================================================
a command tries                protection
=============================  =========================================================================================
reading the machine            The root shows the system's programs (``/usr``, Python), read-only, and nothing else.
writing outside                Only the folder, ``/tmp`` and ``/dev/shm`` are writable. They are in memory.
network                        There is no interface. seccomp refuses sockets that no namespace holds, such as vsock.
other processes                It sees those of its workspace only, and cannot trace or change the keeper.
staying alive                  All processes, also daemons, are killed when the command ends or a limit is exceeded.
endless loops, sleeping        limit on wall-clock time
much memory                    limit on the address space of a process; on the memory of all, checked every 20 ms
many processes                 limit of the kernel, also checked every 20 ms
huge files or output           The file system has a size; a command may print 1 MB, of which head and tail are shown.
rights of root                 no capabilities, no set-user-ID programs; ids that own no file if the trainer is root
kernel interfaces              seccomp refuses mounts, namespaces, tracing, keys, BPF, io_uring, other sockets and more
=============================  =========================================================================================

Known limits: commands can read what is in the shown folders, the kernel version and the machine's load. Files in
memory count as the trainer's memory, up to ``disk`` for each conversation. The isolation relies on a kernel without
security bugs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_rloo.runtime.processes import HelperProcess
from torchrl_rloo.sandbox.namespaces import OWN
from torchrl_rloo.sandbox.sandbox import SandboxUnavailableError, check_limits

_SCRIPT = Path(__file__).with_name("workspace_keeper.py")
_START_SECONDS = 60.0
GRACE_S = 30.0  # seconds that the keeper may take in addition to a request's timeout
_EDIT_SECONDS = 10.0
_READ_BYTES = 1 << 16


class WorkspaceLostError(RuntimeError):
    """Error of a workspace whose keeper process has ended or does not answer; its folder is lost."""


@dataclass(frozen=True)
class CommandResult:
    """Result of a command.

    Attributes:
        reason: ``"exit"`` (it ended); ``"timed_out"``, ``"memory"``, ``"processes"`` or ``"output"`` (it exceeded that
            limit and was killed); ``"unavailable"`` (the system could not start it).
        code: exit code, or minus the number of the signal that ended it; None if a limit did.
        output: standard output and standard error as they were written; a note replaces the middle of long output.
    """

    reason: str
    code: int | None
    output: str


class Workspace:
    """Settings of the folders in which the tools of conversations work; the module's docstring describes the sandbox.

    :class:`~torchrl_rloo.envs.tools.ShellTool` and :class:`~torchrl_rloo.envs.tools.FileEditTool` with the same
    workspace share one folder in each conversation. It begins with the files of the conversation's row and is removed
    with the conversation.

    Args:
        files: column of the first files, a mapping of paths in the folder to texts. A row without it begins empty.
        readable: folders of the machine that commands can read in addition to the system's and Python's, at the same
            paths, such as a virtual environment. Their folders ``bin`` come first in ``PATH``.
        timeout: limit of a command in seconds.
        memory: limit in bytes on the address space of a process, and on the memory of all processes of a command.
        disk: limit in bytes on the files of a conversation.
        processes: limit of processes at a time.
        max_output: bytes of a command's output that are shown.
        allow_weaker: True to also work where the system has no namespaces. Commands then run as your user, with your
            files and network, in a temporary folder without a limit on its size. Their processes still end.

    Attributes:
        missing: one line for each protection that the system lacks; empty unless ``allow_weaker``.

    Raises:
        ValueError: if a limit is not positive, ``memory`` is below 64 MB, or a readable folder does not exist.
        SandboxUnavailableError: if the system has no namespaces and ``allow_weaker`` is False, or is not Linux.

    Example:
        >>> with Workspace().open({"hello.txt": "hello"}) as folder:
        ...     asyncio.run(folder.run("cat hello.txt; ls /home"))
        CommandResult(reason='exit', code=2, output="hellols: cannot access '/home': No such file or directory\\n")
    """

    def __init__(
        self,
        *,
        files: str = "files",
        readable: Sequence[str | os.PathLike] = (),
        timeout: float = 20.0,
        memory: int = 512 << 20,
        disk: int = 64 << 20,
        processes: int = 64,
        max_output: int = 5_000,
        allow_weaker: bool = False,
    ):
        check_limits(timeout, None, memory, max_output)
        for name, value in {"disk": disk, "processes": processes}.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.files, self.timeout, self.memory, self.disk = files, timeout, memory, disk
        self.processes, self.max_output, self.allow_weaker = processes, max_output, allow_weaker
        self.readable = [os.path.realpath(folder).rstrip("/") for folder in readable]
        if absent := [folder for folder in self.readable if not os.path.isdir(folder + "/")]:
            raise ValueError(f"readable={absent} must be folders that exist")
        if wide := [folder for folder in self.readable if any((own + "/").startswith(folder + "/") for own in OWN)]:
            raise ValueError(
                f"readable={wide} would hide a folder of the workspace ({', '.join(OWN)}): name a subfolder"
            )
        # Find out now, not in the first conversation, whether the system has what this needs
        self.missing: list[str] = []
        if not sys.platform.startswith("linux"):
            raise SandboxUnavailableError(f"platform={sys.platform}: a workspace requires Linux (namespaces, seccomp)")
        try:
            self.open().close()
        except SandboxUnavailableError as error:
            if not allow_weaker:
                raise
            self.missing = [str(error)]
            self.open().close()

    def open(self, files: Mapping[str, str] | None = None) -> WorkspaceFolder:
        """Open a folder; starts a process, which takes 0.1 to 0.2 s of CPU time.

        Args:
            files: first files, as a mapping of paths in the folder to texts.

        Raises:
            ValueError: if ``files`` has another form.
            SandboxUnavailableError: if the system lacks something.
        """
        files = {} if files is None else files
        if not isinstance(files, Mapping) or not all(isinstance(t, str) for pair in files.items() for t in pair):
            raise ValueError(f"files={files!r:.100} must be a mapping of paths to texts")
        pythons = [os.path.realpath(folder) for folder in (sys.base_prefix, sys.base_exec_prefix)]
        shown = [sys.base_prefix, *pythons]
        settings = {
            "readable": [*self.readable, *(p for p in dict.fromkeys(shown) if p != "/usr" and os.path.isdir(p))],
            "isolated": not self.missing,
            **{name: getattr(self, name) for name in ("memory", "disk", "processes", "max_output")},
        }
        return WorkspaceFolder(settings, dict(files), self.timeout)


class WorkspaceFolder:
    """Folder of one conversation, made by :meth:`Workspace.open`; close it to remove the folder and its processes.

    Its requests run one at a time.
    """

    def __init__(self, settings: dict[str, Any], files: dict[str, str], timeout: float):
        self._files, self._timeout = files, timeout
        self._place: str | None = None  # of a folder that is not in memory
        self._channel, other = socket.socketpair()
        with other:
            command = [sys.executable, "-I", "-S", "-B", str(_SCRIPT)]
            self._helper = HelperProcess(
                [*command, json.dumps(settings | {"channel": other.fileno()})],
                {"TMPDIR": os.environ.get("TMPDIR", "/tmp")},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                pass_fds=[other.fileno()],
            )
        try:
            self._channel.settimeout(_START_SECONDS)
            hello = json.loads(self._channel.makefile("rb").readline() or b'{"missing": ["the keeper ended"]}')
            self._place = hello.get("place")
            if hello["missing"]:
                raise SandboxUnavailableError(
                    f"a workspace cannot be isolated here: {'; '.join(hello['missing'])}. It requires Linux 5.14 or "
                    "later on x86-64 or aarch64, with user namespaces. Set "
                    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), raise user.max_user_namespaces, or let "
                    "the container unshare and mount. Use allow_weaker=True to run commands as your user"
                )
            self._channel.setblocking(False)
        except BaseException:
            self.close()
            raise

    async def run(self, command: str, timeout: float | None = None) -> CommandResult:
        """Run a command of the shell in the folder.

        Args:
            command: text for ``bash``, or ``sh`` where there is none.
            timeout: limit in seconds. None is the workspace's.

        Raises:
            WorkspaceLostError: if the keeper process has ended or does not answer.
        """
        timeout = self._timeout if timeout is None else timeout
        reply = await self._request("run", timeout, command=command.replace("\0", ""))
        return CommandResult(reply["reason"], reply.get("code"), reply["output"])

    async def edit(self, operation: str, **arguments: Any) -> tuple[bool, str]:
        """Do a file operation; see :mod:`torchrl_rloo.sandbox.workspace_files`.

        Args:
            operation: ``"view"``, ``"create"`` or ``"replace"``.
            **arguments: ``path``, and what else the operation takes.

        Returns:
            Whether it succeeded, and the text for the policy.

        Raises:
            WorkspaceLostError: if the keeper process has ended or does not answer.
        """
        reply = await self._request(operation, _EDIT_SECONDS, arguments=arguments)
        if reply["reason"] != "exit" or reply["code"] != 0:
            return False, f"the file operation was stopped ({reply['reason']}): try a smaller file"
        result = json.loads(reply["output"])
        return result["ok"], result["text"]

    async def judge(self, tests: Mapping[str, Any], program: Mapping[str, Any], timeout: float) -> str:
        """Run tests in one process and the program that they test in another one.

        Args:
            tests: task of :func:`torchrl_rloo.sandbox.code_judge.judge`.
            program: task of :func:`torchrl_rloo.sandbox.code_peers.serve`.
            timeout: limit in seconds.

        Returns:
            Lines of verdicts. They end where a limit ended the tests.

        Raises:
            WorkspaceLostError: if the keeper process has ended or does not answer.
        """
        with contextlib.ExitStack() as stack:
            files = []
            for task in (tests, program):
                file = os.memfd_create("task")
                stack.callback(os.close, file)
                os.write(file, json.dumps(task).encode())
                os.lseek(file, 0, os.SEEK_SET)
                files.append(file)
            reply = await self._request("test", timeout, files)
        return reply["output"]

    async def _request(self, operation: str, timeout: float, files: Sequence[int] = (), **values: Any) -> Any:
        if self._files:
            first, self._files = self._files, {}
            written, text = await self.edit("write_all", files=first)
            if not written:
                self.close()
                raise ValueError(f"the first files of a workspace cannot be written: {text}")
        request = {"operation": operation, "timeout": timeout} | values
        try:
            return await asyncio.wait_for(self._exchange(request, files), timeout + GRACE_S)
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            self.close()
            raise WorkspaceLostError(f"the keeper process of a workspace was lost: {type(error).__name__}") from None
        except asyncio.CancelledError:
            self.close()  # no later request may read this one's answer
            raise

    async def _exchange(self, request: dict[str, Any], files: Sequence[int]) -> Any:
        loop, text = asyncio.get_running_loop(), bytearray()
        if files:
            socket.send_fds(self._channel, [b" "], files)
        await loop.sock_sendall(self._channel, json.dumps(request).encode() + b"\n")
        while not text.endswith(b"\n"):
            if not (part := await loop.sock_recv(self._channel, _READ_BYTES)):
                raise ConnectionResetError
            text += part
        return json.loads(text)

    def close(self) -> None:
        """End all processes of the folder and remove it. Later calls do nothing."""
        self._channel.close()
        self._helper.end()
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)

    def __enter__(self) -> WorkspaceFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

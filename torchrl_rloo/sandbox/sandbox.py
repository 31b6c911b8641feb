"""Sandbox: its policy, the processes that start programs, and the results."""

from __future__ import annotations

import json
import math
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import zoneinfo
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchrl_rloo.runtime.processes import HelperProcess
from torchrl_rloo.sandbox.sessions import GRACE_S, Link, Places, PythonSession, WorkspaceSession, memory_file

_SCRIPT = Path(__file__).with_name("starter.py")
_START_SECONDS = 60.0
_RUN_GRACE_SECONDS = 10.0  # for the starter process, in addition to the program's time limit
_WORKSPACE_FOLDERS = ("/workspace", "/tmp", "/dev", "/proc", "/etc")  # a workspace's own, not the machine's
_SERVE = "from torchrl_rloo.sandbox import code_peers; code_peers.serve()"
_JUDGE = "from torchrl_rloo.sandbox import code_judge; code_judge.judge()"
_NEEDS_CONFINEMENT = (
    "The sandbox requires Linux 5.13 or later on x86-64 or aarch64, and a container whose filter allows both layers. "
    "Use allow_weaker=True to run programs with the remaining layers"
)
_NEEDS_NAMESPACES = (
    "A workspace requires Linux 5.14 or later on x86-64 or aarch64, with user namespaces. Set "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), raise user.max_user_namespaces, or let the container "
    "unshare and mount. Use allow_weaker=True to run commands as your user"
)


class SandboxUnavailableError(RuntimeError):
    """Error of a system that cannot isolate programs as required."""


@dataclass(frozen=True)
class Policy:
    """Rights and limits of programs. Without ``disk`` they compute and print; with it, commands also write and fork.

    No policy allows the network, nor to read what the module's docstring does not list.

    Args:
        timeout: wall-clock limit of a program, call or command in seconds.
        cpu_seconds: limit on the CPU seconds of all threads of a program or call. None means ``timeout``, rounded up.
        memory: limit in bytes on the address space of a process, and on the memory of all processes of a command.
            Python needs about 30 MB, and each thread counts with its whole stack.
        max_output: limit in bytes on what a program, call or command prints.
        shown: bytes of the output of a session's call or command that its result has; a note replaces the middle.
        sessions: limit on the processes of Python sessions. An idle one takes about 4 MB. Beyond it, the longest idle
            process ends; if none is idle, calls wait.
        disk: limit in bytes on the files of a workspace. 0 means that nothing can be written.
        processes: limit on the processes of a command at a time.
        readable: folders of the machine that commands can read in addition to the system's and Python's, at the same
            paths, such as a virtual environment. Their folders ``bin`` come first in ``PATH``.
        allow_weaker: True also runs programs if the system lacks a layer. Without namespaces, commands run as your
            user, with your files and network, in a temporary folder of any size. Their processes still end.

    Raises:
        ValueError: if a limit is not positive, or ``memory`` is below 64 MB. Also if a folder of ``readable`` does not
            exist, or would hide a folder of the workspace.

    Example:
        >>> Policy(timeout=2.5).cpu_limit
        3
    """

    timeout: float = 10.0
    cpu_seconds: int | None = None
    memory: int = 256 << 20
    max_output: int = 1 << 20
    shown: int = 5_000
    sessions: int = 1024
    disk: int = 0
    processes: int = 1
    readable: tuple[str, ...] = ()
    allow_weaker: bool = False

    def __post_init__(self) -> None:
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ValueError(f"timeout={self.timeout} must be a positive, finite number of seconds")
        if self.cpu_limit < 1 or self.max_output < 1 or self.memory < 64 << 20:
            raise ValueError(
                f"cpu_seconds={self.cpu_limit} and max_output={self.max_output} must be at least 1, "
                f"memory={self.memory} at least {64 << 20} bytes"
            )
        for name, least in {"shown": 1, "sessions": 1, "disk": 0, "processes": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if absent := [folder for folder in self.readable if not os.path.isdir(f"{folder}/")]:
            raise ValueError(f"readable={absent} must be folders that exist")
        real = [os.path.realpath(folder).rstrip("/") for folder in self.readable]
        if wide := [folder for folder in real if any(f"{own}/".startswith(f"{folder}/") for own in _WORKSPACE_FOLDERS)]:
            raise ValueError(
                f"readable={wide} would hide a folder of the workspace ({', '.join(_WORKSPACE_FOLDERS)}): "
                "name a subfolder"
            )

    @property
    def patience(self) -> float:
        """Seconds within which a session answers, unless its keeper hangs."""
        return self.timeout + GRACE_S

    @property
    def cpu_limit(self) -> int:
        """CPU seconds of a program or call."""
        return math.ceil(self.timeout) if self.cpu_seconds is None else self.cpu_seconds


@dataclass(frozen=True)
class SandboxResult:
    """Result of a program.

    Attributes:
        reason: ``exit`` if the program exited with ``exit_code``. ``timed_out``, ``cpu``, ``memory``, ``output`` or
            ``threads`` if that limit ended it (a program can fake ``memory`` and ``output``). ``killed`` for other
            signals.
        exit_code: exit code, or minus the signal number as in :mod:`subprocess`.
        stdout: standard output, up to the limit.
        stderr: last 2000 characters of standard error.
        seconds: wall-clock time.
    """

    reason: str
    exit_code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        """True if the program exited with code 0."""
        return self.reason == "exit" and self.exit_code == 0


class Sandbox:
    """Sandbox that runs untrusted programs; see :mod:`torchrl_rloo.sandbox` for its protections.

    Starter processes fork the programs: one for each concurrent thread of :meth:`run`, and one for all sessions. They
    start on demand, in a fraction of a second, are reused, and end with the sandbox or with this process. A pickle does
    not contain them, and a forked process starts new ones.

    Args:
        policy: limits of the programs. None means ``Policy()``.
        **limits: fields of the policy to change.

    Attributes:
        policy: limits of the programs.
        missing: one line per layer that this system lacks; empty unless ``allow_weaker``.

    Raises:
        ValueError: if a limit is out of its range; see :class:`Policy`.
        SandboxUnavailableError: if a layer is missing without ``allow_weaker``, or the system is not Linux.

    Example:
        >>> sandbox = Sandbox(timeout=5)
        >>> sandbox.run("print(int(input()) + 1)", "41").stdout
        '42\\n'
        >>> session = sandbox.open()
        >>> session.run("x = 41").reason, session.run("x + 1").output
        ('ok', '42\\n')
    """

    def __init__(self, policy: Policy | None = None, **limits: Any):
        self.__setstate__({"policy": replace(Policy() if policy is None else policy, **limits)})
        starter = self._take_starter()
        self.missing: list[str] = starter.missing
        self._idle.append(starter)

    def run(self, program: str, stdin: str = "", *, guest: str | None = None, guest_stdin: str = "") -> SandboxResult:
        """Run a program to its end.

        Args:
            program: source code, run as ``__main__``.
            stdin: text for standard input.
            guest: source code of a second program, which runs concurrently in a separate process and ends with the
                first. Each has one end of a socket as file descriptor 3. The result of the guest is not reported. None
                runs no guest.
            guest_stdin: text for the standard input of the guest.

        Raises:
            RuntimeError: if the starter process was killed or hangs, so the result is unknown.
            ValueError: if the policy has a disk: open a workspace instead.
        """
        if self.policy.disk:
            raise ValueError(f"disk={self.policy.disk} must be 0 to run a program: open a workspace for commands")
        # Pass source and streams as files in memory: a program cannot block on them as on a pipe
        texts = [program, stdin, "", ""] + ([] if guest is None else [guest, guest_stdin, "", ""])
        patience, limit = self.policy.timeout + _RUN_GRACE_SECONDS, self.policy.max_output
        starter, files, reply = self._take_starter(), [], None
        try:
            for text in texts:
                files.append(memory_file(text.encode(errors="replace")))
            reply = starter.run(files, patience)
            stdout, stderr = (os.pread(file, limit, 0) for file in files[2:4])
        finally:
            for file in files:
                os.close(file)
            # Discard a starter with a pending reply: the next request must not read it
            if reply is None:
                starter.close()
        if reply is None:
            raise RuntimeError(
                "the starter process of the sandbox was killed (for example, out of memory) or gave no answer within "
                f"{patience:g} s, so the result of the program is unknown"
            )
        self._idle.append(starter)
        return self._result(reply, stdout, stderr)

    def judge(self, tests: Mapping[str, Any], program: Mapping[str, Any]) -> SandboxResult:
        """Run tests (a task of ``code_judge``) in one process and their program (of ``code_peers``) in another."""
        return self.run(_JUDGE, json.dumps(tests), guest=_SERVE, guest_stdin=json.dumps(program))

    def open(self, files: Mapping[str, str] | None = None) -> PythonSession | WorkspaceSession:
        """Open a session: a Python interpreter that keeps its variables, or with a ``disk`` a folder and a shell.

        The first ``files`` of the folder are a mapping of paths in it to texts.

        Raises:
            ValueError: if ``files`` has another form, or the policy has no disk for them.
            SandboxUnavailableError: if the system lacks something.
        """
        if not self.policy.disk:
            if files is not None:
                raise ValueError(f"files={files!r:.100} require a policy with a disk")
            return PythonSession(self, self._places)
        files = {} if files is None else files
        if not isinstance(files, Mapping) or not all(isinstance(t, str) for pair in files.items() for t in pair):
            raise ValueError(f"files={files!r:.100} must be a mapping of paths to texts")
        link = Link(self.host())
        hello = link.greet()
        if hello["missing"]:
            link.close()
            raise _unavailable(self.policy, hello["missing"])
        return WorkspaceSession(link, hello, dict(files), self.policy)

    def host(self) -> Starter:
        """Return the running starter process of the sessions."""
        with self._lock:
            if self._host is None or not self._host.is_usable():
                self._host = self._take_starter()
            return self._host

    def close(self) -> None:
        """End all sessions and the idle starter processes; those of running programs continue."""
        with self._lock:
            host, self._host = self._host, None
        if host is not None:
            host.close()
        while self._idle:
            self._idle.pop().close()

    def _result(self, reply: dict[str, Any], stdout: bytes, stderr: bytes) -> SandboxResult:
        code, reason, limit = reply["exit_code"], reply["reason"], self.policy.max_output
        tail = stderr.decode(errors="replace")[-2000:]
        if reason is None and code != 0:
            if max(len(stdout), len(stderr)) >= limit:
                reason = "output"
            elif code == -9 and reply["cpu"] >= 0.75 * self.policy.cpu_limit:  # the count of a busy kernel is inexact
                reason = "cpu"
            elif code == 1 and tail.rstrip().rpartition("\n")[2].startswith("MemoryError"):
                reason = "memory"
            elif code < 0:
                reason = "killed"
        return SandboxResult(reason or "exit", code, stdout.decode(errors="replace"), tail, reply["seconds"])

    def _take_starter(self) -> Starter:
        while True:
            try:
                starter = self._idle.pop()
            except IndexError:  # no idle starter, or another thread took it
                return Starter(self.policy)
            if starter.is_usable():
                return starter

    def __getstate__(self) -> dict[str, Any]:
        return {"policy": self.policy, "missing": self.missing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._idle: list[Starter] = []
        self._host: Starter | None = None  # of the sessions
        self._places, self._lock = Places(self.policy.sessions), threading.Lock()


class Starter:
    """Handle of a process that runs ``starter.py``, and the layers that this system lacks, a line each."""

    def __init__(self, policy: Policy):
        if not sys.platform.startswith("linux"):
            raise SandboxUnavailableError(f"platform={sys.platform}: the sandbox requires Linux (seccomp, Landlock)")
        self.channel, other = socket.socketpair()
        settings = asdict(policy) | {"cpu_seconds": policy.cpu_limit, "readable": _readable_folders(policy)}
        settings |= {"channel": other.fileno(), "trainer": os.getpid()}
        with other:
            self._helper = HelperProcess(
                [sys.executable, "-s", "-S", "-B", str(_SCRIPT), json.dumps(settings)],
                _environment(policy),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                pass_fds=[other.fileno()],
            )
        self.process, self.end = self._helper.process, self._helper.end
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(GRACE_S), 0))
        # Wait for the first message, which lists the missing layers
        hello = self.receive(_START_SECONDS)
        if hello is None:
            self.close()
            raise SandboxUnavailableError(
                f"the starter process of the sandbox exited with code {self.process.returncode} before it was ready"
            )
        self.missing = hello["missing"]
        if self.missing and not policy.allow_weaker:
            raise _unavailable(policy, self.missing)

    def is_usable(self) -> bool:
        """Return whether the process runs and belongs to this one."""
        return self._helper.is_usable()

    def close(self) -> None:
        """End the process and its programs."""
        self.end()
        self.channel.close()

    def run(self, files: list[int], timeout: float) -> dict[str, Any] | None:
        """Run a program and return the reply, None if the starter has ended or does not answer.

        ``files`` are the program's text, standard input, output and error; and those of the guest.
        """
        try:
            socket.send_fds(self.channel, [b"r"], files)
        except OSError:
            return None
        return self.receive(timeout)

    def connect(self) -> socket.socket:
        """Return the channel of a new session; a process that does not take it ends, and so does the channel."""
        channel, other = socket.socketpair()
        with other:
            try:
                socket.send_fds(self.channel, [b"o"], [other.fileno()])
            except OSError:  # it ended or hangs
                self.end()
        return channel

    def receive(self, timeout: float, channel: socket.socket | None = None) -> dict[str, Any] | None:
        """Return the next message; None if the process has ended or sends nothing for ``timeout`` seconds."""
        channel = self.channel if channel is None else channel
        # Poll instead of a socket time-out: a signal handler could also raise its TimeoutError
        poll, line = select.poll(), b""
        poll.register(channel, select.POLLIN)
        try:
            while not line.endswith(b"\n"):
                if not poll.poll(1000 * timeout) or not (part := channel.recv(4096)):
                    return None
                line += part
        except ConnectionError:
            return None
        return json.loads(line)


def _unavailable(policy: Policy, missing: list[str]) -> SandboxUnavailableError:
    needs = _NEEDS_NAMESPACES if policy.disk else _NEEDS_CONFINEMENT
    return SandboxUnavailableError(f"this system cannot isolate programs fully; missing: {'; '.join(missing)}. {needs}")


def _readable_folders(policy: Policy) -> list[str]:
    """Return the folders that a workspace shows in addition to the system's: those of the policy, and Python's."""
    pythons = [sys.base_prefix, *(os.path.realpath(folder) for folder in (sys.base_prefix, sys.base_exec_prefix))]
    own = [os.path.realpath(folder).rstrip("/") for folder in policy.readable]
    return [*own, *(folder for folder in dict.fromkeys(pythons) if folder != "/usr" and os.path.isdir(folder))]


def _environment(policy: Policy) -> dict[str, str]:
    """Return the variables of a starter: none of the trainer, but for the place of folders that are not in memory."""
    variables = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "TZ": "UTC"}
    if policy.disk:
        variables["TMPDIR"] = os.environ.get("TMPDIR", "/tmp")
    # Use the data of a package if the system has no time zones
    if not any(map(os.path.isdir, zoneinfo.TZPATH)) and (package := find_spec("tzdata")):
        variables["PYTHONTZPATH"] = f"{Path(package.origin).parent}/zoneinfo"
    return variables

"""Sandbox for untrusted programs, which can only compute and print.

Each program runs in a separate Linux process, inside independent layers of isolation:

=============================  =========================================================================================
attempt of a program           protection
=============================  =========================================================================================
endless loops, sleeping        CPU time limit of the kernel; wall-clock limit of a supervising process
memory, huge output            limits on address space and on output size; no pipes, no locked memory, none shared
processes, many threads        seccomp: no fork, no exec; more than 64 threads end the program
network                        seccomp: no sockets; also Landlock, depending on the kernel
signals, tracing               seccomp: no signals, even to itself; also Landlock, depending on the kernel
writing, deleting              seccomp: files cannot be created, opened for writing, renamed or removed; also Landlock
reading                        Landlock: only the standard library and its shared libraries; no packages, ``/proc``,
                               ``/etc``, home directories or environment of the trainer
rights of root                 all capabilities are dropped, and no program can regain them
open files, leftovers          only the standard streams, which are in memory; the process ends with the call
=============================  =========================================================================================

A program has no writable folder: ``open(path, "w")`` and ``tempfile`` raise. ``asyncio``, which needs sockets, does not
start. The standard library is available without packages, with a fixed hash seed and the clock in UTC. Time zones come
from the system's data, or else from the package ``tzdata`` of this process.

Known limits: a program can test whether a path or a process id exists. It can read file sizes, the user id, the host
name and the kernel version. A root without capabilities must be able to read the standard library. The isolation relies
on a kernel without security bugs.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import subprocess
import sys
import zoneinfo
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchrl_rloo.runtime.processes import HelperProcess

_SCRIPT = Path(__file__).with_name("starter.py")
_GRACE_SECONDS = 10.0  # extra time for the starter process, in addition to the program's time limit


class SandboxUnavailableError(RuntimeError):
    """Error of a system that cannot isolate programs as required."""


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


def check_limits(timeout: float, cpu_seconds: int | None, memory: int, max_output: int) -> int:
    """Check the limits of a sandbox and return the limit on CPU seconds.

    Args:
        timeout: wall-clock limit in seconds.
        cpu_seconds: limit on CPU time. None means ``timeout``, rounded up.
        memory: limit on the address space in bytes.
        max_output: limit on the output in bytes.

    Raises:
        ValueError: if a limit is not positive, or ``memory`` is below 64 MB.
    """
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout={timeout} must be a positive, finite number of seconds")
    cpu_seconds = math.ceil(timeout) if cpu_seconds is None else cpu_seconds
    if cpu_seconds < 1 or max_output < 1 or memory < 64 << 20:
        raise ValueError(
            f"cpu_seconds={cpu_seconds} and max_output={max_output} must be at least 1, "
            f"memory={memory} at least {64 << 20} bytes"
        )
    return cpu_seconds


class Sandbox:
    """Sandbox that runs untrusted Python programs; see :mod:`torchrl_rloo.sandbox.sandbox` for its protections.

    Each concurrent thread uses a separate starter process, which forks the programs. Starters start on demand, in a
    fraction of a second, are reused by later calls and end with the sandbox or with this process. A pickle does not
    contain them, and a forked process starts new ones.

    Args:
        timeout: wall-clock limit of a program in seconds.
        cpu_seconds: limit on the CPU seconds of all threads. None means ``timeout``, rounded up.
        memory: limit on the address space in bytes. Python needs about 30 MB, and each thread counts with its whole
            stack.
        max_output: limit in bytes on standard output and on standard error.
        allow_weaker: True also runs programs if the system lacks a layer; :attr:`missing` lists the layers.

    Attributes:
        missing: one line per layer that this system lacks; empty unless ``allow_weaker``.

    Raises:
        ValueError: if a limit is not positive, or ``memory`` is below 64 MB.
        SandboxUnavailableError: if a layer is missing without ``allow_weaker``, or the system is not Linux.

    Example:
        >>> Sandbox().run("print(int(input()) + 1)", "41").stdout
        '42\\n'
    """

    def __init__(
        self,
        *,
        timeout: float = 10.0,
        cpu_seconds: int | None = None,
        memory: int = 256 << 20,
        max_output: int = 1 << 20,
        allow_weaker: bool = False,
    ):
        cpu_seconds = check_limits(timeout, cpu_seconds, memory, max_output)
        self.timeout, self.cpu_seconds, self.memory, self.max_output = timeout, cpu_seconds, memory, max_output
        self.allow_weaker = allow_weaker
        self._idle: list[Starter] = []
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
        """
        # Pass source and streams as files in memory: a program cannot block on them as on a pipe
        texts = [program, stdin, "", ""] + ([] if guest is None else [guest, guest_stdin, "", ""])
        starter = self._take_starter()
        files: list[int] = []
        try:
            for text in texts:
                files.append(_memory_file(text))
            reply = starter.run(files, self.timeout + _GRACE_SECONDS)
            stdout, stderr = (os.pread(file, self.max_output, 0) for file in files[2:4])
        finally:
            for file in files:
                os.close(file)
            # Discard a starter with a pending reply: the next request must not read it
            if starter.reply_due:
                starter.close()
        if reply is None:
            raise RuntimeError(
                "the starter process of the sandbox was killed (for example, out of memory) or gave no answer within "
                f"{self.timeout + _GRACE_SECONDS:g} s, so the result of the program is unknown"
            )
        self._idle.append(starter)
        return self._result(reply, stdout, stderr)

    def close(self) -> None:
        """End the idle starter processes; those of running programs continue."""
        while self._idle:
            self._idle.pop().close()

    def _result(self, reply: dict[str, Any], stdout: bytes, stderr: bytes) -> SandboxResult:
        code, reason = reply["exit_code"], reply["reason"]
        tail = stderr.decode(errors="replace")[-2000:]
        if reason is None and code != 0:
            if max(len(stdout), len(stderr)) >= self.max_output:
                reason = "output"
            elif code == -9 and reply["cpu"] >= 0.75 * self.cpu_seconds:  # the count of a busy kernel is inexact
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
                break
            if starter.is_usable():
                return starter
        limits = {"cpu_seconds": self.cpu_seconds, "memory": self.memory, "max_output": self.max_output}
        return Starter({"limits": limits, "timeout": self.timeout, "allow_weaker": self.allow_weaker})

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": []}


class Starter:
    """Handle of a process that runs ``starter.py``.

    Args:
        settings: ``limits`` (the arguments of ``kernel.set_limits``), ``allow_weaker``, and ``timeout``.
            ``serve`` replaces ``timeout``: it is the path of another server module without its suffix, and the other
            settings are for that module.

    Attributes:
        process: the starter process.
        end: function that kills the process and its programs.
        channel: socket to the process.
        missing: one line per layer that this system lacks.

    Raises:
        SandboxUnavailableError: if a layer is missing without ``allow_weaker``, or the system is not Linux.
    """

    def __init__(self, settings: dict[str, Any]):
        if not sys.platform.startswith("linux"):
            raise SandboxUnavailableError(f"platform={sys.platform}: the sandbox requires Linux (seccomp, Landlock)")
        # Start the process without the environment of the trainer
        self.channel, other = socket.socketpair()
        settings = settings | {"channel": other.fileno(), "trainer": os.getpid()}
        with other:
            self._helper = HelperProcess(
                [sys.executable, "-s", "-S", "-B", str(_SCRIPT), json.dumps(settings)],
                {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "TZ": "UTC"} | _time_zones(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                pass_fds=[other.fileno()],
            )
        self.process, self.end = self._helper.process, self._helper.end
        self.reply_due = False
        # Wait for the first message, which lists the missing layers
        hello = self._receive(60.0)
        if hello is None:
            self.close()
            raise SandboxUnavailableError(
                f"the starter process of the sandbox exited with code {self.process.returncode} before it was ready"
            )
        self.missing = hello["missing"]
        if self.missing and not settings["allow_weaker"]:
            raise SandboxUnavailableError(
                f"this system cannot isolate programs fully; missing: {'; '.join(self.missing)}. The sandbox requires "
                "Linux 5.13 or later on x86-64 or aarch64, and a container whose filter allows both layers. Use "
                "allow_weaker=True to run programs with the remaining layers"
            )

    def is_usable(self) -> bool:
        """Return whether the process runs and belongs to this one."""
        return self._helper.is_usable()

    def close(self) -> None:
        """End the process and its programs."""
        self.end()
        self.channel.close()

    def run(self, files: list[int], timeout: float) -> dict[str, Any] | None:
        """Run a program and return the reply, None if the starter has ended or does not answer.

        Args:
            files: descriptors of the program's text, standard input, output and error; eight with a guest.
            timeout: time limit of the reply in seconds.
        """
        self.reply_due = True
        try:
            socket.send_fds(self.channel, [b"r"], files)
        except ConnectionError:
            return None
        reply = self._receive(timeout)
        self.reply_due = reply is None
        return reply

    def _receive(self, timeout: float) -> dict[str, Any] | None:
        # Poll instead of a socket time-out: a signal handler could also raise its TimeoutError
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        line = b""
        try:
            while not line.endswith(b"\n"):
                if not poll.poll(1000 * timeout) or not (part := self.channel.recv(4096)):
                    return None
                line += part
        except ConnectionError:
            return None
        return json.loads(line)


def _time_zones() -> dict[str, str]:
    """Return the variable that names the data of a package, if the system has no time zones."""
    package = None if any(map(os.path.isdir, zoneinfo.TZPATH)) else find_spec("tzdata")
    return {"PYTHONTZPATH": f"{Path(package.origin).parent}/zoneinfo"} if package else {}


def _memory_file(text: str) -> int:
    file = os.memfd_create("program")
    with open(file, "wb", closefd=False) as stream:
        stream.write(text.encode(errors="replace"))
    os.lseek(file, 0, os.SEEK_SET)
    return file

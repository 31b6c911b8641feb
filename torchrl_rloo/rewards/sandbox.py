"""Programs that nobody has read, run so that they can compute and print, and nothing else.

Each program is a process of its own, on Linux, with layers around it that do not rely on each other:

=============================  =========================================================================================
program tries                  what stops it
=============================  =========================================================================================
endless loops, sleeping        a limit on CPU time, by the kernel; on time, by a process that kills it
memory, huge output            limits on address space and on the size of its output; no pipes, shared or locked memory
processes, many threads        seccomp: no fork, no exec; more than 64 threads end it
network                        seccomp: no sockets of any kind; Landlock, where the kernel has that
signals, tracing               seccomp: none, not even to itself; Landlock, where the kernel has that
writing, deleting              seccomp: no file is opened for writing, made, renamed or removed; Landlock
reading                        Landlock: the standard library and shared libraries only; not the trainer's environment,
                               ``/proc``, ``/etc`` or anyone's home
open files, leaving things     it has its standard streams, which are in memory, and ends with the call
=============================  =========================================================================================

So a program has no folder of its own either: ``open(path, "w")`` and ``tempfile`` raise. ``asyncio``, which needs
sockets, does not start. It has the standard library and no packages, a fixed hash seed, and the clock in UTC.

What remains: a program learns whether a path exists and how large a file is, what the user and the kernel are called,
and reads what lies beside shared libraries under ``/usr/lib``; and all rests on the kernel's being without a hole.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("sandbox_child.py")
_GRACE = 10.0  # s that the process that starts programs may take beyond a program's own time


class SandboxUnavailableError(RuntimeError):
    """This system cannot contain a program as asked."""


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended.

    Attributes:
        reason: ``exit``: by itself, with ``exit_code``; ``timed_out``, ``cpu``, ``memory``, ``output``, ``threads``: by
            that limit (a program can pretend the limits on memory and output); ``killed``: by any other signal.
        exit_code: as in :mod:`subprocess`: minus the signal that ended it.
        stdout: all of it, up to the limit.
        stderr: the last 2000 characters.
        seconds: wall-clock time.
    """

    reason: str
    exit_code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it ended by itself and reported no failure."""
        return self.reason == "exit" and self.exit_code == 0


def checked_limits(timeout: float, cpu_seconds: int | None, memory: int, max_output: int) -> int:
    """The limit on CPU seconds, for limits that make sense.

    Raises:
        ValueError: if one is not positive, or ``memory`` below 64 MB.
    """
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout={timeout} must be a positive, finite number of seconds")
    cpu_seconds = math.ceil(timeout) if cpu_seconds is None else cpu_seconds
    if cpu_seconds < 1 or max_output < 1 or memory < 64 << 20:
        raise ValueError(
            f"cpu_seconds={cpu_seconds} and max_output={max_output} must be 1 or more, "
            f"memory={memory} at least {64 << 20} bytes"
        )
    return cpu_seconds


class Sandbox:
    """Runs Python programs that cannot do harm: see the top of the file for what that means.

    Every thread that runs a program at the same time has a process that forks programs off; these start on first use,
    in a tenth of a second, outlive calls and end with the sandbox or with this process. A sandbox pickles without them,
    and a forked process starts its own.

    Args:
        timeout: seconds a program may take.
        cpu_seconds: CPU seconds of all its threads; default: ``timeout``, rounded up.
        memory: bytes of address space, of which Python itself takes some 30 MB. A thread counts with its whole stack.
        max_output: bytes of standard output, and of standard error.
        allow_weaker: also run where a layer is missing, with those that are there. :attr:`missing` lists what is not.

    Attributes:
        missing: a line for each layer that this system lacks; empty unless ``allow_weaker``.

    Raises:
        ValueError: if a limit is not positive, or ``memory`` below 64 MB.
        SandboxUnavailableError: if a layer is missing and not ``allow_weaker``, or the system is not Linux.

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
        cpu_seconds = checked_limits(timeout, cpu_seconds, memory, max_output)
        self.timeout, self.cpu_seconds, self.memory, self.max_output = timeout, cpu_seconds, memory, max_output
        self.allow_weaker = allow_weaker
        self._idle: list[Starter] = []
        starter = self._take()
        self.missing: list[str] = starter.missing
        self._idle.append(starter)

    def run(self, program: str, stdin: str = "", *, guest: str | None = None, guest_stdin: str = "") -> SandboxResult:
        """Run a program to its end.

        Args:
            program: source code, run as ``__main__``.
            stdin: what it reads from its standard input.
            guest: a second program, in a process of its own, that runs beside the first and ends with it. Each has one
                end of a socket as file descriptor 3. How the guest ends is not reported.
            guest_stdin: what the guest reads from its standard input.

        Raises:
            RuntimeError: if the process that starts programs was killed or hangs, so nobody knows how this one ended.
        """
        texts = [program, stdin, "", ""] + ([] if guest is None else [guest, guest_stdin, "", ""])
        starter = self._take()
        files: list[int] = []
        try:
            for text in texts:
                files.append(_memory_file(text))
            reply = starter.run(files, self.timeout + _GRACE)
            stdout, stderr = (os.pread(file, self.max_output, 0) for file in files[2:4])
        finally:
            for file in files:
                os.close(file)
            if starter.reply_due:  # nobody will read the answer to this request: the next must not get it
                starter.process.kill()
        if reply is None:
            raise RuntimeError(
                "the process that starts programs was killed (for want of memory, say), or gave no answer within "
                f"{self.timeout + _GRACE:g} s: how this program ended is not known"
            )
        self._idle.append(starter)
        return self._result(reply, stdout, stderr)

    def close(self) -> None:
        """End the processes that start programs, those of running programs aside."""
        while self._idle:
            self._idle.pop().close()

    def _result(self, reply: dict[str, Any], stdout: bytes, stderr: bytes) -> SandboxResult:
        code, reason = reply["exit_code"], reply["reason"]
        tail = stderr.decode(errors="replace")[-2000:]
        if reason is None and code != 0:
            if max(len(stdout), len(stderr)) >= self.max_output:
                reason = "output"
            elif code == -9 and reply["cpu"] >= 0.75 * self.cpu_seconds:  # a busy kernel counts roughly
                reason = "cpu"
            elif code == 1 and tail.rstrip().rpartition("\n")[2].startswith("MemoryError"):
                reason = "memory"
            elif code < 0:
                reason = "killed"
        return SandboxResult(reason or "exit", code, stdout.decode(errors="replace"), tail, reply["seconds"])

    def _take(self) -> Starter:
        while True:
            try:
                starter = self._idle.pop()
            except IndexError:  # none, or another thread was faster
                break
            if starter.owner == os.getpid() and starter.process.poll() is None:
                return starter
        limits = {"cpu_seconds": self.cpu_seconds, "memory": self.memory, "max_output": self.max_output}
        return Starter({"limits": limits, "timeout": self.timeout, "allow_weaker": self.allow_weaker})

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": []}


class Starter:
    """A running ``sandbox_child.py``.

    Args:
        settings: ``limits``, as ``sandbox_kernel.set_limits`` takes them, ``allow_weaker``, and what the programs'
            server needs: a ``timeout``, or a file without its suffix to ``serve`` instead, with settings of its own.

    Attributes:
        process: it.
        channel: the socket to it.
        missing: a line for each layer that this system lacks.

    Raises:
        SandboxUnavailableError: if a layer is missing and not ``allow_weaker``, or the system is not Linux.
    """

    def __init__(self, settings: dict[str, Any]):
        if not sys.platform.startswith("linux"):
            raise SandboxUnavailableError(
                f"programs are contained by Linux (seccomp, Landlock); this is {sys.platform}"
            )
        self.owner = os.getpid()  # a fork inherits the socket, and must not use it
        self.channel, other = socket.socketpair()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-B", str(_SCRIPT), json.dumps(settings | {"channel": other.fileno()})],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "TZ": "UTC"},
                cwd="/",
                pass_fds=[other.fileno()],
                start_new_session=True,  # a Ctrl-C is for the trainer
            )
        self.resources = (self.process, self.channel, self.owner)
        weakref.finalize(self, _end, *self.resources)
        self.reply_due = False
        hello = self._receive(60.0)
        if hello is None:
            self.process.kill()
            raise SandboxUnavailableError(
                f"the process that starts programs ended with code {self.process.wait()} before it was ready"
            )
        self.missing = hello["missing"]
        if self.missing and not settings["allow_weaker"]:
            raise SandboxUnavailableError(
                f"this system cannot contain programs fully; missing: {'; '.join(self.missing)}. Both come with Linux "
                "5.13 or later on x86-64 and aarch64, unless the container's own filter forbids them. To run programs "
                "with the layers that are left: allow_weaker=True"
            )

    def close(self) -> None:
        """End the process and the programs that it has started."""
        _end(*self.resources)

    def run(self, files: list[int], timeout: float) -> dict[str, Any] | None:
        """How a program ended; None if the starter itself ended, or does not answer."""
        self.reply_due = True
        try:
            socket.send_fds(self.channel, [b"r"], files)
        except ConnectionError:
            return None
        reply = self._receive(timeout)
        self.reply_due = reply is None
        return reply

    def _receive(self, timeout: float) -> dict[str, Any] | None:
        poll = select.poll()  # not a time-out of the socket: its TimeoutError could be one that a signal handler raises
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


def _memory_file(text: str) -> int:
    file = os.memfd_create("program")
    with open(file, "wb", closefd=False) as stream:
        stream.write(text.encode(errors="replace"))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _end(process: subprocess.Popen, channel: socket.socket, owner: int) -> None:
    channel.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()

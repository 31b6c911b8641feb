"""Keepers of sessions; processes that :mod:`torchrl_rloo.sandbox.starter` forks, one for each session.

Requests and replies are lines of JSON. A keeper starts the processes of its session, watches their limits and ends
them. It runs nothing of the policy itself, and all of it ends when the trainer closes the channel.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from torchrl_rloo.runtime import processes
from torchrl_rloo.sandbox import code_judge, code_peers, kernel, namespaces, python_cell, workspace_files

TICK = 0.02  # seconds between checks of the limits that the kernel does not enforce
MAX_FILES = 256  # open files of a command
PATHS = "/usr/local/sbin /usr/local/bin /usr/sbin /usr/bin /sbin /bin"
MAX_PACKET_BYTES = python_cell.TOKEN + 1 + python_cell.MAX_ERROR_BYTES  # of an answer: token, letter, report
# Reasons by the answer's letter. FULL: too little memory is left for another call
FULL = ord("M")
REASONS = {ord("o"): "ok", ord("e"): "error", ord("m"): "memory", FULL: "memory", ord("f"): "output"}


_IMAGE = re.compile(rb"([A-Za-z0-9+/=]*)".join(map(re.escape, python_cell.IMAGE)))


class Keeper:
    """Server of the requests of one session."""

    def __init__(self, channel: socket.socket, settings: dict[str, Any]):
        self.channel, self.settings = channel, settings

    def serve(self) -> None:
        """Answer requests, which may have files, until the channel closes."""
        text, files = b"", []
        while True:
            part, received, _, _ = socket.recv_fds(self.channel, 1 << 16, 2)
            if not part:
                return
            text, files = text + part, files + received
            if not text.endswith(b"\n"):
                continue
            reply = self.answer(json.loads(text), files)
            for file in files:
                os.close(file)
            text, files = b"", []
            self.channel.sendall(json.dumps(reply).encode() + b"\n")

    def answer(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        """Return the reply to a request."""
        raise NotImplementedError

    def wait(self, poll: select.poll) -> list[int]:
        """Return the files that are ready within a tick; exit if the trainer has closed the channel."""
        ready = [file for file, _ in poll.poll(1000 * TICK)]
        if self.channel.fileno() in ready:
            sys.exit()
        return ready

    def shown(self, output: bytes) -> str:
        """Return output as text, without its middle if it is too long."""
        limit = self.settings["shown"]
        if len(output) <= limit:
            return output.decode(errors="replace")
        head, tail = output[: limit - limit // 2], output[len(output) - limit // 2 :]
        note = f"\n[{len(output) - limit} bytes of output are left out here]\n"
        return note.join(part.decode(errors="replace") for part in (head, tail))


# Python sessions


class PythonProcess:
    """Process of a Python session; ``OSError`` if the system has no process or file descriptor left.

    It gets the code of a call in a packet and answers with one. It is stopped between calls, with its threads and
    timers.
    """

    def __init__(self, containment: Any):
        parent = os.getpid()
        with contextlib.ExitStack() as stack:
            self.channel, peer = (stack.enter_context(s) for s in socket.socketpair(type=socket.SOCK_SEQPACKET))
            self.output = os.memfd_create("output")
            stack.callback(os.close, self.output)
            fcntl.fcntl(self.output, fcntl.F_SETFL, os.O_APPEND)  # the sandbox forbids a session to change this
            empty = stack.enter_context(open(os.devnull, "rb", 0)).fileno()
            if (pid := os.fork()) == 0:
                # Restrict the session before it runs any code
                try:
                    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
                        score.write("1000")  # if the machine runs out of memory, kill a session first
                    files = [empty, self.output, self.output, peer.fileno()]
                    containment.restrict_process(files, parent, limit_cpu=False)
                    python_cell.serve()
                finally:
                    os._exit(1)
            self.channel, self.output = self.channel.dup(), os.dup(self.output)
        self.pid, self.clock = pid, (~pid << 3) | 2  # clock of its CPU time, see clock_getcpuclockid(3)

    def cpu(self) -> float:
        """Return the CPU seconds used so far, or 0 if the process has ended."""
        try:
            return time.clock_gettime(self.clock)
        except OSError:
            return 0.0

    def is_silent(self) -> bool:
        """Return whether the process lives and no unread packet from it is left."""
        try:
            self.channel.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)  # only `end` waits for it, so no other process has its id

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.channel.close()
        os.close(self.output)


class PythonKeeper(Keeper):
    """Keeper of a Python session, which replaces its process when that has ended."""

    def __init__(self, channel: socket.socket, settings: dict[str, Any], containment: Any):
        super().__init__(channel, settings)
        self.containment = containment
        self.process: PythonProcess | None = None

    def answer(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        """Run a call and return its reply; then the process is stopped, or has ended."""
        # Replace a process that was killed from outside, or that sent something while idle
        if self.process is not None and not self.process.is_silent():
            self.end_process()
        new, output, images = self.process is None, "", []
        try:
            if self.process is None:
                self.process = PythonProcess(self.containment)
            reason, report, ended = self.run(self.process, request["code"].encode())
            self.process.signal(signal.SIGKILL if ended else signal.SIGSTOP)
            printed = os.pread(self.process.output, os.fstat(self.process.output).st_size, 0)
            images = [image.decode() for image in _IMAGE.findall(printed)]
            output = self.shown(_IMAGE.sub(b"[image]", printed))
        except OSError as error:
            reason, report, ended = "unavailable", f"{type(error).__name__}: {error}", True
        if ended and self.process is not None:
            self.end_process()
        reply = {"reason": reason, "output": output, "error": report, "new": new, "ended": ended}
        return reply | ({"images": images} if images else {})

    def run(self, process: PythonProcess, code: bytes) -> tuple[str, str, bool]:
        """Return the reason of a call's end, the report of an exception, and whether the process must end."""
        # Send the code with a token that only the answer to this call can repeat
        os.ftruncate(process.output, 0)
        began, cpu, token, poll = time.monotonic(), process.cpu(), os.urandom(python_cell.TOKEN), select.poll()
        process.channel.send(token + code, socket.MSG_DONTWAIT)
        process.signal(signal.SIGCONT)
        for end in (process.channel, self.channel):
            poll.register(end, select.POLLIN)
        while not self.wait(poll):
            if time.monotonic() - began > self.settings["timeout"]:
                return "timed_out", "", True
            if process.cpu() - cpu > self.settings["cpu_seconds"]:
                return "cpu", "", True
            if kernel.has_many_threads(process.pid):
                return "threads", "", True
        # A process that forged a packet, or has ended, must end
        try:
            packet = process.channel.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            packet = b""
        letter = packet[len(token)] if len(packet) > len(token) and packet.startswith(token) else None
        if letter not in REASONS:
            return "killed", "", True
        return REASONS[letter], packet[len(token) + 1 :].decode(errors="replace"), letter == FULL

    def end_process(self) -> None:
        """End the process; the next call starts another."""
        process, self.process = self.process, None
        process.end()


def keep_python(channel: socket.socket, containment: Any, settings: dict[str, Any]) -> None:
    """Serve a Python session until the channel closes."""
    channel.sendall(json.dumps({"missing": [], "place": None, "pid": os.getpid()}).encode() + b"\n")
    PythonKeeper(channel, settings, containment).serve()


# Workspaces


class WorkspaceKeeper(Keeper):
    """Keeper of one workspace; ``isolated`` if this is the first process of its namespaces.

    Each request starts a child, which drops its rights before it does anything. When the child ends or exceeds a limit,
    all processes but the keeper are killed, and then the keeper answers. The folder is in memory and ends with the
    keeper. The keeper never reads the tests of a repository. Therefore no process of the repository finds them in its
    memory.
    """

    def __init__(self, channel: socket.socket, settings: dict[str, Any], isolated: bool):
        super().__init__(channel, settings)
        self.isolated, self.filter = isolated, None
        paths = [f"{folder}/bin" for folder in settings["readable"]] + PATHS.split()
        if isolated:
            namespaces.build_root(settings["readable"], settings["disk"])
            self.filter, self.folder, temporary = kernel.seccomp_filter(commands=True), namespaces.FOLDER, "/tmp"
        else:
            self.folder = temporary = os.path.realpath(tempfile.mkdtemp(prefix="workspace-"))
        namespaces.hide_memory()
        self.environment = {"HOME": self.folder, "PWD": self.folder, "TMPDIR": temporary, "PATH": ":".join(paths)}
        self.environment |= {"LANG": "C.UTF-8", "TZ": "UTC", "PYTHONDONTWRITEBYTECODE": "1"}
        self.shell = next(path for path in ("/bin/bash", "/usr/bin/bash", "/bin/sh") if os.path.exists(path))

    def answer(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        """Start the children of a request and return its reply."""
        try:
            return self.run(request["operation"], request, files)
        except OSError as error:  # no process or file is left
            self.end_children()
            return {"reason": "unavailable", "output": f"{type(error).__name__}: {error}"}

    def run(self, operation: str, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        read, write = os.pipe()
        ends = [read]
        try:
            null = os.open(os.devnull, os.O_RDWR)
            ends += [write, null]
            if operation == "run":
                command = [self.shell, "-c", request["command"]]
                main = self.start(lambda: os.execve(self.shell, command, self.environment), [null, write, write])
            elif operation == "test":
                one, other = socket.socketpair()
                with one, other:
                    main = self.start(code_judge.judge, [files[0], write, null, one.fileno()], "/")
                    self.start(code_peers.serve, [files[1], null, null, other.fileno()])
            else:
                main = self.start(lambda: self.edit(operation, request["arguments"]), [null, write, null])
            os.close(write)
            ends.remove(write)
            limit = self.settings["max_output"]
            if operation == "view":
                limit += 6 * workspace_files.MAX_FILE_BYTES  # with quotes of JSON
            code, reason, output = self.watch(main, read, time.monotonic() + request["timeout"], limit)
        finally:
            for end in ends:
                os.close(end)
        text = self.shown(output) if operation == "run" else output.decode(errors="replace")
        return {"reason": reason or "exit", "code": code, "output": text}

    def start(self, run: Callable[[], None], files: list[int], folder: str | None = None) -> int:
        """Fork a child with the rights of a command, ``files`` as its first descriptors, and no others."""
        if pid := os.fork():
            return pid
        try:
            os.setsid()
            kernel.keep_files(files)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and then by what it starts
                signal.signal(number, signal.SIG_DFL)
            os.umask(0o022)
            self.restrict()
            os.chdir(folder or self.folder)
            os.environ.clear()
            os.environ.update(self.environment)
            sys.stdin = open(0, encoding="utf-8", closefd=False)
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
            sys.stderr = open(2, "w", encoding="utf-8", closefd=False)
            run()
            sys.stdout.flush()
            os._exit(0)
        finally:
            os._exit(1)

    def restrict(self) -> None:
        """Drop the rights of this process, which is a child, and limit it."""
        limits: dict[int, int | None] = {
            resource.RLIMIT_AS: self.settings["memory"],
            resource.RLIMIT_FSIZE: self.settings["disk"],
            resource.RLIMIT_NOFILE: MAX_FILES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
        }
        if self.isolated:
            namespaces.set_identity()
            limits[resource.RLIMIT_NPROC] = 2 * self.settings["processes"] + 1  # a bound until the count sees them
        kernel.set_limits(limits)
        if self.isolated:
            kernel.drop_capabilities()
            kernel.install_filter(self.filter)

    def edit(self, operation: str, arguments: dict[str, Any]) -> None:
        """Do a file operation and print its result."""
        try:
            result = {"ok": True, "text": workspace_files.OPERATIONS[operation](self.folder, **arguments)}
        except workspace_files.FileError as error:
            result = {"ok": False, "text": str(error)}
        except OSError as error:
            result = {"ok": False, "text": f"cannot {operation} {arguments.get('path', '')}: {error.strerror}"}
        print(json.dumps(result))

    def watch(self, main: int, output: int, deadline: float, limit: int) -> tuple[int | None, str | None, bytes]:
        """Wait for a child or an exceeded limit, and kill all processes; return exit code, limit and output."""
        poll, taken, reason, code, checked = select.poll(), bytearray(), None, None, 0.0
        handle = os.pidfd_open(main)
        for file in (handle, output, self.channel):
            poll.register(file, select.POLLIN)
        try:
            while reason is None and code is None:
                if output in self.wait(poll) and not take(taken, output):
                    poll.unregister(output)
                if len(taken) > limit:
                    reason = "output"
                code = reap(main)
                if code is None and time.monotonic() > checked + TICK:
                    checked = time.monotonic()
                    reason = reason or self.excess(checked > deadline)
        finally:
            os.close(handle)
            self.end_children()
        # No writer is left, so the end of the output follows
        while len(taken) <= limit and take(taken, output):
            pass
        return code, reason or ("output" if len(taken) > limit else None), bytes(taken)

    def excess(self, late: bool) -> str | None:
        """Return the limit that the processes exceed, or None."""
        if late:
            return "timed_out"
        if self.isolated:
            family = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        else:
            family = list(processes.descendants(os.getpid()))
        if len(family) > self.settings["processes"]:
            return "processes"
        return "memory" if sum(map(private_memory, family)) > self.settings["memory"] else None

    def end_children(self) -> None:
        """Kill all processes of the workspace and wait for them."""
        if self.isolated:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all of the namespace but this one
        else:
            processes.kill_below(os.getpid())
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0):
                pass

    def close(self) -> None:
        self.end_children()
        if not self.isolated:
            shutil.rmtree(self.folder, ignore_errors=True)


def take(taken: bytearray, output: int) -> bool:
    """Read a part of the output; return whether there was one."""
    part = os.read(output, 1 << 16)
    taken.extend(part)
    return bool(part)


def reap(main: int) -> int | None:
    """Wait for children and orphans that have ended; return the exit code of ``main`` if it is one of them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == main:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def private_memory(pid: int) -> int:
    """Return the bytes of memory of a process that are not of a file."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = [line.split() for line in file if line.startswith((b"RssAnon", b"RssShmem"))]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line[1]) << 10 for line in lines)


def keep_workspace(channel: socket.socket, isolated: bool, settings: dict[str, Any]) -> None:
    """Make a workspace of this process, say on the channel what is missing, and serve until the channel closes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process of a namespace ignores what has no handler
    outer, keeper, missing = os.getpid(), None, []
    try:
        if isolated:
            namespaces.enter_namespaces()
            if pid := os.fork():
                channel.close()
                os.waitpid(pid, 0)
                return
            kernel.die_with_parent([0, outer])  # 0: it is outside of the namespace
        else:
            processes.adopt_orphans()
        keeper = WorkspaceKeeper(channel, settings, isolated)
        if isolated:
            keeper.end_children()
    except OSError as error:
        missing.append(str(error))
    place = None if keeper is None or isolated else keeper.folder
    channel.sendall(json.dumps({"missing": missing, "place": place, "pid": outer}).encode() + b"\n")
    if keeper is not None and not missing:
        try:
            keeper.serve()
        finally:
            keeper.close()


def missing_layers(settings: dict[str, Any]) -> list[str]:
    """Open a workspace, and return one line per layer that this system lacks."""
    one, other = socket.socketpair()
    if (pid := os.fork()) == 0:
        try:
            one.close()
            keep_workspace(other, True, settings)
        finally:
            os._exit(0)
    other.close()
    with one, one.makefile("rb") as stream:
        hello = json.loads(stream.readline() or b'{"missing": ["the keeper process ended"]}')
    os.waitpid(pid, 0)
    return hello["missing"]

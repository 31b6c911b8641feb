"""Keeper process of a workspace; a script started by :mod:`torchrl_rloo.sandbox.workspace`.

It is the first process of its namespaces. Each request starts a child, which drops its rights before it does anything.
When the child ends or exceeds a limit, all processes but the keeper are killed, and then the keeper answers. The folder
is in memory and ends with the keeper.

Requests and replies are lines of JSON. The tests of a repository come as open files, which the keeper never reads.
Therefore no process of the repository finds them in its memory.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TICK = 0.02  # seconds between checks of the limits that the kernel does not enforce
MAX_FILES = 256  # open files of a process
MAX_OUTPUT_BYTES = 1 << 20  # that a command may print before it is stopped
PATHS = "/usr/local/sbin /usr/local/bin /usr/sbin /usr/bin /sbin /bin"


def load(folder: Path, name: str) -> types.ModuleType:
    """Load a module without its package, which would take seconds."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernel, _, peers, _, judges = (
    load(HERE, name) for name in ("kernel", "code_values", "code_peers", "code_proxies", "code_judge")
)
spaces, edits = (load(HERE, name) for name in ("namespaces", "workspace_files"))
reaper = load(HERE.parent / "runtime", "reaper")


class Keeper:
    """Keeper of one workspace.

    Args:
        settings: ``readable`` folders, limits (``memory``, ``disk``, ``processes``) and ``max_output`` (bytes of a
            command's output that are shown).
        isolated: whether this is the first process of its namespaces.
    """

    def __init__(self, settings: dict[str, Any], isolated: bool):
        self.settings, self.isolated, self.filter = settings, isolated, None
        paths = [f"{folder}/bin" for folder in settings["readable"]] + PATHS.split()
        if isolated:
            spaces.build_root(settings["readable"], settings["disk"])
            self.filter, self.folder, temporary = spaces.refusing_filter(kernel), spaces.FOLDER, "/tmp"
        else:
            self.folder = temporary = os.path.realpath(tempfile.mkdtemp(prefix="workspace-"))
        spaces.hide_memory()
        self.environment = {"HOME": self.folder, "PWD": self.folder, "TMPDIR": temporary, "PATH": ":".join(paths)}
        self.environment |= {"LANG": "C.UTF-8", "TZ": "UTC", "PYTHONDONTWRITEBYTECODE": "1"}
        self.shell = next(path for path in ("/bin/bash", "/usr/bin/bash", "/bin/sh") if os.path.exists(path))

    def serve(self, channel: socket.socket) -> None:
        """Answer requests until the channel closes."""
        text, files = b"", []
        while True:
            part, received, _, _ = socket.recv_fds(channel, 1 << 16, 2)
            if not part:
                return
            text, files = text + part, files + received
            if not text.endswith(b"\n"):
                continue
            request, text = json.loads(text), b""
            try:
                reply = self.answer(request, files)
            except OSError as error:  # no process or file is left
                self.end_children()
                reply = {"reason": "unavailable", "output": f"{type(error).__name__}: {error}"}
            for file in files:
                os.close(file)
            files = []
            channel.sendall(json.dumps(reply).encode() + b"\n")

    def answer(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        """Start the children of a request and return its reply."""
        timeout, operation = request["timeout"], request["operation"]
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
                    main = self.start(judges.judge, [files[0], write, null, one.fileno()], "/")
                    self.start(peers.serve, [files[1], null, null, other.fileno()])
            else:
                main = self.start(lambda: self.edit(operation, request["arguments"]), [null, write, null])
            os.close(write)
            ends.remove(write)
            limit = MAX_OUTPUT_BYTES + 6 * edits.MAX_FILE_BYTES * (operation == "view")  # quotes of JSON
            return self.watch(main, read, time.monotonic() + timeout, limit, operation == "run")
        finally:
            for end in ends:
                os.close(end)

    def start(self, run: Callable[[], None], files: list[int], folder: str | None = None) -> int:
        """Fork a child with the rights of a command, ``files`` as its first descriptors, and no others."""
        if pid := os.fork():
            return pid
        try:
            os.setsid()
            for number, file in enumerate([fcntl.fcntl(file, fcntl.F_DUPFD, 100) for file in files]):
                os.dup2(file, number)
            os.closerange(len(files), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
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
        memory, disk, processes = (self.settings[name] for name in ("memory", "disk", "processes"))
        limits = {
            resource.RLIMIT_AS: memory,
            resource.RLIMIT_FSIZE: disk,
            resource.RLIMIT_NOFILE: MAX_FILES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
        }
        if self.isolated:
            spaces.set_identity()
            limits[resource.RLIMIT_NPROC] = 2 * processes + 1  # a bound until the count sees them
        for name, value in limits.items():
            hard = resource.getrlimit(name)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(name, (value, value))
        if self.isolated:
            kernel.drop_capabilities()
            kernel.install_filter(self.filter)

    def edit(self, operation: str, arguments: dict[str, Any]) -> None:
        """Do a file operation and print its result."""
        try:
            result = {"ok": True, "text": edits.OPERATIONS[operation](self.folder, **arguments)}
        except (edits.FileError, OSError) as error:
            known, path = isinstance(error, edits.FileError), arguments.get("path", "")
            result = {"ok": False, "text": str(error) if known else f"cannot {operation} {path}: {error.strerror}"}
        print(json.dumps(result))

    def watch(self, main: int, output: int, deadline: float, limit: int, shorten: bool) -> dict[str, Any]:
        """Wait for a child or for an exceeded limit, kill all processes, and return how it ended and what it wrote."""
        poll, taken, reason, code = select.poll(), bytearray(), None, None
        handle = os.pidfd_open(main)
        poll.register(handle, select.POLLIN)
        poll.register(output, select.POLLIN)
        try:
            checked = 0.0
            while reason is None and code is None:
                for file, _ in poll.poll(1000 * TICK):
                    if file == output and not self.take(taken, output):
                        poll.unregister(output)
                if len(taken) > limit:
                    reason = "output"
                code = self.reap(main)
                if code is None and time.monotonic() > checked + TICK:
                    checked = time.monotonic()
                    reason = reason or self.excess(checked > deadline)
        finally:
            os.close(handle)
            self.end_children()
        # No writer is left, so the end of the output follows
        while len(taken) <= limit and self.take(taken, output):
            pass
        if len(taken) > limit:
            reason = reason or "output"
        text = self.shown(bytes(taken)) if shorten else taken.decode(errors="replace")
        return {"reason": reason or "exit", "code": code, "output": text}

    def take(self, taken: bytearray, output: int) -> bool:
        part = os.read(output, 1 << 16)
        taken.extend(part)
        return bool(part)

    def reap(self, main: int) -> int | None:
        """Wait for children and orphans that have ended; return the exit code of ``main`` if it is one of them."""
        code = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return code
            if pid == 0:
                return code
            if pid == main:
                code = os.waitstatus_to_exitcode(status)

    def excess(self, late: bool) -> str | None:
        """Return the limit that the processes exceed, or None."""
        if late:
            return "timed_out"
        family = self.family()
        if len(family) > self.settings["processes"]:
            return "processes"
        return "memory" if sum(map(_memory, family)) > self.settings["memory"] else None

    def family(self) -> list[int]:
        if not self.isolated:
            return list(reaper.descendants(os.getpid()))
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def end_children(self) -> None:
        """Kill all processes of the workspace and wait for them."""
        if self.isolated:
            try:
                os.kill(-1, signal.SIGKILL)  # all of the namespace but this one
            except ProcessLookupError:
                pass
        else:
            reaper.kill_below(os.getpid())
        try:
            while os.waitpid(-1, 0):
                pass
        except ChildProcessError:
            return

    def shown(self, output: bytes) -> str:
        """Return output as text, without its middle if it is too long."""
        limit = self.settings["max_output"]
        if len(output) <= limit:
            return output.decode(errors="replace")
        head, tail = (part.decode(errors="replace") for part in (output[: limit - limit // 2], output[-(limit // 2) :]))
        return f"{head}\n[{len(output) - limit} bytes of output are left out here]\n{tail}"

    def close(self) -> None:
        self.end_children()
        if not self.isolated:
            shutil.rmtree(self.folder, ignore_errors=True)


def _memory(pid: int) -> int:
    """Return the bytes of memory of a process that are not of a file."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = [line.split() for line in file if line.startswith((b"RssAnon", b"RssShmem"))]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line[1]) << 10 for line in lines)


def main() -> None:
    settings = json.loads(sys.argv[1])
    channel = socket.socket(fileno=settings["channel"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process of a namespace ignores what has no handler
    missing, isolated = [], settings["isolated"]
    if isolated:
        try:
            spaces.enter_namespaces()
        except OSError as error:
            missing.append(str(error))
    if isolated and not missing:
        parent = os.getpid()
        if pid := os.fork():
            channel.close()
            os.waitpid(pid, 0)
            return
        kernel.die_with_parent()
        if os.getppid() not in (0, parent):  # 0: it is outside of the namespace
            return
    else:
        reaper.adopt_orphans()
    keeper = None
    if not missing:
        try:
            keeper = Keeper(settings, isolated)
            if isolated:
                keeper.end_children()
        except OSError as error:
            missing.append(str(error))
    place = None if keeper is None or isolated else keeper.folder
    channel.sendall(json.dumps({"missing": missing, "place": place}).encode() + b"\n")
    if keeper is not None:
        try:
            keeper.serve(channel)
        finally:
            keeper.close()


if __name__ == "__main__":
    main()

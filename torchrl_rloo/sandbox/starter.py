"""Starter process of sandboxed programs; a script started by :mod:`torchrl_rloo.sandbox.sandbox`.

It imports common modules, then forks once per program. A fork takes 1 ms, the start of an interpreter 20 ms. Each fork
drops its rights before it runs its program. The process holds no secrets: its parent defines its environment, and
requests contain only open files.

The process and its program end when the other end of its socket closes or the trainer ends in any way. If the settings
name a module ``"serve"``, the function ``serve`` of that module handles the requests instead.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # the folder of this script, whose files are not top-level modules

import atexit
import builtins
import fcntl
import gc
import importlib.util
import json
import os
import random
import resource
import select
import signal
import socket
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMON = (  # imported once here instead of in each program
    "bisect cmath collections copy dataclasses datetime decimal fractions functools heapq io itertools math operator "
    "queue re statistics string threading traceback typing"
).split()
MAX_THREADS = 64
MAX_FILES = 256  # open files of this process
IDLE = 1.0  # seconds between checks that the trainer lives
TICK = 0.02  # seconds between counts of threads, which no resource limit bounds for root
PEER = 3  # file descriptor of the socket between two programs
FILES = 4  # files per program: text, standard input, output and error


def load(name: str) -> types.ModuleType:
    """Load a module without its package, from a file name in this folder or a full path without suffix."""
    path = Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


kernel, library = load("kernel"), load("library")


class Containment:
    """Protections of programs, prepared once.

    Args:
        limits: arguments of ``kernel.set_limits``.

    Attributes:
        missing: one line per layer that this system lacks.
    """

    def __init__(self, limits: dict[str, int]):
        self.limits, self.missing = limits, []
        self.program = self.ruleset = None
        try:
            program = kernel.seccomp_filter()
            self._try(lambda: kernel.install_filter(program))
            self.program = program
        except OSError as error:
            self.missing.append(f"seccomp (no processes, signals, network, changes of files): {error}")
        try:
            ruleset = kernel.landlock_ruleset(library.readable_paths())
            self._try(lambda: kernel.landlock_restrict(ruleset))
            self.ruleset = ruleset
        except OSError as error:
            self.missing.append(f"Landlock (no reading of files but Python's own): {error}")
        # Drop the rights of root once here, as forks inherit that
        try:
            kernel.drop_capabilities()
            with open(os.__file__, "rb"):
                library.pin_finders()
        except OSError as error:
            self.missing.append(f"capabilities (no rights of root, without which Python must be readable): {error}")
        # Try all of it together, as a program gets it: what fails here would be a failure of each program
        try:
            parent, null = os.getpid(), os.open(os.devnull, os.O_RDWR)
            self._try(lambda: self.restrict_process([null] * (FILES - 1), None, parent))
            os.close(null)
        except OSError as error:
            self.missing.append(f"all of the above together: {error}")

    def _try(self, restrict: Callable[[], None]) -> None:
        """Raise ``OSError`` if a process cannot restrict itself, or not read Python's own files afterwards."""
        if (pid := os.fork()) == 0:
            code = 1
            try:
                restrict()
                with open(os.__file__, "rb"):
                    code = 0
            except OSError as error:
                code = error.errno
            finally:
                os._exit(code)
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise OSError(code, os.strerror(abs(code)))

    def restrict_process(self, files: list[int], peer: int | None, parent: int) -> None:
        """Restrict this process, with ``files`` as its standard streams and no other open file but ``peer``."""
        kernel.die_with_parent()
        if os.getppid() != parent:  # the parent ended before that took effect
            os._exit(1)
        # Apply Landlock first: later the filter forbids the call and the descriptor of the rules is closed
        if self.ruleset is not None:
            kernel.landlock_restrict(self.ruleset)
        # Move the kept files to high numbers first, so that none is overwritten
        keep = files if peer is None else [*files, peer]
        copies = [fcntl.fcntl(file, fcntl.F_DUPFD, 100) for file in keep]
        for number, file in enumerate(copies):
            os.dup2(file, number)
        os.closerange(len(keep), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        # Install the filter last: it forbids the calls above
        kernel.set_limits(**self.limits)
        if self.program is not None:
            kernel.install_filter(self.program)


def serve(channel: socket.socket, containment: Containment, settings: dict[str, Any]) -> str:
    """Run the requested programs; return only in a fork, with the text of its program."""
    trainer, timeout = settings["trainer"], settings["timeout"]
    kernel.limit_starter(MAX_FILES)
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        # The channel does not close while a fork of the trainer holds its other end
        while not poll.poll(1000 * IDLE):
            if os.getppid() != trainer:
                os._exit(0)
        _, files, _, _ = socket.recv_fds(channel, 1, 2 * FILES)
        if not files:
            os._exit(0)
        # Fork one process per program
        parent, start = os.getpid(), time.monotonic()
        sockets = socket.socketpair() if len(files) > FILES else (None,)
        peers = [s and s.fileno() for s in sockets]
        children = []
        for number, peer in enumerate(peers):
            if (pid := os.fork()) == 0:
                return start_program(files[number * FILES : (number + 1) * FILES], peer, parent, containment)
            os.setpgid(pid, pid)
            children.append(pid)
        # Close the files of the programs here, then wait for the first program
        for end in sockets:
            end and end.close()
        for file in files:
            os.close(file)
        reason = watch(channel, children, start + timeout, trainer)
        reply = kill_children(children) | {"reason": reason, "seconds": time.monotonic() - start}
        channel.sendall(json.dumps(reply).encode() + b"\n")


def start_program(files: list[int], peer: int | None, parent: int, containment: Containment) -> str:
    """Turn a fork into the process of a program, and return the program's text."""
    with open(files[0], "rb", closefd=False) as text:
        source = text.read()
    containment.restrict_process(files[1:], peer, parent)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.argv = ["program"]
    random.seed(0)  # makes output and reward reproducible
    return source.decode()


def watch(channel: socket.socket, children: list[int], deadline: float, trainer: int) -> str | None:
    """Wait for the first child to end; return None, or the name of an exceeded limit."""
    # Wake up when the child ends or the trainer closes the channel
    handle = os.pidfd_open(children[0])
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(channel, select.POLLIN)
    try:
        while True:
            ready = [file for file, _ in poll.poll(1000 * TICK)]
            if handle in ready:
                return None
            if ready or os.getppid() != trainer:  # the trainer has closed the channel or ended
                kill_children(children)
                os._exit(0)
            # Limits that the kernel does not enforce
            if time.monotonic() > deadline:
                return "timed_out"
            if any(count_threads(pid) > MAX_THREADS for pid in children):
                return "threads"
    finally:
        os.close(handle)


def count_threads(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    except FileNotFoundError:
        return 0


def kill_children(children: list[int]) -> dict[str, Any]:
    """Kill all children and return the exit code (or minus the signal) and the CPU seconds of the first."""
    results = []
    for pid in children:
        os.killpg(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        results.append({"exit_code": os.waitstatus_to_exitcode(status), "cpu": usage.ru_utime + usage.ru_stime})
    return results[0]


def main() -> str:
    settings = json.loads(sys.argv[1])
    channel = socket.socket(fileno=settings["channel"])
    # Import now what programs use, so that forks share it
    for name in COMMON:
        __import__(name)
    for name in ("code_values", "code_peers", "code_proxies", "code_judge"):
        load(name)
    # Report missing restrictions, and run nothing without them unless that is allowed
    containment = Containment(settings["limits"])
    channel.sendall(json.dumps({"missing": containment.missing}).encode() + b"\n")
    if containment.missing and not settings["allow_weaker"]:
        os._exit(1)
    builtins.exit = builtins.quit = sys.exit  # defined by the site module, which -S skips
    server = load(settings["serve"]).serve if "serve" in settings else None
    gc.freeze()  # keeps collections in forks from copying the memory of this process
    if server is not None:
        server(sys.modules["__main__"], channel, containment, settings)
        os._exit(0)
    return serve(channel, containment, settings)


def execute(source: str) -> None:
    """Run a program as ``__main__`` and exit like an interpreter, without its 10 ms of cleanup."""
    # Run the program and determine the exit code
    code = 0
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(source, "<program>", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException:
        code = 1
        traceback.print_exc()
    # Exit like an interpreter: join threads, run exit functions, flush the output
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        code = code or 120
        traceback.print_exc()
    finally:
        os._exit(code & 255)


if __name__ == "__main__":
    execute(main())

"""Starter process of a sandbox; a script that :mod:`torchrl_rloo.sandbox.sandbox` runs with a policy.

It imports common modules, then forks a child for each request. A fork takes 1 ms, the start of an interpreter 20 ms. A
child drops its rights before it runs anything. The process holds no secrets: its parent defines its environment, and
requests contain only open files, which it never reads.

A request is a byte with files: four or eight for a program, one for the channel of a session. All processes end when
the other end of the channel closes or the trainer ends in any way.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script, whose files are not top-level modules

import atexit
import builtins
import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

COMMON = (  # imported once here instead of in each program
    "bisect cmath collections copy dataclasses datetime decimal fractions functools heapq io itertools math operator "
    "queue re statistics string threading traceback typing"
).split()
FOLDER = os.path.dirname(os.path.abspath(__file__))
OWN = "kernel keepers code_judge".split()
PACKAGE = "torchrl_rloo.sandbox"
MAX_FILES = 256  # open files of this process
IDLE = 1.0  # seconds between checks that the trainer lives
TICK = 0.02  # seconds between counts of threads, which no resource limit bounds for root
Keep = Callable[[socket.socket], None]
FILES = 4  # files per program: text, standard input, output and error


def load_modules() -> tuple[types.ModuleType, ...]:
    """Import the modules of this folder without those of the package, which would take seconds."""
    if __name__ == "__main__":
        for name, folder in (("torchrl_rloo", os.path.dirname(FOLDER)), (PACKAGE, FOLDER)):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [folder]
    return tuple(importlib.import_module(f"{PACKAGE}.{name}") for name in OWN)


kernel, keepers, _ = load_modules()


class Containment:
    """Protections of programs and Python sessions, prepared once; ``missing`` has a line per layer that is absent."""

    def __init__(self, settings: dict[str, Any]):
        self.settings, self.missing = settings, []
        self.program = self.ruleset = None
        try:
            program = kernel.seccomp_filter()
            self._try(lambda: kernel.install_filter(program))
            self.program = program
        except OSError as error:
            self.missing.append(f"seccomp (no processes, signals, network, changes of files): {error}")
        try:
            ruleset = kernel.landlock_ruleset(kernel.readable_paths())
            self._try(lambda: kernel.landlock_restrict(ruleset))
            self.ruleset = ruleset
        except OSError as error:
            self.missing.append(f"Landlock (no reading of files but Python's own): {error}")
        # Drop the rights of root once here, as forks inherit that
        try:
            kernel.drop_capabilities()
            with open(os.__file__, "rb"):
                kernel.pin_finders()
        except OSError as error:
            self.missing.append(f"capabilities (no rights of root, without which Python must be readable): {error}")
        # Try all of it together, as a program gets it: what fails here would be a failure of each program
        try:
            parent, null = os.getpid(), os.open(os.devnull, os.O_RDWR)
            self._try(lambda: self.restrict_process([null] * (FILES - 1), parent))
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

    def restrict_process(self, files: list[int], parent: int, *, limit_cpu: bool = True) -> None:
        """Restrict this process, with ``files`` as its first descriptors and no other open file."""
        kernel.die_with_parent([parent])
        # Apply Landlock first: later the filter forbids the call and the descriptor of the rules is closed
        if self.ruleset is not None:
            kernel.landlock_restrict(self.ruleset)
        kernel.keep_files(files)
        # Install the filter last: it forbids the calls above
        cpu_seconds = self.settings["cpu_seconds"] if limit_cpu else None
        kernel.set_limits(kernel.program_limits(cpu_seconds, self.settings["memory"], self.settings["max_output"]))
        if self.program is not None:
            kernel.install_filter(self.program)


def receive(channel: socket.socket, trainer: int) -> list[int]:
    """Wait for a request and return its files; end this process if the trainer has ended."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    # The channel does not close while a fork of the trainer holds its other end
    while not poll.poll(1000 * IDLE):
        reap_keepers()
        if os.getppid() != trainer:
            os._exit(0)
    reap_keepers()
    _, files, _, _ = socket.recv_fds(channel, 1, 2 * FILES)
    if not files:
        os._exit(0)
    return files


def reap_keepers() -> None:
    """Wait for the keepers that have ended; no program is one of the children now."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def open_session(file: int, keep: Keep, channel: socket.socket) -> None:
    """Fork the keeper of a session with its end of the session's channel."""
    parent = os.getpid()
    try:
        if os.fork() == 0:
            try:
                kernel.die_with_parent([parent])
                channel.close()
                keep(socket.socket(fileno=file))
            finally:
                os._exit(0)
    except OSError:  # no process is left: the session's channel closes
        traceback.print_exc()
    finally:
        os.close(file)


def serve(channel: socket.socket, keep: Keep, settings: dict[str, Any], containment: Containment | None) -> str:
    """Run the requested programs and sessions; return only in a fork, with the text of its program."""
    while True:
        files = receive(channel, settings["trainer"])
        if len(files) < FILES:
            open_session(files[0], keep, channel)
            continue
        # Fork one process per program
        parent, start = os.getpid(), time.monotonic()
        sockets = socket.socketpair() if len(files) > FILES else (None,)
        children = []
        for number, peer in enumerate(sockets):
            if (pid := os.fork()) == 0:
                text, *streams = files[number * FILES : (number + 1) * FILES]
                return start_program(text, [*streams, *([peer.fileno()] if peer else [])], parent, containment)
            os.setpgid(pid, pid)
            children.append(pid)
        # Close the files of the programs here, then wait for the first program
        for end in sockets:
            end and end.close()
        for file in files:
            os.close(file)
        reason = watch(channel, children, start + settings["timeout"], settings["trainer"])
        reply = kill_children(children) | {"reason": reason, "seconds": time.monotonic() - start}
        channel.sendall(json.dumps(reply).encode() + b"\n")


def start_program(text: int, files: list[int], parent: int, containment: Containment) -> str:
    """Turn a fork into the process of a program, and return the program's text."""
    with open(text, "rb", closefd=False) as stream:
        source = stream.read()
    containment.restrict_process(files, parent)
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
            if any(map(kernel.has_many_threads, children)):
                return "threads"
    finally:
        os.close(handle)


def kill_children(children: list[int]) -> dict[str, Any]:
    """Kill all children and return the exit code (or minus the signal) and the CPU seconds of the first."""
    results = []
    for pid in children:
        os.killpg(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        results.append({"exit_code": os.waitstatus_to_exitcode(status), "cpu": usage.ru_utime + usage.ru_stime})
    return results[0]


def main() -> str:
    """Report missing restrictions, then serve; run nothing without them unless that is allowed."""
    settings = json.loads(sys.argv[1])
    channel = socket.socket(fileno=settings["channel"])
    # Import now what programs use, so that forks share it
    for name in COMMON:
        __import__(name)
    kernel.limit_starter(MAX_FILES)
    containment = None if settings["disk"] else Containment(settings)
    missing = containment.missing if containment else keepers.missing_layers(settings)
    channel.sendall(json.dumps({"missing": missing}).encode() + b"\n")
    if missing and not settings["allow_weaker"]:
        os._exit(1)
    builtins.exit = builtins.quit = sys.exit  # defined by the site module, which -S skips
    gc.freeze()  # keeps collections in forks from copying the memory of this process

    def keep(session: socket.socket) -> None:
        if containment is None:
            keepers.keep_workspace(session, not missing, settings)
        else:
            keepers.keep_python(session, containment, settings)

    return serve(channel, keep, settings, containment)


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

"""Handles, in the training process, of the workers of a ProcessExecutor and of their guard process."""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from torchrl_rloo.rewards.executor_guard import kill_tree
from torchrl_rloo.rewards.executor_worker import DUMP_SIGNAL
from torchrl_rloo.rewards.protocol import RewardCall, RewardFailure

START_SECONDS = 120.0  # limit for the start of a worker
TRANSFER_SECONDS = 60.0  # limit between two parts of one message
POLL_SECONDS = 0.2  # between checks for workers that exited while a child holds their socket open

_LOGGER = logging.getLogger(__name__)


class Message(NamedTuple):
    """Request to a worker.

    Attributes:
        command: ``"start"``, ``"load"`` or ``"call"``.
        key: number of the function.
        data: pickled function or batch.
        limit: time limit of the reply in seconds.
    """

    command: str
    key: int
    data: bytes
    limit: float


class Worker:
    """Handle of a process that runs ``executor_worker.py``, which replies once after its start and to each message.

    Attributes:
        is_dead: True if the process was killed or found dead.
    """

    def __init__(self, guard: Guard):
        # Limit the time of socket operations: a worker may stop in the middle of a message
        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(TRANSFER_SECONDS), 0))
        # Start the process with a file for tracebacks, which stays readable after a crash
        self._dump = tempfile.TemporaryFile("w+b", buffering=0)
        descriptors = (theirs.fileno(), self._dump.fileno())
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, _script("executor_worker.py"), *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # a new process group, which is killed as a whole
            )
        # Kill the process when this handle is deleted, or through the guard when this process dies
        self.connection, self.is_dead = Connection(ours.detach()), False
        self._end = weakref.finalize(self, _end, self.process, self.connection, guard, os.getpid())
        guard.watch(self.process.pid)
        # Send the import path; the reply confirms the start
        self._loaded_keys: set[int] = set()
        self._messages: deque[Message] = deque()
        path = pickle.dumps([folder or os.getcwd() for folder in sys.path])
        self._send(Message("start", -1, path, START_SECONDS))

    def _send(self, message: Message) -> None:
        self._message, self._start = message, perf_counter()
        self.deadline = self._start + message.limit
        data = message.data if message.command == "start" else pickle.dumps(message[:3])
        try:
            self.connection.send_bytes(data)
        except OSError as error:  # the worker has exited, which the next poll detects, or does not read
            self.deadline = self._start
            _LOGGER.debug("cannot write to a reward worker: %s", error)

    def submit(self, load: Message, call: Message) -> None:
        """Queue a call of a function, after its ``load`` message if this worker has not loaded it yet."""
        idle = self.deadline == math.inf
        self._messages += [call] if call.key in self._loaded_keys else [load, call]
        if idle:
            self._send(self._messages.popleft())

    def poll(self, readable: bool) -> RewardCall | RewardFailure | None:
        """Process one event and return the result of the call, or None while the call is pending.

        Args:
            readable: True if the worker has sent a reply or closed its socket.
        """
        # Without a reply, check that the worker is alive and within its time limit
        if not readable:
            if self.has_exited() and not self.connection.poll():
                return self._fail_dead()
            return self._fail_hung() if perf_counter() >= self.deadline else None
        # Read the reply
        try:
            data = self.connection.recv_bytes()
        except (EOFError, OSError):
            return self._fail_dead()
        try:
            reply = pickle.loads(data)
        except Exception as error:  # a logged value cannot be unpickled in this process
            reply = RewardFailure.from_exception(error, perf_counter() - self._start)
        # None confirms "start" or "load": send the next message
        if reply is None:
            self._loaded_keys.add(self._message.key)
            self._send(self._messages.popleft())
            return None
        self._messages.clear()
        self.deadline = math.inf
        return reply

    def has_exited(self) -> bool:
        """Return whether the process has exited. Its pid stays reserved until :meth:`end`."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self.process.poll() is not None
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _fail_dead(self) -> RewardFailure:
        seconds = perf_counter() - self._start
        self.end()
        code = self.process.returncode
        how = f"with code {code}" if code >= 0 else f"by signal {_signal_name(-code)}"
        message = f"the worker process ended {how} during {self._message.command}"
        return RewardFailure("worker_died", message, self._traceback(), seconds)

    def _fail_hung(self) -> RewardFailure:
        # Request a traceback: faulthandler handles the signal in C, even if the interpreter hangs
        self.process.send_signal(DUMP_SIGNAL)
        for _ in range(20):
            time.sleep(0.005)
            if os.fstat(self._dump.fileno()).st_size:
                break
        self.end()
        return RewardFailure.timed_out(self._message.limit, perf_counter() - self._start, self._traceback())

    def _traceback(self) -> str:
        self._dump.seek(0)
        return self._dump.read(20_000).decode(errors="replace")

    def end(self) -> None:
        """Kill the process and its children."""
        self.is_dead = True
        self._end()


def wait_for(workers: Sequence[Worker]) -> list[tuple[Worker, RewardCall | RewardFailure]]:
    """Wait for an event of any worker and return the workers that finished their call, with the results."""
    left = min((worker.deadline for worker in workers), default=perf_counter()) - perf_counter()
    ready = wait([worker.connection for worker in workers], timeout=min(max(left, 0.0), POLL_SECONDS))
    results = [(worker, worker.poll(worker.connection in ready)) for worker in workers]
    return [(worker, result) for worker, result in results if result is not None]


class Guard:
    """Handle of a process that runs ``executor_guard.py``, which kills the workers if this process dies."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", _script("executor_guard.py")],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # not reached by Ctrl-C and signals to this process group
        )
        weakref.finalize(self, _release, self.process, os.getpid())

    def watch(self, pid: int) -> None:
        """Register a worker to kill when this process dies."""
        self._send(f"+{pid}\n")

    def unwatch(self, pid: int) -> None:
        """Forget a dead worker, because another process may get its pid."""
        self._send(f"-{pid}\n")

    def _send(self, line: str) -> None:
        try:
            self.process.stdin.write(line.encode())
        except OSError as error:
            _LOGGER.warning("the guard of the reward workers has died (%s); the next worker starts a new one", error)


def _end(process: subprocess.Popen, connection: Connection, guard: Guard, owner: int) -> None:
    connection.close()
    if os.getpid() == owner:
        kill_tree(process.pid)  # even if the worker has exited, its children may still run
        guard.unwatch(process.pid)
        process.wait()


def _release(process: subprocess.Popen, owner: int) -> None:
    process.stdin.close()
    if os.getpid() == owner:
        process.wait()


def _script(name: str) -> str:
    return str(Path(__file__).with_name(name))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)

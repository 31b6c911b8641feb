"""One worker process of a ProcessExecutor as the training process sees it, and the guard that outlives a killed run."""

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

START_SECONDS = 120.0  # to start a worker
TRANSFER_SECONDS = 60.0  # between two pieces of one message
POLL_SECONDS = 0.2  # between looks for a worker that has exited while a child of it holds its socket

_LOGGER = logging.getLogger(__name__)


class Message(NamedTuple):
    """What a worker is told.

    Attributes:
        command: ``"load"`` or ``"call"``.
        key: number of the function.
        data: the pickled function or batch.
        limit: seconds until the reply.
    """

    command: str
    key: int
    data: bytes
    limit: float


class Worker:
    """A running ``executor_worker.py``. It gives one reply when it has started and one to each message.

    Attributes:
        ended: whether it has been killed, or was found dead.
    """

    def __init__(self, guard: Guard):
        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # a worker may stop in the middle of a message
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(TRANSFER_SECONDS), 0))
        self._dump = tempfile.TemporaryFile("w+b", buffering=0)
        descriptors = (theirs.fileno(), self._dump.fileno())
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, _script("executor_worker.py"), *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # a group of its own, which is killed as a whole
            )
        self.connection, self.ended = Connection(ours.detach()), False
        self._end = weakref.finalize(self, _end, self.process, self.connection, guard, os.getpid())
        guard.watch(self.process.pid)
        self._known: set[int] = set()
        self._messages: deque[Message] = deque()
        path = pickle.dumps([folder or os.getcwd() for folder in sys.path])
        self._send(Message("start", -1, path, START_SECONDS))

    def _send(self, message: Message) -> None:
        self._message, self._start = message, perf_counter()
        self.deadline = self._start + message.limit
        data = message.data if message.command == "start" else pickle.dumps(message[:3])
        try:
            self.connection.send_bytes(data)
        except OSError as error:  # it has exited, which the next look at the socket shows, or does not read
            self.deadline = self._start
            _LOGGER.debug("a reward worker cannot be written to: %s", error)

    def give(self, load: Message, call: Message) -> None:
        """Has a function called, which is loaded first if it is new here."""
        idle = self.deadline == math.inf
        self._messages += [call] if call.key in self._known else [load, call]
        if idle:
            self._send(self._messages.popleft())

    def step(self, readable: bool) -> RewardCall | RewardFailure | None:
        """What came of the call; None if that is not known yet."""
        if not readable:
            if self.has_exited() and not self.connection.poll():
                return self._died()
            return self._hangs() if perf_counter() >= self.deadline else None
        try:
            data = self.connection.recv_bytes()
        except (EOFError, OSError):
            return self._died()
        try:
            reply = pickle.loads(data)
        except Exception as error:  # what it logged cannot be unpickled here
            reply = RewardFailure.of(error, perf_counter() - self._start)
        if reply is None:  # started or loaded
            self._known.add(self._message.key)
            self._send(self._messages.popleft())
            return None
        self._messages.clear()
        self.deadline = math.inf
        return reply

    def has_exited(self) -> bool:
        """Whether the process has ended by itself; its number stays taken until :meth:`end`."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self.process.poll() is not None
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _died(self) -> RewardFailure:
        seconds = perf_counter() - self._start
        self.end()
        code = self.process.returncode
        how = f"with code {code}" if code >= 0 else f"by signal {_signal_name(-code)}"
        message = f"the worker process ended {how} during {self._message.command}"
        return RewardFailure("worker_died", message, self._traceback(), seconds)

    def _hangs(self) -> RewardFailure:
        self.process.send_signal(DUMP_SIGNAL)  # handled in C, whatever the interpreter is at
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
        """Kills the process and its children."""
        self.ended = True
        self._end()


def wait_for(workers: Sequence[Worker]) -> list[tuple[Worker, RewardCall | RewardFailure]]:
    """Waits until something happens to one of the workers; returns those that are done with their call, if any."""
    left = min((worker.deadline for worker in workers), default=perf_counter()) - perf_counter()
    ready = wait([worker.connection for worker in workers], timeout=min(max(left, 0.0), POLL_SECONDS))
    results = [(worker, worker.step(worker.connection in ready)) for worker in workers]
    return [(worker, result) for worker, result in results if result is not None]


class Guard:
    """A running ``executor_guard.py``: kills the workers that this process leaves behind when it is killed."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", _script("executor_guard.py")],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of Ctrl-C and of signals to this process's group
        )
        weakref.finalize(self, _release, self.process, os.getpid())

    def watch(self, pid: int) -> None:
        """Has a worker killed when this process is gone."""
        self._tell(f"+{pid}\n")

    def unwatch(self, pid: int) -> None:
        """A worker is dead; its number may soon be another's."""
        self._tell(f"-{pid}\n")

    def _tell(self, line: str) -> None:
        try:
            self.process.stdin.write(line.encode())
        except OSError as error:
            _LOGGER.warning("the guard of reward workers is gone (%s); the next worker starts another", error)


def _end(process: subprocess.Popen, connection: Connection, guard: Guard, owner: int) -> None:
    connection.close()
    if os.getpid() == owner:
        kill_tree(process.pid)  # also if it has exited: its children may not have
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

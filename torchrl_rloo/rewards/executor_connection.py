"""Handles, in the training process, of the workers of a ProcessExecutor."""

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
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from torchrl_rloo.rewards.executor_worker import DUMP_SIGNAL
from torchrl_rloo.rewards.protocol import RewardCall, RewardFailure
from torchrl_rloo.runtime.processes import HelperProcess, short_environment

START_SECONDS = 120.0  # limit for the start of a worker
TRANSFER_SECONDS = 60.0  # limit between two parts of one message
REAPER_SECONDS = 5.0  # limit for a reaper to report the end of its worker
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

    Args:
        environment: names of further environment variables of the process, see
            :func:`~torchrl_rloo.runtime.processes.short_environment`.
        memory: limit on the private memory of the process in bytes.

    Attributes:
        is_dead: True if the process was killed or found dead.
    """

    def __init__(self, environment: Sequence[str], memory: int):
        # Limit the time of socket operations: a worker may stop in the middle of a message
        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(TRANSFER_SECONDS), 0))
        # Start the process with a file for tracebacks, which stays readable after a crash
        self._dump = tempfile.TemporaryFile("w+b", buffering=0)
        descriptors = (theirs.fileno(), self._dump.fileno())
        arguments = (os.getpid(), memory, *descriptors)
        self.connection, self.is_dead = Connection(ours.detach()), False
        with theirs:
            self._helper = HelperProcess(
                [sys.executable, str(Path(__file__).with_name("executor_worker.py")), *map(str, arguments)],
                short_environment(environment),
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        # Close the connection after the kill: a worker that saw its end would leave its children to others
        self._end = weakref.finalize(self, _end, self._helper.end, self.connection)
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
        """Return whether the process has exited."""
        return self._helper.has_exited()

    def is_idle(self) -> bool:
        """Return whether the process lives and waits for a call."""
        return not self.connection.poll() and not self.has_exited()

    def _fail_dead(self) -> RewardFailure:
        # The reaper exits like its worker, once it has killed what the worker left
        seconds, deadline = perf_counter() - self._start, perf_counter() + REAPER_SECONDS
        while not self.has_exited() and perf_counter() < deadline:
            time.sleep(0.001)
        self.end()
        code = self._helper.process.returncode
        how = f"with code {code}" if code >= 0 else f"by signal {_signal_name(-code)}"
        message = f"the worker process ended {how} during {self._message.command}"
        return RewardFailure("worker_died", message, self._traceback(), seconds)

    def _fail_hung(self) -> RewardFailure:
        # Request a traceback: faulthandler handles the signal in C, even if the interpreter hangs
        self._helper.process.send_signal(DUMP_SIGNAL)
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


def _end(kill: Callable[[], object], connection: Connection) -> None:
    kill()
    connection.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)

"""Executors that run reward functions inline, in threads, or in worker processes; async functions run on a loop.

==========================  ==========  ============================================================================
executor                    time limit  effect of a bad sample
==========================  ==========  ============================================================================
:class:`InlineExecutor`     none        an exception fails the sample; a hang or a crash stops the run
:class:`ThreadExecutor`     yes         a hang fails the sample and keeps its thread; a crash stops the run
:class:`ProcessExecutor`    yes         a hang or a crash fails the sample and its worker, which is replaced
==========================  ==========  ============================================================================

pebble's pool has three limits that processes here avoid. Its workers import the training script again (spawn) or fork
a process with torch's threads. It does not kill the children of a worker. A killed run leaves hung workers behind.
"""

from __future__ import annotations

import asyncio
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
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import cloudpickle

from torchrl_rloo.rewards.executor_worker import DUMP_SIGNAL
from torchrl_rloo.rewards.protocol import (
    RewardBatch,
    RewardCall,
    RewardFailure,
    RewardFunction,
    attempt_reward,
    call_reward_async,
    prepare_reward,
    reward_name,
    without_history,
)
from torchrl_rloo.runtime import event_loop
from torchrl_rloo.runtime.processes import HelperProcess, short_environment

LOAD_SECONDS = 120.0  # limit for loading a function and its imports in a worker
START_SECONDS = 120.0  # limit for the start of a worker
TRANSFER_SECONDS = 60.0  # limit between two parts of one message
REAPER_SECONDS = 5.0  # limit for a reaper to report the end of its worker
POLL_SECONDS = 0.2  # between checks for workers that exited while a child holds their socket open
CONCURRENCY = 16  # calls in flight of an async function without an attribute `concurrency`
_CHECK_SECONDS = 1.0  # between two looks at the loop and the clock of an async call
_MIN_MEMORY = 64 << 20

_LOGGER = logging.getLogger(__name__)
Result = RewardCall | RewardFailure


class Executor(Protocol):
    """Protocol of executors, which call reward functions.

    Attributes:
        rows_per_call: number of trajectories per call; None passes the whole batch.
        workers: maximum number of concurrent calls.
        timeout: seconds per trajectory; a call with ``n`` trajectories may take ``n`` times as long. None disables it.
    """

    rows_per_call: int | None
    workers: int
    timeout: float | None

    def prepare(self, function: RewardFunction) -> None:
        """Raise, before the run starts, if this executor cannot run the function."""

    def run(self, function: RewardFunction, batches: Sequence[RewardBatch]) -> list[Result]:
        """Call a function once per batch and return the results in order."""

    def close(self) -> None:
        """Stop the workers; the next run restarts them."""


class InlineExecutor:
    """Executor that calls functions in the calling thread, with the whole batch.

    ``KeyboardInterrupt`` and ``SystemExit`` propagate.

    Example:
        >>> from torchrl_rloo.rewards import RewardBatch, boxed_accuracy
        >>> batch = RewardBatch(["?"], [r"\\boxed{7}"], [[1]], {"answer": ["7"]})
        >>> InlineExecutor().run(boxed_accuracy, [batch])[0].scores
        [1.0]
    """

    rows_per_call: int | None = None
    workers = 1
    timeout: float | None = None

    def prepare(self, function: RewardFunction) -> None:
        """Call the ``prepare()`` method of the function, if it has one."""
        prepare_reward(function)

    def run(self, function: RewardFunction, batches: Sequence[RewardBatch]) -> list[Result]:
        """Call a function once per batch and return the results in order."""
        return [attempt_reward(function, batch) for batch in batches]

    def close(self) -> None:
        """Do nothing: there are no workers."""


class ThreadExecutor:
    """Executor that calls functions in threads of this process, for functions that wait for I/O or release the GIL.

    A call that times out is abandoned together with its thread, because Python cannot kill a thread. The thread may
    keep a core, the GIL or a lock until the process ends. Use :class:`ProcessExecutor` for functions that may hang.

    Args:
        workers: maximum number of threads, not counting abandoned ones.
        timeout: seconds per trajectory; None disables it.
        rows_per_call: number of trajectories per call; None passes the whole batch.

    Raises:
        ValueError: if an argument is not positive.
    """

    def __init__(self, workers: int = 1, timeout: float | None = 10.0, rows_per_call: int | None = 1):
        _check_limits(workers, timeout, rows_per_call)
        self.workers, self.timeout, self.rows_per_call = workers, timeout, rows_per_call

    def prepare(self, function: RewardFunction) -> None:
        """Call the ``prepare()`` method of the function, if it has one."""
        prepare_reward(function)

    def run(self, function: RewardFunction, batches: Sequence[RewardBatch]) -> list[Result]:
        """Call a function once per batch and return the results in order."""

        async def call(batch: RewardBatch) -> Result:
            limit, start = _limit(self.timeout, batch), perf_counter()
            attempt = partial(attempt_reward, function, batch, BaseException)
            try:
                return await event_loop.call_at_once(attempt, timeout=limit)
            except TimeoutError:  # an error of the function itself is a result
                return RewardFailure.timed_out(limit, perf_counter() - start)

        return event_loop.run(_call_all(call, batches, self.workers))

    def close(self) -> None:
        """Do nothing: threads end with their calls."""


async def _call_all(call: Callable[[RewardBatch], Any], batches: Sequence[RewardBatch], slots: int) -> list[Any]:
    """Await a call per batch, with at most ``slots`` in flight; time limits start when a call has a slot."""
    free = asyncio.Semaphore(slots)

    async def call_in_slot(batch: RewardBatch) -> Any:
        async with free:
            return await call(batch)

    return await asyncio.gather(*map(call_in_slot, batches))


def _limit(timeout: float | None, batch: RewardBatch) -> float | None:
    return None if timeout is None else timeout * len(batch)


def run_async(function: RewardFunction, batches: Sequence[RewardBatch], timeout: float | None = None) -> list[Result]:
    """Call an async function once per batch, with at most ``function.concurrency`` (default 16) calls in flight.

    A call that times out is cancelled. A coroutine that blocks the loop (``time.sleep``, an endless computation) cannot
    be cancelled. A warning names it, and time limits of the others stand still. If it exceeds its own time limit, the
    loop and its thread are abandoned, and later calls get another one. Calls that a block or a cancellation by another
    call kept from a result are repeated in separate threads, so only the guilty call fails.

    Any thread may call this function, and runs may overlap.
    """
    name, concurrency = reward_name(function), getattr(function, "concurrency", CONCURRENCY)
    if concurrency < 1:
        raise ValueError(f"reward {name}: concurrency={concurrency} must be at least 1")

    async def attempt(batch: RewardBatch) -> Result:
        start = perf_counter()
        try:
            return await call_reward_async(function, batch)
        except BaseException as error:  # SystemExit would also end the loop
            if isinstance(error, asyncio.CancelledError):
                raise
            return RewardFailure.from_exception(error, perf_counter() - start)

    attempt.__qualname__ = f"reward {name}"  # the loop's warnings name it

    async def call(batch: RewardBatch) -> Result | None:
        return await _call_on_loop(attempt, batch, _limit(timeout, batch) or math.inf)

    results = event_loop.run(_call_all(call, batches, concurrency))
    # Repeat the calls that another one blocked, in threads, where one cannot block another
    missing = [i for i, result in enumerate(results) if result is None]
    repeated = ThreadExecutor(concurrency, timeout).run(function, [batches[i] for i in missing])
    for i, result in zip(missing, repeated, strict=True):
        results[i] = result
    return results


async def _call_on_loop(attempt: Callable[[RewardBatch], Any], batch: RewardBatch, limit: float) -> Result | None:
    """Return the result of a call, or None if a function cancelled it, or blocks the loop for longer than the limit."""
    start, call = perf_counter(), event_loop.AsyncCall(attempt, (batch,), {}, "rewards")
    waiting = asyncio.wrap_future(call.future)
    try:
        while not waiting.done() and (left := limit - call.elapsed()) > 0:
            blocked = call.watch.blocked_for()
            if blocked >= limit and call.watch.blocker is not call:
                return None
            await asyncio.wait({waiting}, timeout=min(_CHECK_SECONDS, left, max(0.05, limit - blocked)))
        if not waiting.done():
            return RewardFailure.timed_out(limit, perf_counter() - start)
        return None if waiting.cancelled() else waiting.result()
    finally:
        if not waiting.done():
            waiting.cancel()
            call.abandon()


class ProcessExecutor:
    """Executor that calls functions in worker processes. A call that times out is killed with its worker.

    Workers start at the first call, in about 0.1 s and without running the training script again. They are reused by
    later calls, and end with the executor or with the training process, even if that is killed. A worker is killed
    together with all processes that it started, even daemons and those of a crashed worker. cloudpickle sends each
    function to a worker once, in its state at :meth:`prepare`. Lambdas and functions of a script or notebook work;
    attributes that change later are not sent. Output of a function goes to standard error.

    Any thread may call :meth:`run`; runs are executed one after another. A pickled copy or a forked process starts
    separate workers.

    Args:
        workers: number of processes.
        timeout: seconds per trajectory; None disables it.
        rows_per_call: number of trajectories per call; None passes the whole batch. Each call costs about 0.2 ms of
            transport.
        environment: names of environment variables that workers get in addition to the usual ones (``PATH``, ``HOME``,
            locale, caches, devices). ``*`` in a name matches any characters. Keys and tokens stay out unless named.
        memory: limit in bytes on the private memory of a worker, beyond which allocations raise. None means the memory
            of the machine.

    Raises:
        ValueError: if an argument is not positive.

    Example::

        executor = ProcessExecutor(workers=4, timeout=5.0)
        results = executor.run(reward, [batch])  # one RewardCall or RewardFailure per batch
        executor.close()
    """

    def __init__(
        self,
        workers: int = 1,
        timeout: float | None = 10.0,
        rows_per_call: int | None = 1,
        *,
        environment: Sequence[str] = (),
        memory: int | None = None,
    ):
        _check_limits(workers, timeout, rows_per_call)
        if memory is not None and memory < _MIN_MEMORY:
            raise ValueError(f"memory={memory} must be at least {_MIN_MEMORY} bytes; use None for that of the machine")
        if isinstance(environment, str):
            raise ValueError(f"environment={environment!r} must be a list of names, as in [{environment!r}]")
        self.workers, self.timeout, self.rows_per_call = workers, timeout, rows_per_call
        self.environment, self.memory = tuple(environment), memory
        self._reset()

    def _reset(self) -> None:
        self._owner, self._lock, self._closes = os.getpid(), threading.Lock(), 0
        self._runner: int | None = None  # thread of the last run
        self._idle: list[Worker] = []
        # Key and bytes by id of the function, which is unique because the function is kept alive here
        self._sent: dict[int, tuple[RewardFunction, int, bytes]] = {}

    def prepare(self, function: RewardFunction) -> None:
        """Serialize a function, whose first bytes the workers get; raise ``TypeError`` if that fails."""
        if id(function) in self._sent:
            return
        try:
            data = cloudpickle.dumps(function)
        except Exception as error:
            raise TypeError(
                f"reward {reward_name(function)} cannot be sent to a worker process: {type(error).__name__}: {error}; "
                "create locks, connections and open files on first use instead of in __init__, or use a ThreadExecutor"
            ) from error
        self._sent[id(function)] = function, len(self._sent), data

    def run(self, function: RewardFunction, batches: Sequence[RewardBatch]) -> list[Result]:
        """Call a function once per batch and return the results in order.

        Raise ``TypeError`` if it cannot be pickled, ``RuntimeError`` if another thread closes the executor.
        """
        # Start over in a forked process: the sockets of the workers belong to its parent
        if self._owner != os.getpid():
            self._reset()
        closes = self._closes
        with self._lock:
            self._runner = threading.get_ident()
            self.prepare(function)
            _, key, data = self._sent[id(function)]
            load = Message("load", key, data, LOAD_SECONDS)
            results: list[Any] = [None] * len(batches)
            waiting, busy = deque(range(len(batches))), {}
            try:
                while waiting or busy:
                    if self._closes != closes:
                        raise RuntimeError("the ProcessExecutor was closed during a run")
                    # Start calls while there are free workers
                    while waiting and len(busy) < self.workers:
                        index = waiting.popleft()
                        call = self._call(key, without_history(function, batches[index]))
                        if isinstance(call, RewardFailure):
                            results[index] = call
                            continue
                        worker = self._take_worker()
                        busy[worker] = index
                        worker.submit(load, call)
                    # Collect results; a worker that hung or died is not reused
                    for worker, result in wait_for(list(busy)):
                        results[busy.pop(worker)] = result
                        if not worker.is_dead:
                            self._idle.append(worker)
            finally:
                for worker in busy:  # not empty only after an exception
                    worker.end()
                if self._closes != closes:
                    self._end_idle()
        return results

    def _call(self, key: int, batch: RewardBatch) -> Message | RewardFailure:
        limit = math.inf if self.timeout is None else self.timeout * len(batch)
        try:
            return Message("call", key, cloudpickle.dumps(batch), limit)
        except Exception as error:
            failure = RewardFailure.from_exception(error)
            failure.message = f"the columns cannot be sent to a worker process: {failure.message}"
            return failure

    def _take_worker(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_idle():
                return worker
            worker.end()
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if self.memory is None else self.memory
        return Worker(self.environment, memory)

    def close(self) -> None:
        """Stop the workers and a run in another thread; the next run starts new workers."""
        if self._owner == os.getpid():
            self._closes += 1
            # A signal handler in the middle of a run must not wait for it; the run then ends the workers
            if self._lock.acquire(blocking=self._runner != threading.get_ident()):
                try:
                    self._end_idle()
                finally:
                    self._lock.release()

    def _end_idle(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def __getstate__(self) -> dict[str, Any]:
        names = ("workers", "timeout", "rows_per_call", "environment", "memory")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


def _check_limits(workers: int, timeout: float | None, rows_per_call: int | None) -> None:
    """Raise ``ValueError`` if a setting of an executor is not positive."""
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    if timeout is not None and not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout} must be a positive, finite number of seconds; use None to disable it")
    if rows_per_call is not None and rows_per_call < 1:
        raise ValueError(f"rows_per_call={rows_per_call} must be at least 1; use None for the whole batch")


class Message(NamedTuple):
    """Request to a worker."""

    command: str  # "start", "load" or "call"
    key: int  # number of the function
    data: bytes  # pickled function or batch
    limit: float  # seconds until the reply


class Worker:
    """Handle of a process that runs ``executor_worker.py``, which replies once after its start and to each message.

    It is dead once the process was killed or found dead.
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

    def poll(self, readable: bool) -> Result | None:
        """Process one event and return the result of the call, or None while the call is pending.

        The worker is readable once it has sent a reply or closed its socket.
        """
        # Without a reply, check that the worker is alive and within its time limit
        if not readable:
            if self._helper.has_exited() and not self.connection.poll():
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

    def is_idle(self) -> bool:
        """Return whether the process lives and waits for a call."""
        return not self.connection.poll() and not self._helper.has_exited()

    def _fail_dead(self) -> RewardFailure:
        # The reaper exits like its worker, once it has killed what the worker left
        seconds, deadline = perf_counter() - self._start, perf_counter() + REAPER_SECONDS
        while not self._helper.has_exited() and perf_counter() < deadline:
            time.sleep(0.001)
        self.end()
        code = self._helper.process.returncode
        name = signal.Signals(-code).name if -code in list(signal.Signals) else str(-code)  # else a real-time signal
        how = f"with code {code}" if code >= 0 else f"by signal {name}"
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


def wait_for(workers: Sequence[Worker]) -> list[tuple[Worker, Result]]:
    """Wait for an event of any worker and return the workers that finished their call, with the results."""
    left = min((worker.deadline for worker in workers), default=perf_counter()) - perf_counter()
    ready = wait([worker.connection for worker in workers], timeout=min(max(left, 0.0), POLL_SECONDS))
    results = [(worker, worker.poll(worker.connection in ready)) for worker in workers]
    return [(worker, result) for worker, result in results if result is not None]


def _end(kill: Callable[[], object], connection: Connection) -> None:
    kill()
    connection.close()


def make_executor(
    mode: str = "inline",
    *,
    workers: int | None = None,
    timeout: float | None = None,
    rows_per_call: int | None = None,
    environment: Sequence[str] | None = None,
) -> Executor:
    """Create an executor from settings.

    Args:
        mode: ``"inline"``, ``"thread"`` or ``"process"``.
        workers: maximum number of concurrent calls; None, here and below, keeps the default of the class.
        timeout: seconds per trajectory.
        rows_per_call: number of trajectories per call.
        environment: names of environment variables that processes get in addition; see :class:`ProcessExecutor`.

    Raises:
        ValueError: if ``mode`` is unknown, or another setting is given with ``mode="inline"`` or has no effect in it.

    Example:
        >>> make_executor("process", workers=2, timeout=5.0).timeout
        5.0
    """
    settings = {"workers": workers, "timeout": timeout, "rows_per_call": rows_per_call, "environment": environment}
    settings = {name: value for name, value in settings.items() if value is not None}
    if mode == "inline":
        if settings:
            name, value = next(iter(settings.items()))
            raise ValueError(
                f"{name}={value} cannot be combined with mode='inline', where one call runs in the calling thread and "
                "nothing can stop it; use mode='process' or 'thread'"
            )
        return InlineExecutor()
    if mode not in _MODES:
        raise ValueError(f"unknown mode={mode!r}; it must be 'inline', 'thread' or 'process'")
    if mode == "thread" and environment is not None:
        raise ValueError(
            f"environment={environment} has no effect with mode='thread', whose functions see all variables; omit it"
        )
    return _MODES[mode](**settings)


_MODES = {"thread": ThreadExecutor, "process": ProcessExecutor}

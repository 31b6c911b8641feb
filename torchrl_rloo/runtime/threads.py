"""Daemon threads of the package, and their end when the process exits.

Python kills daemon threads at its exit. A thread killed inside native code aborts the process (SIGABRT), because C++
and Rust do not allow this way of unwinding. So all threads of this module are stopped, interrupted and awaited before.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

_LOGGER = logging.getLogger(__name__)

_STOP_S = 0.1  # time for threads to end before they are interrupted
_BLOCKED_S = 1.0  # wait for a thread that neither computes nor is inside torch; killing it is harmless
_BLOCKED_IN_TORCH_S = 3.0  # wait for a thread inside torch that does not compute, as in a broadcast without peers
_COMPUTING_S = 30.0  # wait for a thread that computes
_INTERRUPT_PERIOD_S = 1.0  # a later interrupt must not hit the clean-up that the last one began
_POLL_S = 0.005

_LIVING: set[PackageThread] = set()
_EXITING = False


class ProcessExit(SystemExit):
    """Exception raised in the package's threads when the process exits."""


class PackageThread(Thread):
    """Daemon thread that ends before Python's exit would kill it inside torch.

    At exit, ``stop`` asks the thread to end; it must not block. An interrupt does not reach one that waits for a lock.
    """

    def __init__(self, target: Callable[..., Any], *args: Any, name: str, stop: Callable[[], Any] = lambda: None):
        super().__init__(target=target, args=args, name=name, daemon=True)
        self.stop, self.owner = stop, os.getpid()

    def start(self) -> None:
        """Start the thread."""
        _LIVING.add(self)
        super().start()

    def run(self) -> None:
        """Run the function; called by :meth:`start`."""
        try:
            super().run()
        except ProcessExit:
            _LOGGER.debug("thread %s was interrupted by the exit", self.name)
        finally:
            _LIVING.discard(self)


def is_exiting() -> bool:
    """Return whether the exit of this process has begun to end its threads."""
    return _EXITING


@atexit.register
def _end_threads() -> None:
    """Stop all threads. Interrupt those that continue, and wait for each as long as its kill could abort."""
    global _EXITING
    _EXITING = True
    ending = [_Ending(t) for t in list(_LIVING) if t.owner == os.getpid() and t.is_alive()]
    for thread in ending:
        thread.stop()
    patience, now = 1.0, time.monotonic()
    interrupt_from, until = now + _STOP_S, now + _COMPUTING_S
    while ending and now < until:
        try:
            time.sleep(_POLL_S)
            now = time.monotonic()
            if now >= interrupt_from:
                ending = [thread for thread in ending if thread.must_end(now, patience)]
            else:
                ending = [thread for thread in ending if thread.is_alive()]
        except KeyboardInterrupt:
            patience = 0.0  # the user does not want to wait: only wait for threads that compute
    for thread in ending:
        _LOGGER.warning("thread %s still computes at exit; killing it may abort the process", thread.name)


class _Ending:
    """Thread that is to end."""

    def __init__(self, thread: PackageThread):
        self.name, self.is_alive, self._thread = thread.name, thread.is_alive, thread
        self._computed_at, self._interrupted_at = time.monotonic(), -float("inf")
        self._cpu_ticks: tuple[str, str] | None = None

    def stop(self) -> None:
        try:
            self._thread.stop()
        except RuntimeError as error:  # such as a closed event loop
            _LOGGER.debug("thread %s could not be asked to stop: %r", self.name, error)

    def must_end(self, now: float, patience: float) -> bool:
        """Interrupt the thread, and return whether the exit has to wait for it."""
        if not self.is_alive():
            return False
        if now - self._interrupted_at >= _INTERRUPT_PERIOD_S:
            self._interrupted_at = now
            _interrupt(self._thread.ident)
        if self._is_computing():
            self._computed_at = now
            return True
        limit = _BLOCKED_IN_TORCH_S if _is_inside_torch(self._thread.ident) else _BLOCKED_S
        return now - self._computed_at < limit * patience

    def _is_computing(self) -> bool:
        """Return whether the thread has used a CPU since the last call, or waits for one; always False off Linux."""
        try:
            stat = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_text()
        except OSError:
            return False
        state, *fields = stat.rpartition(")")[2].split()
        before, self._cpu_ticks = self._cpu_ticks, (fields[10], fields[11])  # of 10 ms, in user and kernel mode
        return state == "R" or before not in (None, self._cpu_ticks)


def _interrupt(ident: int) -> None:
    """Raise :class:`ProcessExit` in a thread, as soon as it executes Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(ProcessExit))


def _is_inside_torch(ident: int) -> bool:
    frame = sys._current_frames().get(ident)
    root = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or os.sep * 2) + os.sep
    while frame is not None:
        if frame.f_code.co_filename.startswith(root):
            return True
        frame = frame.f_back
    return False

"""Stopping a run at the end of a step instead of in the middle of one."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

_log = logging.getLogger(__name__)


class StopSignal:
    """Turns the first SIGINT or SIGTERM into a request that the loop reads; the second one aborts.

    Signal handlers belong to the main thread. Anywhere else entering does nothing, and :attr:`requested` changes only
    if the caller sets it.

    Attributes:
        requested: whether the run should save and stop at the end of this step.

    Example:
        >>> import os, signal
        >>> with StopSignal() as stop:
        ...     for step in range(100):
        ...         if step == 3:
        ...             os.kill(os.getpid(), signal.SIGTERM)
        ...         if stop.requested:
        ...             break
        >>> step
        3
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not set from Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt(f"second signal: {signal.Signals(number).name}")
        self.requested = True
        _log.warning(
            "%s received: the run will save and stop at the end of this step; a second signal aborts it at once.",
            signal.Signals(number).name,
        )

"""Stop signals that end a run after the current step."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

_log = logging.getLogger(__name__)


class StopSignal:
    """Context manager that turns the first SIGINT or SIGTERM into a stop request; the second one aborts.

    Only the main thread can set signal handlers. In other threads the context manager does nothing, and only the caller
    can set ``requested``.

    Attributes:
        requested: True if the run should save and stop at the end of this step.

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
            # None is a handler that was not set from Python and that Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt(f"second signal: {signal.Signals(number).name}")
        self.requested = True
        _log.warning(
            "%s received: the run will save and stop at the end of this step; a second signal aborts it immediately",
            signal.Signals(number).name,
        )

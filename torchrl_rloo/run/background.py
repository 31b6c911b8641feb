"""A call in a thread, one at a time, whose error the caller gets later."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any


class BackgroundCall:
    """Thread for one call at a time. At its exit, Python waits for the end of the call.

    Args:
        name: name of the thread.

    Example:
        >>> done, call = [], BackgroundCall("example")
        >>> call.start(done.append, 1)
        >>> call.wait()
        >>> done
        [1]
    """

    def __init__(self, name: str):
        self._name, self._thread, self._error = name, None, None

    @property
    def failed(self) -> bool:
        """True if the call raised an error that :meth:`wait` has not yet raised."""
        return self._error is not None

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Start a call, after the end of the previous one."""
        self.wait()
        self._thread = Thread(target=self._run, args=(function, args), name=self._name)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the call and raise its error, once.

        Args:
            timeout: seconds to wait at most; then the call is left to itself.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except BaseException as error:  # raised by wait
            self._error = error

"""Waits on conditions and threads: no test sleeps for a fixed time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

PATIENCE = 120.0  # seconds, far more than any wait on a busy machine


def wait_until(
    condition: Callable[[], Any], timeout: float = PATIENCE, what: str = "the condition", every: float = 0.01
) -> Any:
    """Poll a condition until it is true, and return its value.

    Args:
        condition: function without arguments.
        timeout: seconds until the wait fails.
        what: name of the condition in the error.
        every: seconds between calls.

    Raises:
        TimeoutError: if the condition stays false.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not hold within {timeout} s")
        time.sleep(every)
    return value


def in_thread(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
    """Call a function that may block in a daemon thread; ``future.result(PATIENCE)`` waits for it."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future

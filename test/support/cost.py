"""Checks of the growth of CPU time, independent of the machine's load."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def assert_linear(call: Callable[[int], Any], size: int, *, negligible: float = 0.05) -> None:
    """Check that four times the size takes less than ten times this thread's CPU time; quadratic time takes sixteen.

    Args:
        call: function that does the work of a given size.
        size: smaller of the two sizes.
        negligible: seconds below which times are not compared.

    Raises:
        AssertionError: if the time grows faster, with both times.
    """
    small = large = float("inf")
    for _ in range(3):  # a cold cache or a busy neighbor spoils one measurement, not three
        small, large = min(small, _seconds(call, size)), min(large, _seconds(call, 4 * size))
        if large < max(negligible, 10 * small):
            return
    raise AssertionError(f"{small:.3f} s of CPU time at size {size}, {large:.3f} s at {4 * size}: more than linear")


def _seconds(call: Callable[[int], Any], size: int) -> float:
    start = time.thread_time()
    call(size)
    return time.thread_time() - start

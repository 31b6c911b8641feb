"""Event loops of conversations and users' functions: exceptions end neither loop."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import CancelledError

import pytest

from torchrl_rloo.envs import event_loop

SECONDS = 30.0  # a generous limit, so that a lost loop does not hang the test


def call(function, timeout: float | None = SECONDS):
    """Run ``event_loop.call`` from an ordinary thread."""
    work = event_loop.call(function, timeout=timeout)
    return asyncio.run_coroutine_threadsafe(work, event_loop.default_loop().loop).result(SECONDS)


def exits() -> None:
    sys.exit(3)


def interrupts() -> None:
    raise KeyboardInterrupt


def runs_out() -> None:
    next(iter([]))


def is_cancelled() -> None:
    raise asyncio.CancelledError


def has_a_cancelled_future() -> None:
    raise CancelledError


async def exits_async() -> None:
    sys.exit(3)


async def exits_in_a_task() -> None:
    await asyncio.create_task(exits_async())


async def is_cancelled_async() -> None:
    raise asyncio.CancelledError


async def fine() -> int:
    return 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (exits, r"exits raised SystemExit\(3\)"),
        (interrupts, "interrupts raised KeyboardInterrupt"),
        (runs_out, "runs_out raised StopIteration"),
        (is_cancelled, "is_cancelled raised CancelledError"),
        (has_a_cancelled_future, "has_a_cancelled_future raised CancelledError"),
        (exits_async, r"exits_async raised SystemExit\(3\)"),
        (exits_in_a_task, r"exits_in_a_task raised SystemExit\(3\)"),
        (is_cancelled_async, "is_cancelled_async was cancelled from within"),
    ],
)
def test_what_is_no_error_becomes_one_and_the_loops_go_on(function, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(function)
    assert call(fine) == 1


def test_errors_come_as_they_are() -> None:
    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        call(fails)
    with pytest.raises(TimeoutError, match="sleep took longer than 0.01 s"):

        async def sleep() -> None:
            await asyncio.sleep(SECONDS)

        call(sleep, timeout=0.01)

"""Event loops, threads of users' functions, and limits of their calls."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError

import pytest
import torch

from torchrl_rloo.envs.tools.parsers import ToolCall, ToolResult
from torchrl_rloo.envs.tools.session import ToolSession
from torchrl_rloo.envs.tools.tool import Tool, ToolRegistry
from torchrl_rloo.runtime import call_pool, event_loop
from torchrl_rloo.runtime.call_pool import CallLimit, CallPool

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


# ------------------------------------------------------------------------------------------------ threads and limits
@pytest.fixture
def loops() -> Iterator[list[event_loop.EventLoop]]:
    """Two loops, as of two collectors."""
    both = [event_loop.EventLoop(f"loop {i}") for i in range(2)]
    yield both
    for loop in both:
        loop.close()


@pytest.fixture
def call_threads() -> Iterator[Callable[[int], None]]:
    """Set the number of call threads for one test."""
    yield event_loop.set_call_threads
    event_loop.set_call_threads(event_loop.CALL_THREADS)


def gather(loop: event_loop.EventLoop, *work: Coroutine) -> list:
    async def all_of_them() -> list:
        return await asyncio.gather(*work, return_exceptions=True)

    return loop.run(all_of_them())


def test_many_calls_share_few_threads(loops) -> None:
    most = []

    def wait() -> None:
        time.sleep(0.01)
        most.append(threading.active_count())

    async def converse() -> None:
        for _ in range(8):
            await event_loop.call(wait)

    before = threading.active_count()
    gather(loops[0], *(converse() for _ in range(128)))
    assert len(most) == 1024 and max(most) <= before + event_loop.CALL_THREADS + 2


def test_the_time_limit_begins_with_the_function(loops, call_threads) -> None:
    call_threads(1)
    results = gather(loops[0], *(event_loop.call(time.sleep, 0.1, timeout=0.25) for _ in range(6)))
    assert results == [None] * 6, "the last one waited 0.5 s for the thread"


def test_a_stuck_thread_is_replaced_and_ends_when_it_returns(loops, call_threads) -> None:
    call_threads(1)
    release, threads = threading.Event(), []

    def stick() -> None:
        threads.append(threading.current_thread())
        release.wait(SECONDS)

    assert isinstance(gather(loops[0], event_loop.call(stick, timeout=0.05))[0], TimeoutError)
    assert gather(loops[0], event_loop.call(threading.current_thread, timeout=SECONDS))[0] not in threads
    release.set()
    threads[0].join(SECONDS)
    assert not threads[0].is_alive()


def test_a_cancelled_call_holds_no_thread(loops, call_threads) -> None:
    call_threads(1)
    release, began = threading.Event(), threading.Event()

    def stick() -> None:
        began.set()
        release.wait(SECONDS)

    future = asyncio.run_coroutine_threadsafe(event_loop.call(stick), loops[0].loop)
    began.wait(SECONDS)
    future.cancel()
    assert gather(loops[0], event_loop.call(fine_sync, timeout=SECONDS)) == [1]
    release.set()


def fine_sync() -> int:
    return 1


def test_calls_within_calls_cannot_use_up_the_threads(loops, call_threads) -> None:
    call_threads(2)

    def outer() -> int:
        return event_loop.run(event_loop.call(lambda: loops[1].run(event_loop.call(fine_sync))))

    assert gather(loops[0], *(event_loop.call(outer, timeout=SECONDS) for _ in range(12))) == [1] * 12


def test_a_thread_keeps_nothing_of_an_earlier_call(loops, call_threads) -> None:
    call_threads(1)
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    def change() -> None:
        variable.set(1)
        torch.set_grad_enabled(False)

    gather(loops[0], event_loop.call(change))
    assert gather(loops[0], event_loop.call(lambda: (variable.get(), torch.is_grad_enabled()))) == [(0, True)]


def test_a_limit_holds_over_loops_and_is_fair(loops) -> None:
    limit, lock, running, most, order = CallLimit(2), threading.Lock(), [0], [0], []

    def work(number: int) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            order.append(number)
        time.sleep(0.02)
        with lock:
            running[0] -= 1

    async def start(numbers: range) -> None:
        await asyncio.gather(*(event_loop.call(work, n, limit=limit, timeout=0.5) for n in numbers))

    futures = [asyncio.run_coroutine_threadsafe(start(range(k, 20, 2)), loops[k].loop) for k in range(2)]
    for future in futures:
        future.result(SECONDS)
    assert most == [2] and sorted(order) == list(range(20))
    for k in range(2):  # in each loop first come, first served; two run at a time
        own = [number for number in order if number % 2 == k]
        assert all(abs(sorted(own).index(number) - place) <= 1 for place, number in enumerate(own))


def test_a_cancelled_wait_gives_its_place_to_the_next(loops) -> None:
    limit, release = CallLimit(1), threading.Event()

    async def play() -> list:
        first = asyncio.ensure_future(event_loop.call(release.wait, SECONDS, limit=limit))
        await asyncio.sleep(0.05)
        second, third = (asyncio.ensure_future(event_loop.call(fine_sync, limit=limit)) for _ in range(2))
        await asyncio.sleep(0.05)
        second.cancel()
        release.set()
        return await asyncio.gather(first, second, third, return_exceptions=True)

    first, second, third = loops[0].run(play())
    assert first is True and isinstance(second, asyncio.CancelledError) and third == 1


def test_a_loop_that_is_closed_cancels_its_tasks_and_no_others(loops) -> None:
    ended = []

    async def wait(name: str) -> None:
        try:
            await asyncio.sleep(0.3 if name == "other" else SECONDS)
            ended.append(name)
        except asyncio.CancelledError:
            ended.append(f"{name} cancelled")
            raise

    other = asyncio.run_coroutine_threadsafe(wait("other"), loops[1].loop)
    loops[0].call_soon(lambda: loops[0].loop.create_task(wait("one")))
    time.sleep(0.1)
    loops[0].close()
    loops[0].close()
    with pytest.raises(RuntimeError, match="'loop 0' is closed"):
        loops[0].run(fine())
    other.result(SECONDS)
    assert ended == ["one cancelled", "other"]


def test_waiting_for_a_loop_on_itself_is_refused(loops) -> None:
    async def wait() -> None:
        loops[0].run(fine())

    with pytest.raises(RuntimeError, match="cannot be called on the event loop"):
        loops[0].run(wait())


class Waits(Tool):
    """Tool with a state that takes a while to open."""

    def __init__(self) -> None:
        super().__init__("waits", "Waits.", {"type": "object", "properties": {}})

    async def open(self, columns) -> list[int]:
        await asyncio.sleep(0.2)
        return []

    async def call(self, state: list[int], /) -> str:
        await asyncio.sleep(0.2)
        return "rain"


async def nap() -> int:
    await asyncio.sleep(0.2)
    return 1


@pytest.mark.parametrize("in_a_task", [False, True])
def test_a_function_that_blocks_the_loop_is_named_and_costs_no_other_its_time(in_a_task: bool, loops, caplog) -> None:
    release, began = threading.Event(), threading.Event()

    async def blocks() -> None:
        await asyncio.sleep(0.1)
        began.set()
        release.wait(SECONDS)

    async def blocks_in_a_task() -> None:
        await asyncio.gather(blocks())

    async def play() -> list:
        session = ToolSession(ToolRegistry([Waits()]), {}, timeout=0.6)
        work = [
            event_loop.call(blocks_in_a_task if in_a_task else blocks, timeout=0.5),
            session.call(ToolCall("waits", {})),
        ]
        work = [asyncio.ensure_future(one) for one in [*work, *(event_loop.call(nap, timeout=0.5) for _ in range(3))]]
        (blocked, *_), _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        assert blocked is work[0] and began.is_set()
        # Others, which began before, cannot run; a new call gets another loop
        assert await event_loop.call(nap, timeout=SECONDS) == 1 and not any(one.done() for one in work[1:])
        while "blocks the event loop" not in caplog.text:
            await asyncio.sleep(0.05)
        release.set()
        found = await asyncio.gather(*work, return_exceptions=True)
        await session.close()
        return found

    late, result, *naps = loops[0].run(play())
    assert isinstance(late, TimeoutError) and result == ToolResult("waits", "rain", "ok") and naps == [1, 1, 1]
    name = "blocks_in_a_task" if in_a_task else "blocks"
    assert caplog.text.count(f"{name} blocks the event loop of async functions at {threading.__file__}:") == 1


def test_calls_give_up_a_loop_that_stays_blocked(loops, monkeypatch) -> None:
    """They fail, which is no time-out of theirs."""
    monkeypatch.setattr(event_loop, "_LOST_AFTER_S", 0.5)
    release = threading.Event()

    async def blocks() -> None:
        await asyncio.sleep(0.1)
        release.wait(SECONDS)

    work = [event_loop.call(blocks, timeout=SECONDS), *(event_loop.call(nap, timeout=0.3) for _ in range(2))]
    session = ToolSession(ToolRegistry([Waits()]), {}, timeout=0.3)
    work.append(session.call(ToolCall("waits", {})))

    async def play() -> list:
        blocked, *others = (asyncio.ensure_future(one) for one in work)
        found = await asyncio.gather(*others, return_exceptions=True)
        release.set()
        await blocked
        return found

    for error in loops[0].run(play()):
        assert isinstance(error, RuntimeError) and "could not run, because blocks blocked the event loop" in str(error)


def test_a_session_of_tools_may_change_its_loop(loops) -> None:
    """A conversation's tools, opened on one loop, are called and closed on another."""
    closed = []

    class Notes(Tool):
        def __init__(self) -> None:
            super().__init__("notes", "Keeps notes.", {"type": "object", "properties": {}})

        def open(self, columns) -> list[int]:
            return []

        def call(self, state: list[int], /) -> int:
            time.sleep(0.02)
            state.append(len(state))
            return len(state)

        def close(self, state: list[int]) -> None:
            closed.append(list(state))

    session = ToolSession(ToolRegistry([Notes()]), {})
    calls = [session.call(ToolCall("notes", {})) for _ in range(8)]
    futures = [asyncio.run_coroutine_threadsafe(work, loops[i % 2].loop) for i, work in enumerate(calls)]
    assert sorted(int(future.result(SECONDS).text) for future in futures) == list(range(1, 9))
    event_loop.run(session.close())
    assert closed == [list(range(8))]


def test_a_call_without_a_thread_fails_alone(monkeypatch) -> None:
    def refuse(*args):
        raise RuntimeError("can't start new thread")

    pool = CallPool(1)
    with monkeypatch.context() as full:
        full.setattr(call_pool, "start_new_thread", refuse)
        lost = pool.submit(int, (1,), {})
        with pytest.raises(RuntimeError, match="int has no thread to run on: can't start new thread"):
            lost.result(SECONDS)
    assert pool.submit(int, (2,), {}).result(SECONDS) == 2
    pool.stop()

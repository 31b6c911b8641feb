"""Executors: results of calls, and recovery from calls that hang, crash, fork, flood or block the loop."""

from __future__ import annotations

import asyncio
import copy
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import cloudpickle
import pytest

from support.processes import wait_until_gone
from support.waiting import wait_until
from torchrl_rloo.rewards.executors import InlineExecutor, ProcessExecutor, ThreadExecutor, make_executor, run_async
from torchrl_rloo.rewards.protocol import RewardBatch, RewardCall, RewardFailure

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file


def batches(*completions: str) -> list[RewardBatch]:
    return [RewardBatch(["p"], [c], [[1, 2]], {"answer": ["4"]}) for c in completions]


def outcomes(results: list[RewardCall | RewardFailure]) -> list[float | None | str]:
    return [r.kind if isinstance(r, RewardFailure) else r.scores[0] for r in results]


def obeys(completions, **_) -> list[float]:
    """Execute the command in the completion."""
    for text in completions:
        command, _, argument = text.partition(" ")
        if command == "raise":
            raise KeyError(argument)
        elif command == "hang":
            time.sleep(1000)
        elif command == "spin":  # one long multiplication, which no signal or thread interrupts
            9 ** (9**9)
        elif command == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        elif command == "segfault":
            ctypes.string_at(0)
        elif command == "quit":
            os._exit(3)
        elif command == "exit":
            sys.exit(3)
        elif command == "print":
            print("printed", flush=True)
            os.write(1, b"written\n")
        elif command == "leave":  # a child that outlives a crash and holds its inherited files
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(4)
    return [1.0] * len(completions)


@pytest.fixture
def processes() -> Iterator[ProcessExecutor]:
    executor = ProcessExecutor(workers=2, timeout=3.0)
    yield executor
    executor.close()


ALL = [InlineExecutor(), ThreadExecutor(2), ProcessExecutor(2)]


@pytest.mark.parametrize("executor", ALL, ids=lambda e: type(e).__name__)
def test_calls_give_scores_in_order_with_what_was_logged(executor):
    def f(completions, answer, log_extra, log_metric, **_):
        time.sleep(0.02 if completions[0] == "0" else 0)
        log_extra("seen", [a + c for a, c in zip(answer, completions, strict=True)])
        log_metric("calls", 1)
        return [float(c) for c in completions]

    results = executor.run(f, batches(*map(str, range(9))))
    assert [r.scores for r in results] == [[float(i)] for i in range(9)]
    assert [r.extra for r in results] == [{"seen": [f"4{i}"]} for i in range(9)]
    assert all(r.metrics == [("calls", 1.0)] for r in results) and results[0].seconds >= 0.02
    assert executor.run(f, []) == []
    executor.close()


@pytest.mark.parametrize("executor", ALL, ids=lambda e: type(e).__name__)
def test_an_exception_costs_its_call(executor):
    results = executor.run(obeys, batches("ok", "raise answer", "ok"))
    assert outcomes(results) == [1.0, "raised", 1.0]
    assert results[1].message == "KeyError: 'answer'" and "in obeys" in results[1].traceback
    assert outcomes(executor.run(lambda **_: [1.0, 2.0], batches("a"))) == ["malformed"]
    executor.close()


@pytest.mark.parametrize("executor", [ThreadExecutor(2, 3.0), ProcessExecutor(2, 3.0)], ids=lambda e: type(e).__name__)
def test_a_hang_costs_its_call_and_its_time(executor):
    results = executor.run(obeys, batches("ok", "hang", "ok", "exit", "ok", "hang", "ok"))
    assert outcomes(results) == [1.0, "timed_out", 1.0, "raised", 1.0, "timed_out", 1.0]
    assert results[1].message == "no answer within 3 s" and 3.0 <= results[1].seconds < 100.0
    assert results[3].message == "SystemExit: 3"
    executor.close()


def test_more_rows_have_more_time(processes):
    def slow(completions, **_):
        time.sleep(3.5)
        return [1.0] * len(completions)

    many = RewardBatch(["p"] * 20, ["a"] * 20, [[1]] * 20)
    assert [type(r) for r in processes.run(slow, [many, *batches("c")])] == [RewardCall, RewardFailure]


@pytest.mark.parametrize(
    ("command", "kind", "message"),
    [
        ("segfault", "worker_died", "SIGSEGV during call"),
        ("quit", "worker_died", "code 3"),
        ("leave", "worker_died", "code 4"),
        ("spin", "timed_out", "3 s"),
        ("stubborn", "timed_out", "3 s"),
    ],
)
def test_a_crash_or_a_hang_costs_its_call_and_one_worker(processes, command, kind, message):
    results = processes.run(obeys, batches("ok", command, "ok", "ok", "ok"))
    assert outcomes(results) == [1.0, kind, 1.0, 1.0, 1.0] and message in results[1].message
    if command in ("segfault", "spin"):
        assert "in obeys" in results[1].traceback
    assert outcomes(processes.run(obeys, batches("ok", "ok"))) == [1.0, 1.0]


def test_what_a_reward_prints_is_no_message(processes, capfd):
    assert outcomes(processes.run(obeys, batches("print", "ok"))) == [1.0, 1.0]
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.splitlines() == ["printed", "written"]


def test_large_completions_and_answers_pass(processes):
    def echo(completions, log_extra, **_):
        log_extra("text", completions)
        return [float(len(c)) for c in completions]

    texts = [str(i) * 3_000_000 for i in range(4)]
    results = processes.run(echo, batches(*texts))
    assert [r.scores for r in results] == [[3e6]] * 4 and [r.extra["text"][0] for r in results] == texts


def test_a_worker_is_kept_and_a_dead_one_replaced(processes):
    def pid(**_):
        return [float(os.getpid())]

    first = {r.scores[0] for r in processes.run(pid, batches(*"abcdef"))}
    again = {r.scores[0] for r in processes.run(pid, batches(*"abcdef"))}
    assert first == again and len(first) <= 2 and os.getpid() not in first
    for number in first:
        os.kill(int(number), signal.SIGKILL)
    wait_until_gone(map(int, first))
    others = {r.scores[0] for r in processes.run(pid, batches(*"abcdef"))}
    assert not others & first
    processes.close()
    wait_until_gone(map(int, others))
    assert outcomes(processes.run(obeys, batches("ok"))) == [1.0]


def test_a_call_off_the_main_thread(processes):
    found = []
    thread = threading.Thread(target=lambda: found.extend(processes.run(obeys, batches("ok", "spin", "ok"))))
    thread.start()
    thread.join()
    assert outcomes(found) == [1.0, "timed_out", 1.0]
    assert outcomes(processes.run(obeys, batches("ok"))) == [1.0]  # the workers outlive the thread that started them


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also holds for tests in the background, where Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_run_leaves_no_worker_at_work(processes, interruptible):
    def interrupt() -> None:
        wait_until(processes._lock.locked)
        os.kill(os.getpid(), signal.SIGINT)

    processes.timeout = 60.0
    processes.run(obeys, batches("ok"))
    with pytest.raises(KeyboardInterrupt):
        threading.Thread(target=interrupt).start()
        processes.run(obeys, batches("hang", "hang"))
    processes.timeout = 3.0
    assert outcomes(processes.run(obeys, batches("ok", "ok"))) == [1.0, 1.0]


def test_what_cannot_be_pickled_is_refused_or_lost_alone(processes):
    lock = threading.Lock()

    def holds(**_):
        return [float(lock.locked())]

    with pytest.raises(TypeError, match=r"reward holds cannot be sent.*ThreadExecutor"):
        processes.prepare(holds)
    bad = RewardBatch(["p"], ["c"], [[1]], {"lock": [lock]})
    assert outcomes(processes.run(obeys, [bad, *batches("ok")])) == ["raised", 1.0]

    def logs(completions, log_extra, **_):
        log_extra("lock", [threading.Lock()] if completions == ["bad"] else [1])
        return [1.0]

    assert outcomes(processes.run(logs, batches("bad", "good"))) == ["raised", 1.0]


class Unloadable:
    """Object that raises when it is unpickled."""

    def __call__(self, **_):
        return [1.0]

    def __setstate__(self, state):
        raise OSError("no such file")

    def __getstate__(self):
        return {"a": 1}


def test_a_function_that_cannot_be_loaded_fails_each_call(processes):
    results = processes.run(Unloadable(), batches("a", "b", "c"))
    assert outcomes(results) == ["raised"] * 3
    assert results[2].message == "could not be unpickled in a worker process: OSError: no such file"
    assert outcomes(processes.run(obeys, batches("ok"))) == [1.0]


def test_a_copy_and_a_fork_have_workers_of_their_own(processes):
    def pid(**_):
        return [float(os.getpid())]

    parents = {r.scores[0] for r in processes.run(pid, batches("a"))}
    for other in (pickle.loads(pickle.dumps(processes)), copy.deepcopy(processes)):
        assert (other.workers, other.timeout, other.rows_per_call) == (2, 3.0, 1)
        assert {r.scores[0] for r in other.run(pid, batches("a"))} != parents
        other.close()
    child = os.fork()
    if child == 0:
        try:
            others = {r.scores[0] for r in processes.run(pid, batches("a"))}
            processes.close()
            os._exit(0 if others != parents else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {r.scores[0] for r in processes.run(pid, batches("a"))} == parents


SCRIPT = """
import sys, time
with open(sys.argv[1], "a") as log:
    log.write("ran\\n")  # stands for an expensive script
from torchrl_rloo.rewards.executors import ProcessExecutor
from torchrl_rloo.rewards.protocol import RewardBatch

SCALE = 2.0

def scaled(x):
    return SCALE * x

class Reward:
    def __init__(self, shift):
        self.shift = shift
    def __call__(self, completions, **_):
        return [scaled(len(c)) + self.shift for c in completions]

executor = ProcessExecutor(2, 20.0)
batches = [RewardBatch(["p"], ["x" * n], [[1]]) for n in range(4)]
print([r.scores[0] for r in executor.run(Reward(0.5), batches)])
print([r.scores[0] for r in executor.run(lambda completions, **_: [scaled(3.0)], batches)])
"""


def test_functions_of_a_script_work_and_the_script_runs_once(tmp_path):
    script, log = tmp_path / "train.py", tmp_path / "log"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, log], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0.5, 2.5, 4.5, 6.5]", "[6.0, 6.0, 6.0, 6.0]"]
    assert log.read_text() == "ran\n"


def test_a_thread_given_up_holds_no_place():
    executor, release = ThreadExecutor(workers=1, timeout=0.5), threading.Event()

    def waits(completions, **_):
        if completions == ["wait"]:
            release.wait(60)
        return [1.0]

    assert outcomes(executor.run(waits, batches("wait", "a", "wait", "b"))) == ["timed_out", 1.0, "timed_out", 1.0]
    release.set()


@pytest.mark.parametrize("kind", [ThreadExecutor, ProcessExecutor])
def test_threads_and_workers_run_at_the_same_time(kind, tmp_path):
    def waits_for_the_others(completions, **_):
        (tmp_path / completions[0]).touch()
        while len(list(tmp_path.iterdir())) < 4:
            time.sleep(0.01)
        return [1.0]

    executor = kind(4, timeout=60.0)
    assert outcomes(executor.run(waits_for_the_others, batches(*"1234"))) == [1.0] * 4
    executor.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "inline", "timeout": 5.0}, r"timeout=5.0 cannot be combined with mode='inline'.*mode='process'"),
        ({"mode": "inline", "workers": 2}, "workers=2"),
        ({"mode": "cluster"}, "unknown mode='cluster'"),
        ({"mode": "thread", "workers": 0}, "workers=0"),
        ({"mode": "process", "timeout": 0.0}, "timeout=0.0"),
        ({"mode": "process", "timeout": float("inf")}, "timeout=inf"),
        ({"mode": "thread", "rows_per_call": 0}, "rows_per_call=0"),
        ({"mode": "thread", "environment": ["KEY"]}, r"environment=\['KEY'\] has no effect"),
        ({"mode": "inline", "environment": ["KEY"]}, "cannot be combined with mode='inline'"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_executor(**settings)


def test_executors_from_settings():
    assert isinstance(make_executor(), InlineExecutor)
    executor = make_executor("thread", workers=3, timeout=2.0, rows_per_call=4)
    assert isinstance(executor, ThreadExecutor)
    assert (executor.workers, executor.timeout, executor.rows_per_call) == (3, 2.0, 4)
    assert isinstance(make_executor("process"), ProcessExecutor)
    assert make_executor("process", environment=["KEY"]).environment == ("KEY",)


async def naps_or(completions, **_):
    for text in completions:
        if text == "raise":
            raise KeyError("answer")
        elif text == "exit":
            sys.exit(3)
        elif text == "hang":
            await asyncio.sleep(1000)
        elif text == "deaf":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    continue
        elif text == "cancel":
            raise asyncio.CancelledError
    await asyncio.sleep(0.1)
    return [1.0] * len(completions)


def test_async_calls_overlap_and_fail_alone():
    texts = ["ok", "raise", "hang", "exit", "deaf", "cancel", *["ok"] * 8]
    expected = [1.0, "raised", "timed_out", "raised", "timed_out", "raised", *[1.0] * 8]
    assert outcomes(run_async(naps_or, batches(*texts), 5.0)) == expected
    assert outcomes(run_async(naps_or, batches("ok"))) == [1.0]

    waiting = set()

    async def waits_for_the_others(completions, **_):
        waiting.update(completions)
        while len(waiting) < 4:
            await asyncio.sleep(0.01)
        return [1.0]

    assert outcomes(run_async(waits_for_the_others, batches(*"1234"), 60.0)) == [1.0] * 4


def test_a_coroutine_that_blocks_the_loop_loses_its_own_call_alone():
    release, threads = threading.Event(), set()

    async def blocks_or(completions, **_):
        if completions == ["block"]:
            release.wait(60)
        threads.add(threading.current_thread().name)
        return await naps_or(completions)

    texts = ["ok", "block", "ok", "raise", "ok"]
    assert outcomes(run_async(blocks_or, batches(*texts), 4.0)) == [1.0, "timed_out", 1.0, "raised", 1.0]
    threads.clear()
    assert outcomes(run_async(blocks_or, batches("ok", "ok"), 60.0)) == [1.0, 1.0]
    assert threads == {"rewards"}  # a new loop runs while the old one is still blocked
    release.set()


def test_a_blocked_loop_costs_other_runs_on_it_nothing():
    release, calls = threading.Event(), []

    async def patient(completions, **_):
        calls.extend(completions)
        while not release.is_set():
            await asyncio.sleep(0.01)
        return [1.0]

    async def blocks(**_):
        release.wait(60)
        return [1.0]

    found: list = []
    other = threading.Thread(target=lambda: found.extend(run_async(patient, batches("a", "b"))))
    other.start()
    wait_until(lambda: len(calls) == 2)
    assert outcomes(run_async(blocks, batches("a"), 0.5)) == ["timed_out"]
    release.set()
    other.join(60)
    assert outcomes(found) == [1.0, 1.0] and calls == ["a", "b"]


def test_a_block_within_its_own_limit_is_named_and_costs_others_no_time(caplog):
    began = threading.Event()

    async def naps(**_):
        began.set()
        for _ in range(2):
            await asyncio.sleep(0.3)
        return [1.0]

    async def blocks(**_):
        time.sleep(3)
        return [1.0]

    found: list = []
    other = threading.Thread(target=lambda: found.extend(run_async(naps, batches("a", "b"), 2.0)))
    other.start()
    began.wait(60)
    assert outcomes(run_async(blocks, batches("a"), 60.0)) == [1.0]
    other.join(60)
    assert outcomes(found) == [1.0, 1.0]
    assert "reward blocks blocks the event loop" in caplog.text


def test_a_function_that_cancels_all_that_it_finds_costs_its_calls_alone():
    async def cancels(completions, **_):
        for task in asyncio.all_tasks() if completions == ["all"] else ():
            task.cancel()
        await asyncio.sleep(0.01)
        return [1.0]

    assert outcomes(run_async(cancels, batches("a", "all", "b"))) == [1.0, "raised", 1.0]


def test_a_loop_that_is_given_up_ends_with_its_block():
    def loops() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "rewards"}

    before = loops()
    release = threading.Event()

    async def blocks(**_):
        release.wait(60)
        return [1.0]

    for _ in range(2):
        assert outcomes(run_async(blocks, batches("a"), 0.5)) == ["timed_out"]
    assert outcomes(run_async(naps_or, batches("ok"))) == [1.0] and len(loops() - before) >= 2
    release.set()
    wait_until(lambda: len(loops() - before) == 1)


def test_a_function_says_how_many_of_its_calls_may_be_under_way():
    class Judge:
        concurrency = 3

        def __init__(self):
            self.now = self.most = 0

        async def __call__(self, completions, **_):
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(1)
            self.now -= 1
            return [1.0]

    judge = Judge()
    # Eight rounds of 1 s: the wait for a slot does not count
    results = run_async(judge, batches(*"abcdefghijklmnopqrstuvwx"), timeout=7.0)
    assert outcomes(results) == [1.0] * 24 and judge.most == 3
    judge.concurrency = 0
    with pytest.raises(ValueError, match="concurrency=0 must be at least 1"):
        run_async(judge, batches("a"))

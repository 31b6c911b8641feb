"""Executors: results of calls, and recovery from calls that hang, crash, fork or flood."""

from __future__ import annotations

import copy
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest

from torchrl_rloo.rewards.executors import InlineExecutor, ProcessExecutor, ThreadExecutor, make_executor
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
        elif command == "family":  # a child in the group and one outside, then a hang
            sleep = ["sleep", "1000"]
            children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
            Path(argument).write_text(" ".join(str(child.pid) for child in children))
            time.sleep(1000)
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


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


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


def test_children_of_a_hung_call_die_with_it(processes, tmp_path):
    assert outcomes(processes.run(obeys, batches(f"family {tmp_path / 'pids'}"))) == ["timed_out"]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and wait_until(lambda: not any(map(is_running, pids)))


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
    assert wait_until(lambda: not any(is_running(int(number)) for number in first))
    others = {r.scores[0] for r in processes.run(pid, batches(*"abcdef"))}
    assert not others & first
    processes.close()
    assert wait_until(lambda: not any(is_running(int(number)) for number in others))
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


def test_closing_ends_a_run_in_another_thread(processes):
    processes.timeout, errors = None, []

    def run() -> None:
        try:
            processes.run(obeys, batches("hang"))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert wait_until(processes._lock.locked)
    processes.close()
    thread.join(60.0)
    assert errors == ["the ProcessExecutor was closed during a run"]
    assert outcomes(processes.run(obeys, batches("ok"))) == [1.0]


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


KILLED = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background ignore it
from torchrl_rloo.rewards.executors import ProcessExecutor
from torchrl_rloo.rewards.protocol import RewardBatch

def hangs(completions, **_):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(completions[0], "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(completions[0], completions[0] + ".done")
    9 ** (9**9)

ProcessExecutor(2, 1000.0).run(hangs, [RewardBatch(["p"], [path], [[1]]) for path in sys.argv[1:]])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_run_leaves_no_worker_and_no_child_of_one(tmp_path, number):
    paths = [tmp_path / "a", tmp_path / "b"]
    with subprocess.Popen([sys.executable, "-c", KILLED, *paths], stderr=subprocess.DEVNULL) as run:
        done = [Path(f"{path}.done") for path in paths]
        assert wait_until(lambda: all(path.exists() for path in done))
        pids = [int(pid) for path in done for pid in path.read_text().split()]
        assert all(map(is_running, pids))
        run.send_signal(number)
        try:
            run.wait(60)
        finally:
            run.kill()
    assert wait_until(lambda: not any(map(is_running, pids)))


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

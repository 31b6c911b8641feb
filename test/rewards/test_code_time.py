"""Code rewards: the time of a call is bounded for any programs, and rows run concurrently."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from torchrl_rloo.rewards.code import CodeTests
from torchrl_rloo.rewards.protocol import RewardBatch, call_reward
from torchrl_rloo.sandbox import Sandbox, SandboxResult

pytestmark = pytest.mark.usefixtures("sandboxed")

ECHO = "print(input())"
LOOP = "while True: pass"
SLOW = "import time; time.sleep(0.3); print(input())"


class Counted(Sandbox):
    """Sandbox that counts its runs and lets each wait at a barrier."""

    runs = 0

    def run(self, *args, **kwargs) -> SandboxResult:
        with self.lock:
            self.runs += 1
        self.barrier.wait(timeout=600)
        return super().run(*args, **kwargs)


@pytest.fixture
def sandbox() -> Iterator[Counted]:
    sandbox = Counted(timeout=60, cpu_seconds=1)
    sandbox.lock, sandbox.barrier = threading.Lock(), threading.Barrier(1)
    yield sandbox
    sandbox.close()


def pairs(n: int) -> dict[str, list[str]]:
    return {"inputs": [str(i) for i in range(n)], "outputs": [str(i) for i in range(n)]}


def judge(function: CodeTests, programs: list[str], tests: object) -> tuple[list[float | None], list[str]]:
    """Return scores and reasons of programs on one row."""
    n = len(programs)
    call = call_reward(function, RewardBatch(["?"] * n, programs, [[1]] * n, {"tests": [tests] * n}))
    return call.scores, call.extra["code_tests_reason"]


def test_a_row_ends_at_its_first_time_out(sandbox: Counted):
    late = "n = input()\nwhile n == '1': pass\nprint(n)"
    function = CodeTests(sandbox=sandbox, partial=True)
    (score,), (reason,) = judge(function, [late], pairs(6))
    assert score == pytest.approx(1 / 6) and reason == "1 of 6 passed; cpu with code -9"
    assert sandbox.runs == 2
    # Other failures end no row
    wrong = "n = input()\nassert n != '1'\nprint(n)"
    assert judge(function, [wrong], pairs(6))[0] == [pytest.approx(5 / 6)]
    assert sandbox.runs == 8


@pytest.mark.parametrize("partial", [False, True])
def test_the_pairs_of_a_row_share_a_time_limit(sandbox: Counted, partial: bool):
    function = CodeTests(sandbox=sandbox, partial=partial, row_timeout=0.2)
    scores, (reason,) = judge(function, [SLOW], pairs(6))
    assert sandbox.runs == 1
    assert scores == [1 / 6 if partial else 0.0] and reason == "1 of 6 passed; row_timeout=0.2 s"
    assert CodeTests(sandbox=sandbox).row_timeout == 120
    assert judge(CodeTests(sandbox=sandbox, partial=partial), [SLOW], pairs(2))[0] == [1.0]


@pytest.mark.parametrize("tests", [pairs(1), ["assert f(3) == 3"]], ids=["pairs", "assertions"])
def test_rows_run_concurrently(sandbox: Counted, tests: object):
    sandbox.barrier = threading.Barrier(3)  # no row ends unless three run at once
    right, wrong = f"{ECHO if isinstance(tests, dict) else ''}\ndef f(x): return x", "def f(x): return 7"
    scores, _ = judge(CodeTests(sandbox=sandbox, workers=3), [right, wrong, right, wrong, wrong, right], tests)
    assert scores == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert sandbox.runs == 6


def test_one_worker_runs_in_the_calling_thread(sandbox: Counted):
    threads = []
    sandbox.barrier.wait = lambda timeout: threads.append(threading.current_thread())
    assert judge(CodeTests(sandbox=sandbox, workers=1), [ECHO, "x"], pairs(1))[0] == [1.0, 0.0]
    assert set(threads) == {threading.current_thread()}


def test_a_failed_sandbox_ends_the_call(sandbox: Counted):
    sandbox.barrier.abort()
    with pytest.raises(threading.BrokenBarrierError):
        judge(CodeTests(sandbox=sandbox, workers=2), [ECHO] * 20, pairs(1))
    assert sandbox.runs < 20


def test_long_programs_are_not_run(sandbox: Counted):
    function = CodeTests(sandbox=sandbox, max_chars=1000, partial=True)
    longest = ECHO + " " * (1000 - len(ECHO))
    scores, reasons = judge(function, [longest + " ", longest, "(" * 10**6], pairs(1))
    assert scores == [0.0, 1.0, 0.0] and sandbox.runs == 1
    assert reasons[0] == "program has 1001 characters, more than max_chars=1000"


def test_programs_without_a_statement_are_not_run(sandbox: Counted):
    empty = {"inputs": ["1"], "outputs": [""]}
    assert judge(CodeTests(sandbox=sandbox), ["", " \n\t\n", "# print(1)\n  # x"], empty)[0] == [0.0] * 3
    assert sandbox.runs == 0
    assert judge(CodeTests(sandbox=sandbox), ["x = 1  # x"], empty)[0] == [1.0]


def test_time_outs_of_a_large_share_are_logged(sandbox: Counted, caplog: pytest.LogCaptureFixture):
    function = CodeTests(sandbox=sandbox)
    with caplog.at_level(logging.WARNING):
        judge(function, [ECHO] * 3, pairs(2))
        assert not caplog.records
        judge(function, [ECHO, LOOP], pairs(2))
    (record,) = caplog.records
    assert "of code_tests, in 1 of 2 rows: reduce the timeout=60 of the sandbox" in record.getMessage()


@pytest.mark.parametrize(
    "setting", [{"workers": 0}, {"row_timeout": 0.0}, {"max_chars": -1}, {"row_timeout": float("nan")}]
)
def test_settings_must_be_positive(sandbox: Counted, setting: dict):
    with pytest.raises(ValueError, match=r"must be positive"):
        CodeTests(sandbox=sandbox, **setting)

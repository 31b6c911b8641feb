"""Comparison of mathematical answers by math-verify, with limits of time and memory for any input."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchrl_rloo._processes import HelperProcess, short_environment
from torchrl_rloo.rewards.boxed import find_last_box

_LOGGER = logging.getLogger(__name__)
_SCRIPT = Path(__file__).with_name("math_worker.py")
MAX_ANSWER_CHARS = 500  # of a box; longer answers are wrong, unread
MAX_TEXT_CHARS = 4_000  # read at the end of a text, or before the end of its last box
_FULL_TIMEOUTS = 8  # per call of `judge_rows`; further rows get a tenth of the limit
_MIN_TIMEOUT = 0.5  # of further rows
_ROWS_PER_WORKER = 8


class MathJudge:
    """Judge that compares answers with math-verify in worker processes.

    A worker forks the process that compares, and the next one if that exceeds its limit of CPU time or memory (2 GB).
    Its environment holds no keys. The time limits of math-verify are disabled: they need the main thread and do not
    interrupt arithmetic with very large numbers.

    A box of more than 500 characters is a wrong answer, which is not read. Of other texts, the last 4,000 characters
    up to the last box are read, or the last 4,000 without a box.

    Each concurrent thread uses a separate worker. Workers start at the first call, in about a second, and are reused by
    later calls. They end with the judge or with this process, even if it is killed. A pickle does not contain them, and
    a forked process starts new ones.

    Args:
        timeout: seconds of CPU time per comparison.
        workers: maximum number of workers of :meth:`judge_rows`; None uses one per CPU, and at most 8.

    Attributes:
        timeouts: number of comparisons that exceeded a limit.
        lost_seconds: wall-clock time that they took.

    Raises:
        ValueError: if ``timeout`` is not positive and finite, or ``workers`` is less than 1.
        ImportError: if math-verify is not installed.

    Example::

        judge = MathJudge(timeout=5.0)
        judge("1/2", r"The answer is \\boxed{0.5}.")  # True
    """

    def __init__(self, timeout: float = 5.0, *, workers: int | None = None):
        if not (timeout > 0 and math.isfinite(timeout)):
            raise ValueError(f"timeout={timeout} must be a positive, finite number of seconds")
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers} must be at least 1, or None")
        if find_spec("math_verify") is None:
            raise ImportError('MathJudge requires math-verify: pip install "torchrl_rloo[rewards]"')
        self.timeout, self.timeouts, self.lost_seconds, self._example = timeout, 0, 0.0, ""
        self.workers = workers or min(8, os.cpu_count() or 1)
        self._idle: list[_Worker] = []

    def __call__(self, gold: str, text: str) -> bool | None:
        """Return whether ``text`` gives the answer ``gold``.

        Returns:
            True or False, also False if parsing or comparing ``text`` exceeds a limit. None if ``gold`` cannot be
            parsed, or exceeds a limit.
        """
        return self._judge(gold, text, self.timeout)

    def judge_rows(self, rows: Sequence[tuple[str, str]]) -> list[bool | None]:
        """Judge pairs of gold and text, several at a time; warn if time-outs take most of the time.

        After 8 time-outs, the further rows of the call get a tenth of the limit, at least 0.5 s. With limits from 5 s
        up, ``n`` hanging rows take at most ``(8 + workers + n / 10) * timeout`` seconds of CPU time.
        """
        timeouts, lost, start = self.timeouts, self.lost_seconds, time.monotonic()
        short = min(self.timeout, max(_MIN_TIMEOUT, self.timeout / 10))

        def judge(row: tuple[str, str]) -> bool | None:
            spent = self.timeouts - timeouts >= _FULL_TIMEOUTS
            return self._judge(*row, short if spent else self.timeout)

        threads = min(self.workers, math.ceil(len(rows) / _ROWS_PER_WORKER))
        if threads < 2:
            verdicts = [judge(row) for row in rows]
        else:
            with ThreadPoolExecutor(threads) as pool:
                verdicts = list(pool.map(judge, rows))

        timeouts, lost = self.timeouts - timeouts, self.lost_seconds - lost
        if timeouts and lost > (time.monotonic() - start) * threads / 2:
            message = "%d of %d answers exceeded timeout=%g s and took most of the time, such as %s; penalize them"
            _LOGGER.warning(message, timeouts, len(rows), self.timeout, self._example)
        return verdicts

    def form(self, text: str) -> str | None:
        """Return the canonical form of the answer in ``text``: equal for answers that this judge takes for equal.

        Returns:
            The form, or None if the text has no answer, or exceeds a limit.
        """
        shortened = _shorten(text)
        return (self._ask(self.timeout, None, shortened)[0] or None) if shortened else None

    def describe(self, gold: str, text: str) -> tuple[str, str]:
        """Return what was parsed of ``gold`` and of ``text``, for a log; "" for nothing, and beyond 0.5 s."""
        parsed, answer = self._ask(_MIN_TIMEOUT, gold, _shorten(text), True)
        return parsed or "", answer or ""

    def _judge(self, gold: str, text: str, limit: float) -> bool | None:
        parsed, equal = self._ask(limit, gold, _shorten(text))
        if parsed and equal is not None:
            return equal
        return False if parsed else None

    def _ask(self, limit: float, gold: str | None, text: str, describe: bool = False) -> tuple[Any, Any]:
        """Return the replies of a worker: whether the gold was parsed and the verdict, or the form and None.

        With ``describe``, the replies are the texts of both.
        """
        worker, start = self._take_worker(), time.monotonic()
        worker.send([limit, gold, text, describe])
        first = worker.receive()
        second = worker.receive() if first and gold is not None else None
        self._idle.append(worker)
        if not describe and (first is None or first and gold is not None and second is None):
            self.timeouts += 1
            self.lost_seconds += time.monotonic() - start
            self._example = f"{text[-200:]!r} for gold {gold!r:.200}"
        return first, second

    def _take_worker(self) -> _Worker:
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:  # no idle worker, or another thread took it
                return _Worker()
            if worker.is_usable():
                return worker

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": []}


@cache
def shared_judge() -> MathJudge:
    """Return the judge that the votes of this process share."""
    return MathJudge()


def _shorten(text: str) -> str:
    """Return the part of a text that may hold its answer, blank if the answer is too long."""
    start, end = find_last_box(text) or (len(text), len(text))
    return "" if end - start > MAX_ANSWER_CHARS else text[max(0, end - MAX_TEXT_CHARS) : end + 1]


class _Worker(HelperProcess):
    """Handle of a process that runs ``math_worker.py``."""

    def __init__(self):
        environment = short_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, str(_SCRIPT)]
        super().__init__(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        weakref.finalize(self, _close, self.process)
        if self.receive() is None:
            raise RuntimeError(f"the math-verify worker exited with code {self.process.wait()} before it was ready")

    def send(self, request: list[Any]) -> None:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """Return the next reply, or None if the request exceeded a limit or the worker has ended."""
        line = self.process.stdout.readline()
        return json.loads(line) if line else None


def _close(process: subprocess.Popen) -> None:
    process.stdout.close()
    with suppress(OSError):  # a request may be left that a dead worker has not read
        process.stdin.close()

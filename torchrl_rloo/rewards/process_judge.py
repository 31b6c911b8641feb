"""Judges in worker processes, with limits of CPU time and memory for any input: math-verify and JSON Schema."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchrl_rloo.rewards.matching import find_last_box, write_repeating
from torchrl_rloo.runtime.processes import HelperProcess, short_environment

MAX_ANSWER_CHARS = 500  # of a box; longer answers are wrong, unread
MAX_TEXT_CHARS = 4_000  # read at the end of a text, or before the end of its last box
_FULL_TIMEOUTS = 8  # per call of `judge_rows`; further rows get a tenth of the limit
_MIN_TIMEOUT = 0.5  # of further rows
_ROWS_PER_WORKER = 8

_LOGGER = logging.getLogger(__name__)


class ProcessJudge:
    """Judge that compares texts with golds in worker processes, which end and start again at a limit.

    A worker forks the process that compares, and the next one if that exceeds its limit of CPU time or memory (2 GB).
    Its environment holds no keys. Each concurrent thread uses a separate worker. Workers start at the first call and
    are reused by later calls. They end with the judge or with this process, even if it is killed. A pickle does not
    contain them, and a forked process starts new ones. They are no workers of a
    :class:`~torchrl_rloo.rewards.ProcessExecutor`, whose limits are of wall-clock time, which a loaded machine exceeds.

    Attributes:
        timeout: seconds of CPU time per comparison.
        workers: maximum number of workers of :meth:`judge_rows`; by default one per CPU, and at most 8.
        timeouts: number of comparisons that exceeded a limit.
        lost_seconds: wall-clock time that they took.
    """

    def __init__(self, kind: str, timeout: float, *, workers: int | None = None):
        if not (timeout > 0 and math.isfinite(timeout)):
            raise ValueError(f"timeout={timeout} must be a positive, finite number of seconds")
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers} must be at least 1, or None")
        self._kind = kind
        self.timeout, self.timeouts, self.lost_seconds, self._example = timeout, 0, 0.0, ""
        self.workers = workers or min(8, os.cpu_count() or 1)
        self._idle: list[_Worker] = []

    def judge(self, gold: str, text: str, limit: float | None = None) -> bool | str | None:
        """Return whether a text fits a gold, False also if judging the text exceeds the limit (``timeout`` by default).

        It is None if the gold cannot be read, or reading it exceeds the limit. It is the text of an error if there is
        one.
        """
        read, verdict = self._ask(limit, gold, text)
        return (read or None) if read is not True else verdict if verdict is not None else False

    def judge_rows(self, rows: Sequence[tuple[str, str]]) -> list[Any]:
        """Return what :meth:`judge` does for pairs of gold and text, several at a time; warn of many time-outs.

        After 8 time-outs, the further rows of the call get a tenth of the limit, at least 0.5 s. With limits from 5 s
        up, ``n`` hanging rows take at most ``(8 + workers + n / 10) * timeout`` seconds of CPU time.
        """
        return self._ask_all(self.judge, rows)

    def _ask_all(self, ask: Callable[..., Any], rows: Sequence[tuple[str, ...]]) -> list[Any]:
        timeouts, lost, start = self.timeouts, self.lost_seconds, time.monotonic()
        short = min(self.timeout, max(_MIN_TIMEOUT, self.timeout / 10))

        def judge(row: tuple[str, ...]) -> Any:
            spent = self.timeouts - timeouts >= _FULL_TIMEOUTS
            return ask(*row, short if spent else self.timeout)

        threads = max(1, min(self.workers, math.ceil(len(rows) / _ROWS_PER_WORKER)))
        with ThreadPoolExecutor(threads) as pool:
            verdicts = list((map if threads == 1 else pool.map)(judge, rows))
        timeouts, lost = self.timeouts - timeouts, self.lost_seconds - lost
        if timeouts and lost > (time.monotonic() - start) * threads / 2:
            message = "%d of %d answers exceeded timeout=%g s and took most of the time, such as %s; penalize them"
            _LOGGER.warning(message, timeouts, len(rows), self.timeout, self._example)
        return verdicts

    def _ask(self, limit: float | None, gold: str | None, text: str) -> tuple[Any, Any]:
        """Return the replies of a worker: whether the gold was read and the verdict, or the form and None."""
        worker, start = self._take_worker(), time.monotonic()
        worker.send([self.timeout if limit is None else limit, gold, text])
        first = worker.receive()
        second = worker.receive() if first is True and gold is not None else None
        self._idle.append(worker)
        if first is None or first is True and gold is not None and second is None:
            self.timeouts += 1
            self.lost_seconds += time.monotonic() - start
            self._example = f"{text[-200:]!r} for gold {gold!r:.200}"
        return first, second

    def _take_worker(self) -> _Worker:
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:  # no idle worker, or another thread took it
                return _Worker(self._kind)
            if worker.is_usable():
                return worker

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": []}


class MathJudge(ProcessJudge):
    """Judge that compares answers with math-verify, without its time limits: these need the main thread.

    A box of more than 500 characters is a wrong answer, which is not read. Of other texts, the last 4,000 characters
    up to the last box are read, or the last 4,000 without a box.
    """

    def __init__(self, timeout: float = 5.0, *, workers: int | None = None):
        super().__init__("math", timeout, workers=workers)
        if find_spec("math_verify") is None:
            raise ImportError('MathJudge requires math-verify: pip install "torchrl_rloo[rewards]"')

    def judge(self, gold: str, text: str, limit: float | None = None) -> bool | None:
        """Return whether ``text`` gives the answer ``gold``; see :meth:`ProcessJudge.judge`."""
        return super().judge(write_repeating(gold), _shorten(text), limit)

    def form(self, text: str, limit: float | None = None) -> str | None:
        """Return the canonical form of a text's answer, equal for answers that are equal; None without an answer."""
        shortened = _shorten(text)
        return (self._ask(limit, None, shortened)[0] or None) if shortened else None

    def forms(self, texts: Sequence[str]) -> dict[str, str | None]:
        """Return the canonical form by text, as :meth:`form` does, within the time of :meth:`judge_rows`."""
        distinct = [*dict.fromkeys(texts)]
        return dict(zip(distinct, self._ask_all(self.form, [(text,) for text in distinct]), strict=True))


@cache
def shared_judge() -> MathJudge:
    """Return the judge that the votes of this process share."""
    return MathJudge()


def _shorten(text: str) -> str:
    """Return the part of a text that may hold its answer, blank if the answer is too long."""
    if (span := find_last_box(text)) is None:
        return write_repeating(text[-MAX_TEXT_CHARS:])
    start, end = span
    if end - start > MAX_ANSWER_CHARS:
        return ""
    before = text[max(0, end - MAX_TEXT_CHARS) : start].removesuffix("{").rstrip()  # math-verify requires braces
    return write_repeating(f"{before}{{{text[start:end]}}}")


class _Worker(HelperProcess):
    """Handle of a process that runs ``judge_worker.py``."""

    def __init__(self, kind: str):
        environment = short_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, str(Path(__file__).with_name("judge_worker.py")), kind]
        super().__init__(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        weakref.finalize(self, _close, self.process)
        if self.receive() is None:
            raise RuntimeError(f"the {kind} judge exited with code {self.process.wait()} before it was ready")

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

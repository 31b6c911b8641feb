"""Comparison of mathematical answers by math-verify, with a time limit that holds for any input and thread."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_LOGGER = logging.getLogger(__name__)
_SCRIPT = Path(__file__).with_name("math_worker.py")


class MathJudge:
    """Judge that compares answers with math-verify in worker processes.

    A comparison that times out ends its worker, and the next call starts a new one. The time limits of math-verify are
    disabled: they need the main thread and do not interrupt arithmetic with very large numbers. The worker enforces
    the limit, so it also holds after this process is killed.

    Each concurrent thread uses a separate worker. Workers start at the first call, in about a second, are reused by
    later calls and end with the judge. A pickle does not contain them, and a forked process starts new ones.

    Args:
        timeout: seconds per comparison.

    Attributes:
        timeouts: number of comparisons that ended their worker.

    Raises:
        ValueError: if ``timeout`` is not positive and finite.
        ImportError: if math-verify is not installed.

    Example::

        judge = MathJudge(timeout=5.0)
        judge("1/2", r"The answer is \\boxed{0.5}.")  # True
    """

    def __init__(self, timeout: float = 10.0):
        if not (timeout > 0 and math.isfinite(timeout)):
            raise ValueError(f"timeout={timeout} must be a positive, finite number of seconds")
        if find_spec("math_verify") is None:
            raise ImportError('MathJudge requires math-verify: pip install "torchrl_rloo[rewards]"')
        self.timeout, self.timeouts = timeout, 0
        self._idle: list[_Worker] = []

    def __call__(self, gold: str, text: str) -> bool | None:
        """Return whether ``text`` gives the answer ``gold``.

        Returns:
            True or False, also False if parsing or comparing ``text`` times out. None if ``gold`` cannot be parsed, or
            times out.
        """
        worker = self._take_worker()
        # Read two replies: whether the gold was parsed, and whether the text equals it
        worker.send([gold, text])
        parsed = worker.receive()
        equal = worker.receive() if parsed else False
        # A worker without a verdict has ended; keep others for later calls
        if parsed is None or equal is None:
            self.timeouts += 1
            _LOGGER.warning(
                "no verdict within %g s (worker exited with code %s) on gold %.200r, text ending in %r",
                self.timeout,
                worker.process.wait(),
                gold,
                text[-200:],
            )
        else:
            self._idle.append(worker)
        return bool(equal) if parsed else None

    def _take_worker(self) -> _Worker:
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:  # no idle worker, or another thread took it
                return _Worker(self.timeout)
            if worker.owner == os.getpid() and worker.process.poll() is None:
                return worker

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": []}


class _Worker:
    """Handle of a process that runs ``math_worker.py``."""

    def __init__(self, timeout: float):
        self.owner = os.getpid()  # a forked process inherits the pipes but must not use them
        self.process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), str(timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        weakref.finalize(self, _end, self.process, self.owner)
        if self.receive() is None:
            raise RuntimeError(f"the math-verify worker exited with code {self.process.wait()} before it was ready")

    def send(self, request: list[str]) -> None:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """Return the next reply, or None if the worker has ended."""
        line = self.process.stdout.readline()
        return json.loads(line) if line else None


def _end(process: subprocess.Popen, owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.communicate()

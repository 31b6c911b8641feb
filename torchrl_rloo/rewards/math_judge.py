"""Whether two mathematical answers are equal, by math-verify, with a time limit that holds for any input and thread."""

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
    """Compares answers by math-verify in worker processes, which a hang ends and the next call replaces.

    math-verify's own time limits are off: they need the main thread, and do not interrupt the arithmetic of very large
    numbers. The limit here is kept by the worker itself, so it also holds when this process is killed.

    Each thread that judges at the same time has a worker. Workers start on first use, in about a second, outlive calls
    and end with the judge. A judge pickles without its workers, and a forked process starts its own.

    Args:
        timeout: seconds one comparison may take.

    Attributes:
        timeouts: comparisons that ended their worker.

    Raises:
        ValueError: if ``timeout`` is not positive and finite.
        ImportError: if math-verify is not installed.
    """

    def __init__(self, timeout: float = 10.0):
        if not (timeout > 0 and math.isfinite(timeout)):
            raise ValueError(f"timeout={timeout} must be a positive, finite number of seconds")
        if find_spec("math_verify") is None:
            raise ImportError('math-verify is not installed: pip install "torchrl_rloo[rewards]"')
        self.timeout, self.timeouts = timeout, 0
        self._idle: list[_Worker] = []

    def __call__(self, gold: str, text: str) -> bool | None:
        """Whether ``text`` gives the answer ``gold``.

        Returns:
            True or False, False too if parsing or comparing ``text`` takes too long; None if ``gold`` cannot be parsed
            in time.
        """
        worker = self._take()
        worker.send([gold, text])
        parsed = worker.receive()
        equal = worker.receive() if parsed else False
        if parsed is None or equal is None:
            self.timeouts += 1
            _LOGGER.warning(
                "no verdict within %g s (worker ended with code %s) on gold %.200r, text ending in %r",
                self.timeout,
                worker.process.wait(),
                gold,
                text[-200:],
            )
        else:
            self._idle.append(worker)
        return bool(equal) if parsed else None

    def _take(self) -> _Worker:
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:  # none, or another thread was faster
                return _Worker(self.timeout)
            if worker.owner == os.getpid() and worker.process.poll() is None:
                return worker

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": []}


class _Worker:
    """A running ``math_worker.py``."""

    def __init__(self, timeout: float):
        self.owner = os.getpid()  # a fork inherits the pipes, and must not use them
        self.process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), str(timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        weakref.finalize(self, _end, self.process, self.owner)
        if self.receive() is None:
            raise RuntimeError(f"the math-verify worker ended with code {self.process.wait()} before it was ready")

    def send(self, request: list[str]) -> None:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """The next reply, or None if the worker has ended."""
        line = self.process.stdout.readline()
        return json.loads(line) if line else None


def _end(process: subprocess.Popen, owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.communicate()

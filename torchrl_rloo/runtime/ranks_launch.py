"""Launcher of the ranks of one machine, with the environment of ``torchrun``; it imports nothing heavy.

The agent of ``torchrun`` kills its ranks 30 seconds after a stop signal, unless told otherwise. A step may take longer,
so this launcher forwards the signal to rank 0 and waits for its checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from threading import Thread
from types import FrameType
from typing import Protocol

from torchrl_rloo.runtime import reaper
from torchrl_rloo.runtime.ranks_watch import EXIT_CODE

_END_S = 15.0  # for the other ranks to end after the first failure, or after the end of rank 0
_POLL_S = 0.05
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}  # variables of the ranks except 0


class Process(Protocol):
    """Process of a rank, with the interface of ``subprocess.Popen``.

    Attributes:
        returncode: exit code, or minus the number of the signal that ended it. None while it runs.
    """

    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit code, or None."""

    def wait(self) -> int | None:
        """Wait for the end."""

    def kill(self) -> None:
        """Kill the process."""

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""


def launch(command: Sequence[str], size: int) -> int:
    """Run a command as several ranks on this machine, and wait for all of them.

    Rank 0 has the terminal. Of the others only standard error is shown, each line after ``[rank N]``. The first SIGINT
    or SIGTERM goes to rank 0, which stops the run after the step; the second one aborts it, and the third one kills.
    The ranks are killed with this process.

    Args:
        command: program and its arguments.
        size: number of ranks.

    Returns:
        Exit code of the rank that failed first, 128 + N after signal N; 0 if none failed.

    Raises:
        ValueError: if ``size`` is below 1.

    Example:
        >>> import sys
        >>> launch([sys.executable, "-c", "import os; raise SystemExit(int(os.environ['RANK']))"], 2)
        1
    """
    if size < 1:
        raise ValueError(f"ranks={size} must be at least 1")
    with reserve_port() as reserved:
        common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
        common["MASTER_PORT"] = reserved.getsockname()[1]
        ranks: list[subprocess.Popen] = []
        signals = Signals(ranks)
        try:
            with signals:
                for rank in range(size):
                    ranks.append(_start(command, {**common, "RANK": rank, "LOCAL_RANK": rank}))
                for rank, process in enumerate(ranks[1:], 1):
                    Thread(target=_copy_lines, args=(rank, process.stderr), daemon=True).start()
                return wait_for_ranks(ranks)
        finally:
            kill_ranks(ranks)


def reserve_port(address: str = "127.0.0.1") -> socket.socket:
    """Return a socket that keeps its port free for the store of rank 0, which may still listen on it.

    Args:
        address: address of this machine; an empty one stands for all.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((address, 0))
    return reserved


def _start(command: Sequence[str], variables: dict[str, object]) -> subprocess.Popen:
    first, launcher = variables["RANK"] == 0, os.getpid()
    quiet = {} if first else {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    environment = os.environ | ({} if first else QUIET) | {name: str(value) for name, value in variables.items()}

    def end_with_launcher() -> None:
        reaper.die_with_parent(launcher)

    return subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=end_with_launcher, **quiet)


def _copy_lines(rank: int, stream: Iterable[bytes]) -> None:
    """Print the lines of a rank's standard error, except progress bars."""
    for line in stream:
        write_lines(rank, [line.rstrip(b"\n")])


def write_lines(rank: int, lines: Iterable[bytes]) -> None:
    """Print lines of a rank's standard error, except progress bars."""
    for line in lines:
        if b"\r" not in line:
            sys.stderr.write(f"[rank {rank}] {line.decode(errors='replace')}\n")
            sys.stderr.flush()


class Signals:
    """Context manager that passes stop signals on to rank 0."""

    def __init__(self, ranks: Sequence[Process]):
        self.ranks, self.count = ranks, 0

    def __enter__(self) -> None:
        self.previous = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 2:
            kill_ranks(self.ranks)
        elif self.ranks:
            self.ranks[0].send_signal(number)


def wait_for_ranks(ranks: Sequence[Process]) -> int:
    """Wait for all ranks; once one has failed, or rank 0 has ended, kill those that continue."""
    codes: dict[int, int] = {}  # in the order of their ends
    deadline = float("inf")
    while len(codes) < len(ranks):
        for rank, process in enumerate(ranks):
            if rank not in codes and process.poll() is not None:
                codes[rank] = process.returncode
                if process.returncode or rank == 0:
                    deadline = min(deadline, time.monotonic() + _END_S)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    # Ranks that ended because of another one have a code that tells so
    failed = sorted((code for code in codes.values() if code), key=lambda code: code == EXIT_CODE)
    if not failed and len(codes) < len(ranks):
        left = sorted(set(range(len(ranks))) - set(codes))
        print(f"error: ranks {left} did not end within {_END_S:g} s after rank 0", file=sys.stderr, flush=True)
        return EXIT_CODE
    code = failed[0] if failed else 0
    return 128 - code if code < 0 else code


def kill_ranks(ranks: Sequence[Process]) -> None:
    """Kill the ranks that continue."""
    for process in ranks:
        if process.poll() is None:
            process.kill()
            process.wait()

"""Ranks as processes that a launcher of ours starts: passes on signals and output, waits for them, and ends them."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Protocol

EXIT_CODE = 75  # exit status of a rank that ends because another one failed (EX_TEMPFAIL)
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


def reserve_port(address: str = "127.0.0.1") -> socket.socket:
    """Return a socket that keeps its port free for the store of rank 0, which may still listen on it.

    Args:
        address: address of this machine; an empty one stands for all.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((address, 0))
    return reserved


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

"""Kills worker processes when the process that started them is gone; run as a script, with the standard library alone.

A hung worker does not see that its socket has closed, and a signal on the parent's death comes when the *thread* that
started the worker ends, so that a process has to watch. It reads from standard input a line ``+<pid>`` for each worker
that has started and ``-<pid>`` for each that has ended; at the end of the input, which comes however the writer ends,
it kills what is left.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Watches until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    alive: set[int] = set()
    for line in sys.stdin:
        (alive.add if line[0] == "+" else alive.discard)(int(line[1:]))
    for worker in alive:
        kill_tree(worker)


def kill_tree(worker: int) -> None:
    """Kills a process that leads a group: it, its group, and descendants elsewhere as far as ``/proc`` shows them."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # behind the name, which may hold anything
        except OSError:  # has ended
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    family = {worker}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    for target in (-worker, *family):
        try:
            os.kill(target, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # has ended, or runs as another user
            continue


if __name__ == "__main__":
    main()

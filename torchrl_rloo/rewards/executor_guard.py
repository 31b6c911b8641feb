"""Guard process that kills the workers when the training process dies; a script that needs only the standard library.

A hung worker does not notice that its socket has closed. A parent-death signal is no alternative: it fires when the
*thread* that started the worker ends. The guard reads from standard input a line ``+<pid>`` for each started worker and
``-<pid>`` for each ended one. The input ends when the training process ends, and the guard kills the remaining workers.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Watch the workers until standard input ends, then kill those that remain."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    alive: set[int] = set()
    for line in sys.stdin:
        (alive.add if line[0] == "+" else alive.discard)(int(line[1:]))
    for worker in alive:
        kill_tree(worker)


def kill_tree(worker: int) -> None:
    """Kill the leader of a process group, its group, and its descendants in other groups that ``/proc`` lists."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # the name in parentheses may hold any character
        except OSError:  # the process has ended
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    family = {worker}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    for target in (-worker, *family):
        try:
            os.kill(target, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # the process has ended, or runs as another user
            continue


if __name__ == "__main__":
    main()

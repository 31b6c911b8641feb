"""Processes of the system, read from ``/proc``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from support.waiting import PATIENCE, wait_until


def process_state(pid: int) -> str:
    """Return the state letter of a process, such as ``S`` or ``Z``; ``X`` if there is none."""
    try:
        return _fields(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not waited for it."""
    return process_state(pid) in "ZX"


def wait_until_gone(pids: int | Iterable[int], timeout: float = PATIENCE) -> None:
    """Wait until all processes have ended."""
    left = [pids] if isinstance(pids, int) else list(pids)
    wait_until(lambda: all(map(is_gone, left)), timeout, f"the end of processes {left}")


def children(pid: int, command: str = "") -> list[int]:
    """Return the children of ``pid`` with ``command`` in their command line, except zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = _fields(int(path.name))[:2]
            if int(parent) == pid and state not in "ZX" and command in (path / "cmdline").read_text():
                found.append(int(path.name))
        except (FileNotFoundError, ProcessLookupError):  # ended after it was listed
            continue
    return found


def descendants(pid: int) -> list[int]:
    """Return the processes below ``pid``, children before grandchildren."""
    found = children(pid)
    for child in found:  # grows while it is read
        found.extend(children(child))
    return found


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

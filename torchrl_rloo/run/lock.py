"""Lock of a directory, so that one process at a time writes to it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from errno import EINVAL, EMLINK, ENOLCK, ENOSYS, EOPNOTSUPP
from functools import cache
from pathlib import Path
from typing import Any

from torchrl_rloo.runtime.files import SAFE_FLAGS, explained, make_folder, regular_size, remove_temporaries

_log = logging.getLogger(__name__)

FILE = ".lock"
_WITHOUT_LOCKS = (ENOLCK, ENOSYS, EOPNOTSUPP, EINVAL)  # errors of file systems that have no locks
_PATIENCE = 1.0  # seconds to wait for a process that is about to end


class DirectoryInUseError(RuntimeError):
    """Error for a directory to which another process, or another run of this one, writes."""


class DirectoryLock:
    """Lock of a directory for writing, held until :meth:`close` or the end of the process.

    The lock belongs to the process, which may take it any number of times; the last :meth:`close` frees it. The kernel
    frees it when the process ends in any way, also if children forked by Python go on. On a file system without locks
    it only warns. With ``sole``, a second such lock of this process is refused.
    """

    def __init__(self, directory: str | Path, *, sole: bool = False) -> None:
        self.directory = Path(directory)
        make_folder(self.directory)
        self.close = weakref.finalize(self, _release, *_acquire(self.directory, sole), sole)
        self._pid = os.getpid()

    @property
    def held(self) -> bool:
        """True until :meth:`close`, but never in a forked child, which has no locks."""
        return self.close.alive and self._pid == os.getpid()

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass
class _Held:
    """Lock of this process."""

    path: Path
    descriptor: int
    holders: int = 0
    sole: bool = False


_GUARD = threading.RLock()
_held: dict[tuple[int, int], _Held] = {}  # by device and inode of the directory


def _acquire(directory: Path, sole: bool) -> tuple[tuple[int, int], int]:
    """Lock a directory, and return its device and inode with the id of this process."""
    _close_in_children()
    with _GUARD:
        status = directory.stat()
        key = (status.st_dev, status.st_ino)
        if key not in _held:
            path = directory.absolute() / FILE
            _held[key] = _Held(path, _lock(path))
            _clean(directory)
        held = _held[key]
        if sole and held.sole:
            raise DirectoryInUseError(
                f"directory={directory} has another open run in this process; leave its `with` block first, or set "
                "another directory"
            )
        held.holders, held.sole = held.holders + 1, held.sole or sole
        return key, os.getpid()


def _release(key: tuple[int, int], pid: int, sole: bool) -> None:
    if pid != os.getpid():  # a forked child has no locks
        return
    with _GUARD:
        held = _held[key]
        held.holders, held.sole = held.holders - 1, held.sole and not sole
        if held.holders == 0:
            del _held[key]
            with suppress(OSError):  # the directory may be gone or read-only by now
                if _is_at(held.descriptor, held.path):
                    held.path.unlink()
            os.close(held.descriptor)


@cache
def _close_in_children() -> None:
    """Close locks in forked children, which would hold them after the end of this process."""

    def close() -> None:
        global _GUARD
        _GUARD = threading.RLock()  # another thread may hold the old one, and no thread of it is left
        for held in _held.values():
            os.close(held.descriptor)
        _held.clear()

    os.register_at_fork(after_in_child=close)


def _lock(path: Path) -> int:
    """Lock a file, and return its descriptor."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        with explained(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | SAFE_FLAGS, 0o666)
        try:
            with explained(path):
                regular_size(descriptor)
                if os.fstat(descriptor).st_nlink > 1:  # the holder would be written into another file
                    raise OSError(EMLINK, os.strerror(EMLINK))
            if _take(descriptor, path) and _is_at(descriptor, path):
                with explained(path):
                    _write_holder(descriptor)
                return descriptor
            if time.monotonic() > deadline:
                raise DirectoryInUseError(
                    f"directory={path.parent} is in use by {_read_holder(descriptor)}; wait for its end or end it, or "
                    "set another directory (output_dir)"
                )
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(0.05)


def _take(descriptor: int, path: Path) -> bool:
    """Return whether the lock is free, and take it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        _log.warning(
            "the file system of %s has no locks (%s): make sure that no other process writes to it", path.parent, error
        )
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether ``path`` is still the open file, which the previous holder may have removed."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _write_holder(descriptor: int) -> None:
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": platform.node(), "since": since}).encode(), 0)


def _read_holder(descriptor: int) -> str:
    """Describe the process that holds the lock."""
    try:
        found: Any = json.loads(os.pread(descriptor, 1000, 0))
        pid, host, since = int(found["pid"]), ascii(found["host"])[1:-1], ascii(found["since"])[1:-1]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
    ended = host == platform.node() and not Path(f"/proc/{pid}").exists()
    left = f", which has ended and left a child that keeps {FILE} open" if ended else ""
    return f"process {pid} on {host} since {since}{left}"


def _clean(directory: Path) -> None:
    """Remove temporary files of killed runs from a directory and from its folders without a lock."""
    folders = [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]
    for folder in [directory, *(folder for folder in folders if not (folder / FILE).exists())]:
        remove_temporaries(folder)

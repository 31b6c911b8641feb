"""Files that are either wholly written or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which becomes ``path`` when the block ends without an exception.

    Until then, and after an exception or a kill, ``path`` is what it was before. All writes of a directory go through
    one temporary name, so that the next write takes the place of whatever a killed process left there. Hence one
    process may write to a directory at a time, any number may read.

    Args:
        path: the file to write; its directory exists.
    """
    temporary = path.parent / ".incomplete.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def synced_size(path: Path) -> int:
    """Bring a file that was appended to onto the disk, and return its size in bytes."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def sync_directory(directory: Path) -> None:
    """Makes new and removed names in ``directory`` survive a power cut, where the system has a way to ask for it."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

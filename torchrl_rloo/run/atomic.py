"""Atomic and durable writing of files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` when the block ends without an exception.

    After an exception or a kill, ``path`` is unchanged. All writes to a directory use one temporary name, so the next
    write replaces the leftover of a killed process. Only one process may write to a directory at a time, and any number
    may read.

    Args:
        path: file to write, in an existing directory.

    Yields:
        The temporary file, open for binary writing.
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
    """Flush an appended file to disk and return its size in bytes."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def sync_directory(directory: Path) -> None:
    """Flush the names in ``directory`` to disk, so that they survive a power failure; does nothing without POSIX."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

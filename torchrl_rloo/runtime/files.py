"""Writing of files: atomic, durable, through no symbolic link, with errors that name the path and the remedy."""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

TEMPORARIES = ".incomplete*.tmp"  # pattern of the temporary names
SAFE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not block
_TEMPORARY_FOLDER = re.compile(r"\.incomplete-[0-9]+-[0-9a-f]{12}\.tmp")
_FULL = "free space, or set another output directory"
_REASONS = {
    errno.ENOSPC: ("the disk is full", _FULL),
    errno.EDQUOT: ("the disk quota is used up", _FULL),
    errno.EFBIG: ("the file would exceed the size limit of this process", "raise it (ulimit -f)"),
    errno.EROFS: ("the file system is read-only", "make it writable, or set another output directory"),
    errno.EACCES: ("permission denied", "make it writable for this user, or set another output directory"),
    errno.EPERM: ("operation not permitted", "make it writable for this user, or set another output directory"),
    errno.ELOOP: ("it is a symbolic link, which is not followed", "remove it"),
    errno.EMLINK: ("it is a hard link to another file, which would change", "remove it"),
    errno.EISDIR: ("it is a folder", "move it away"),
    errno.EEXIST: ("it is no folder", "move it away"),
    errno.ENOTDIR: ("a part of its path is a file", "move that file away, or set another output directory"),
    errno.ENXIO: ("it is not a regular file", "remove it"),
}


def cache_folder() -> Path:
    """Return the folder of built and converted models: the user's cache, unless a variable names another."""
    if cache := os.environ.get("TORCHRL_RLOO_CACHE"):
        return Path(cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrl_rloo"


@contextmanager
def explained(path: str | os.PathLike) -> Iterator[None]:
    """Replace an ``OSError`` of the block by one whose line names the path, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        raise _explain(error, path) from error


def _explain(error: OSError, path: str | os.PathLike) -> OSError:
    if error.errno is None or error.strerror is None:  # explained before
        return error
    reason, remedy = _REASONS.get(error.errno, (error.strerror, "check the path and its disk"))
    found = type(error)(f"cannot write {os.fspath(path)}: {reason}; {remedy}")
    found.errno = error.errno
    return found


def make_folder(path: Path) -> None:
    """Create a folder with its parents, if it is missing."""
    with explained(path):
        path.mkdir(parents=True, exist_ok=True)


class _Recorder(io.FileIO):
    """File that keeps the error of a failed write, which writers of formats hide behind their own."""

    fault: OSError | None = None

    def write(self, content) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.fault = error
            raise


def temporary_name(path: Path) -> Path:
    """Return a new name for a file or folder that will replace ``path``; see :func:`remove_temporaries`."""
    return path.with_name(f".incomplete-{os.getpid()}-{secrets.token_hex(6)}.tmp")


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` when the block ends without an exception.

    After an exception or a kill, ``path`` is unchanged. Each write has a new temporary name, which a kill leaves behind
    for :func:`remove_temporaries`. A symbolic link at ``path`` is replaced; its target stays as it is.
    """
    temporary = temporary_name(path)
    with explained(path):
        raw = _Recorder(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE_FLAGS, 0o666), "wb")
    try:
        try:
            with io.BufferedWriter(raw) as file:
                yield file
                file.flush()
                with explained(path):
                    os.fsync(file.fileno())
        except Exception as error:
            if raw.fault is None:
                raise
            raise _explain(raw.fault, path) from error
        with explained(path):
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    with explained(path):
        sync_directory(path.parent)


def write_text(path: Path, text: str) -> Path:
    """Write UTF-8 text atomically, with lone surrogates as escapes, and return the path."""
    with atomic_write(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))
    return path


def append(path: Path, content: bytes) -> None:
    """Append lines to a regular file, all or none; create the file if it is missing.

    An incomplete last line, which a killed writer left, is ended first, so that it damages no other.
    """
    with explained(path):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | SAFE_FLAGS, 0o666)
        try:
            size = regular_size(descriptor)
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                content = b"\n" + content
            try:
                while content:
                    content = content[os.write(descriptor, content) :]
            except OSError:
                os.ftruncate(descriptor, size)  # a partial line would damage the next one
                raise
        finally:
            os.close(descriptor)


def regular_size(descriptor: int) -> int:
    """Return the size of an open file in bytes, or raise if it is not a regular file."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
    return status.st_size


def remove_temporaries(folder: Path) -> None:
    """Remove the temporary files and folders that killed writers left in a folder."""
    for path in folder.glob(TEMPORARIES):
        if path.is_dir() and not path.is_symlink():
            if _TEMPORARY_FOLDER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            continue
        with suppress(OSError):
            path.unlink(missing_ok=True)


def refuse_links(folder: Path, names: Iterable[str], *, below: bool = False) -> None:
    """Refuse symbolic links at ``names`` in a folder, with ``below`` also in these folders."""
    for name in names:
        for path in (folder / name, *((folder / name).rglob("*") if below else ())):
            if path.is_symlink():
                with explained(path):
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def synced_size(path: Path) -> int:
    """Flush an appended file to disk and return its size in bytes."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def sync_directory(directory: Path) -> None:
    """Flush the names in ``directory`` to disk, so that they survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

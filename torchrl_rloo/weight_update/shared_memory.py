"""Shared-memory transport: each version in one file in memory, for engines in other processes of the same machine."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from torchrl_rloo.weight_update.protocol import TensorInfo, unpack
from torchrl_rloo.weight_update.transport import PackedStorage, Receiver, Transport

MEMORY = Path("/dev/shm")
_PREFIX = "torchrl_rloo-weights-"


class SharedMemoryReceiver(Receiver):
    """Receiver that maps the trainer's file of a version and returns views of it."""

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int):
        self._buffers: dict[str, torch.Tensor] = {}

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        path, size, offset = payload["path"], payload["size"], payload["offset"]
        if path not in self._buffers:
            # The trainer alternates between two files; views of another one keep its memory until they are dropped
            while len(self._buffers) > 1:
                del self._buffers[next(iter(self._buffers))]
            self._buffers[path] = _map(path, size, payload["uid"])
        return unpack(self._buffers[path][offset : offset + payload["nbytes"]], infos)

    def close(self) -> None:
        self._buffers = {}


class SharedMemoryStorage(PackedStorage):
    """Version in one mapped file, which exists until it is released.

    The file is locked, so that a later process can recognize the files of a killed one.
    """

    def __init__(self, directory: Path, sizes: Sequence[int]):
        nbytes = max(sum(sizes), 1)
        handle, self.path = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
        self.remove = weakref.finalize(self, _remove, self.path, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not os.fstat(handle).st_nlink:
                raise OSError(f"{self.path} was removed by another process")
            os.posix_fallocate(handle, 0, nbytes)  # otherwise a full file system kills the writing process
            super().__init__(_map(self.path, nbytes, os.geteuid()), sizes)
        except BaseException:
            self.remove()
            raise

    def opener(self) -> Callable[[], PackedStorage]:
        return partial(_open_packed, self.path, os.geteuid(), self.sizes)

    def get(self, bucket: int) -> dict[str, Any]:
        place = {"offset": self.offsets[bucket], "nbytes": self.sizes[bucket]}
        return {"path": self.path, "size": self.buffer.numel(), "uid": os.geteuid(), **place}


class SharedMemory(Transport):
    """Transport that packs each version once into a file that all workers map.

    Staged weights are views of the file, so they take no memory in the workers. A file is written again for a later
    version only if every engine has finished the earlier one. Otherwise a new file replaces it, and a worker that is
    late still reads the old one. Files of killed processes are removed by the next process that makes one.

    A file has a random name and is closed to other users, so the workers must run as the trainer's user or as root.
    They refuse links, and files of other users or that others could write.

    Args:
        directory: directory of the files. None takes ``/dev/shm``, or the directory for temporary files if
            ``/dev/shm`` has no room.
    """

    name, receiver, storage_class = "shared_memory", SharedMemoryReceiver, SharedMemoryStorage

    def __init__(self, directory: str | PathLike | None = None):
        self.directory = directory
        self._files: weakref.WeakSet[SharedMemoryStorage] = weakref.WeakSet()
        self._spare: SharedMemoryStorage | None = None

    def store(self, version: int, sizes: Sequence[int], keep: bool) -> SharedMemoryStorage:
        spare, self._spare = self._spare, None
        if spare is not None and spare.sizes == list(sizes):
            return spare
        if spare is not None:
            spare.remove()
        storage = self._make_file(sizes)
        self._files.add(storage)
        return storage

    def release(self, storage: SharedMemoryStorage, reusable: bool) -> None:
        if reusable and self._spare is None:
            self._spare = storage
        else:
            storage.remove()

    def close(self) -> None:
        self._spare = None
        for storage in list(self._files):
            storage.remove()

    def _make_file(self, sizes: Sequence[int]) -> SharedMemoryStorage:
        # Prefer files in memory, and fall back to a directory on disk
        candidates = [MEMORY, Path(tempfile.gettempdir())] if self.directory is None else [Path(self.directory)]
        for directory in candidates:
            _remove_orphans(directory)
            try:
                return self.storage_class(directory, sizes)
            except OSError as error:
                cause = error
        raise OSError(
            f"no room for {sum(sizes)} bytes of weights in {' or '.join(map(str, candidates))} ({cause}); set another "
            "directory of SharedMemory, or use Files(directory)"
        ) from cause


def _open_packed(path: str, uid: int, sizes: Sequence[int]) -> PackedStorage:
    """Open the file of another process."""
    return PackedStorage(_map(path, max(sum(sizes), 1), uid), sizes)


def _map(path: str, size: int, uid: int) -> torch.Tensor:
    """Map a file that the trainer's user owns, and that no other user can have written."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} is not on this machine; use the transport VLLMNCCL() or Files(directory) for engines on other "
            "machines"
        ) from error
    except OSError as error:
        raise PermissionError(
            f"{path} is no file of weights ({error.strerror}); set a directory of your own"
        ) from error
    try:
        status = os.fstat(handle)
        others = stat.S_IMODE(status.st_mode) & 0o077
        if not stat.S_ISREG(status.st_mode) or others or status.st_uid != uid:
            raise PermissionError(
                f"{path} has uid={status.st_uid} mode={status.st_mode:o}, must be a file of uid={uid} with mode 600; "
                "set a directory of your own"
            )
        return torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)
    finally:
        os.close(handle)


def _remove(path: str, handle: int) -> None:
    Path(path).unlink(missing_ok=True)
    os.close(handle)  # releases the lock


def _remove_orphans(directory: Path) -> None:
    """Remove files whose process was killed, which no process has locked."""
    for path in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, locked, or already removed
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)

"""Weights through two files in memory, for engines in other processes of the same machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from torchrl_rloo.modules.engines.weight_protocol import TensorInfo, pack
from torchrl_rloo.weight_update.transports import Transport

MEMORY = Path("/dev/shm")


class SharedMemory(Transport):
    """Packs buckets in turn into two files that all workers map.

    The files have no name any more once all workers have mapped them, so that nothing is left of them when the last
    process that does has ended, however it ends.

    Args:
        directory: where they are; None means ``/dev/shm``, or the directory for temporary files if that has no room.
    """

    name = "shared_memory"

    def __init__(self, directory: str | PathLike | None = None):
        self.directory = directory
        self._paths: list[str] = []
        self._buffers: list[torch.Tensor] = []

    def open(self, workers: Sequence[int], nbytes: int, timeout: float) -> list[dict[str, Any]]:
        self.close()
        try:
            self._paths = self._make_files(nbytes)
            self._buffers = [torch.from_file(p, shared=True, size=nbytes, dtype=torch.uint8) for p in self._paths]
        except BaseException:
            self.close()
            raise
        return [{"paths": self._paths, "nbytes": nbytes} for _ in workers]

    def connected(self) -> None:
        self._unlink()

    def send(
        self, version: int, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        pack(tensors, self._buffers[bucket % 2])
        return {"buffer": bucket % 2}

    def close(self) -> None:
        self._unlink()
        self._buffers = []

    def _make_files(self, nbytes: int) -> list[str]:
        candidates = [MEMORY, Path(tempfile.gettempdir())] if self.directory is None else [Path(self.directory)]
        for directory in candidates:
            paths: list[str] = []
            try:
                for _ in range(2):
                    handle, path = tempfile.mkstemp(prefix="torchrl_rloo-weights-", dir=directory)
                    paths.append(path)
                    try:
                        os.posix_fallocate(handle, 0, nbytes)  # else a full file system kills whoever writes
                    finally:
                        os.close(handle)
                return paths
            except OSError as error:
                cause = error
                _remove(paths)
        raise OSError(
            f"no room for two buckets of {nbytes} bytes in {' or '.join(map(str, candidates))} ({cause}): give "
            "SharedMemory another directory, or lower bucket_bytes"
        ) from cause

    def _unlink(self) -> None:
        _remove(self._paths)
        self._paths = []


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        Path(path).unlink(missing_ok=True)

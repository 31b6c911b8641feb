"""Shared-memory transport: buckets in two files in memory, for engines in other processes of the same machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from torchrl_rloo.weight_update.protocol import TensorInfo, pack, packed_size, unpack
from torchrl_rloo.weight_update.transport import Receiver, Transport

MEMORY = Path("/dev/shm")


class SharedMemoryReceiver(Receiver):
    """Receiver that maps the trainer's two files and copies buckets from them."""

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int):
        size = options["nbytes"]
        for path in options["paths"]:
            if not Path(path).is_file():  # torch would create an empty one
                raise FileNotFoundError(
                    f"{path} is not on this machine; use the transport Collective() or Files(directory) for engines on "
                    "other machines"
                )
        self.buffers = [torch.from_file(p, shared=True, size=size, dtype=torch.uint8) for p in options["paths"]]

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        return unpack(self.buffers[payload["buffer"]][: packed_size(infos)].clone(), infos)

    def close(self) -> None:
        self.buffers = []


class SharedMemory(Transport):
    """Transport that packs buckets alternately into two files that all workers map.

    The transport unlinks the files once all workers have mapped them, so nothing remains when the processes end.

    Args:
        directory: directory of the files. None takes ``/dev/shm``, or the directory for temporary files if
            ``/dev/shm`` has no room.
    """

    name, receiver = "shared_memory", SharedMemoryReceiver

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
        # Prefer files in memory, and fall back to a directory on disk
        candidates = [MEMORY, Path(tempfile.gettempdir())] if self.directory is None else [Path(self.directory)]
        for directory in candidates:
            paths: list[str] = []
            try:
                for _ in range(2):
                    handle, path = tempfile.mkstemp(prefix="torchrl_rloo-weights-", dir=directory)
                    paths.append(path)
                    try:
                        os.posix_fallocate(handle, 0, nbytes)  # otherwise a full file system kills the writing process
                    finally:
                        os.close(handle)
                return paths
            except OSError as error:
                cause = error
                _remove(paths)
        raise OSError(
            f"no room for two buckets of {nbytes} bytes in {' or '.join(map(str, candidates))} ({cause}); set another "
            "directory of SharedMemory, or lower bucket_bytes"
        ) from cause

    def _unlink(self) -> None:
        _remove(self._paths)
        self._paths = []


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        Path(path).unlink(missing_ok=True)

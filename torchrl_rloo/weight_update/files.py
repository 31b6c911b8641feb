"""File transport: buckets as safetensors files, for engines that share a file system with the trainer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file

from torchrl_rloo.weight_update.protocol import TensorInfo
from torchrl_rloo.weight_update.transport import Receiver, Storage, Transport


class FilesReceiver(Receiver):
    """Receiver that reads each bucket from its file."""

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        tensors = load(Path(payload["path"]).read_bytes())  # not mapped, because the trainer removes the file
        return [tensors[info.name] for info in infos]


class FilesStorage(Storage):
    """Folder with one safetensors file per bucket."""

    def __init__(self, folder: Path):
        self.folder = folder

    def put(self, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]) -> None:
        path = self._path(bucket)
        part = path.with_suffix(".part")
        save_file(_separate(infos, tensors), part)
        os.replace(part, path)

    def get(self, bucket: int) -> dict[str, Any]:
        return {"path": str(self._path(bucket))}

    def _path(self, bucket: int) -> Path:
        return self.folder / f"{bucket:05d}.safetensors"


class Files(Transport):
    """Transport that writes each bucket atomically as a safetensors file, into one folder per version.

    The transport removes a version's folder once a later version is in use, and at :meth:`close`. Folders are closed to
    other users.

    Args:
        directory: parent of the folders, with the same path on all machines. It belongs to one publisher.
    """

    name, receiver = "files", FilesReceiver

    def __init__(self, directory: str | PathLike):
        self.directory = Path(directory).absolute()
        self._is_clean = False  # an earlier run may have left folders
        self._numbers = count(1)  # distinguish folders of one version, such as the initial one

    def store(self, version: int, sizes: Sequence[int], keep: bool) -> FilesStorage:
        if not self._is_clean:
            self.close()
        self.directory.mkdir(parents=True, exist_ok=True)
        folder = self.directory / f"weights-{version}-{next(self._numbers)}"
        folder.mkdir(mode=0o700)
        self._is_clean = True
        return FilesStorage(folder)

    def release(self, storage: FilesStorage, reusable: bool) -> None:
        shutil.rmtree(storage.folder, ignore_errors=True)

    def close(self) -> None:
        self._is_clean = False
        for folder in self.directory.glob("weights-*"):
            shutil.rmtree(folder)


def _separate(infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by name, contiguous, on the CPU and without shared memory, as safetensors requires."""
    separate, seen = {}, set()
    for info, tensor in zip(infos, tensors, strict=True):
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(storage.data_ptr())
        separate[info.name] = tensor
    return separate

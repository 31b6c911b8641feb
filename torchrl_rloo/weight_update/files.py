"""File transport: buckets as safetensors files, for engines that share a file system with the trainer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file

from torchrl_rloo.weight_update.protocol import TensorInfo
from torchrl_rloo.weight_update.transport import Receiver, Transport


class FilesReceiver(Receiver):
    """Receiver that reads each bucket from its file."""

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        tensors = load(Path(payload["path"]).read_bytes())  # not mapped, because the trainer removes the file
        return [tensors[info.name] for info in infos]


class Files(Transport):
    """Transport that writes each bucket atomically as a safetensors file, into one folder per version.

    The transport removes a version's folder when the next version begins and at :meth:`close`.

    Args:
        directory: parent of the folders, with the same path on all machines. It belongs to one updater.
    """

    name, receiver = "files", FilesReceiver

    def __init__(self, directory: str | PathLike):
        self.directory = Path(directory).absolute()

    def open(self, workers: Sequence[int], nbytes: int, timeout: float) -> list[dict[str, Any]]:
        self.directory.mkdir(parents=True, exist_ok=True)
        return super().open(workers, nbytes, timeout)

    def send(
        self, version: int, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        folder = self.directory / f"weights-{version}"
        if bucket == 0:
            self.close()
            folder.mkdir()
        path = folder / f"{bucket:05d}.safetensors"
        part = path.with_suffix(".part")
        save_file(_separate(infos, tensors), part)
        os.replace(part, path)
        return {"path": str(path)}

    def close(self) -> None:
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

"""Weights as files, for engines on other machines that share a file system with the trainer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from torchrl_rloo.modules.engines.weight_protocol import TensorInfo
from torchrl_rloo.weight_update.transports import Transport


class Files(Transport):
    """Writes each bucket as a safetensors file, whole or not at all, into a folder of its version.

    A version's folder is removed when the next version begins, or when the transport is closed.

    Args:
        directory: where the folders are, under the same path on all machines. It belongs to one updater.
    """

    name = "files"

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
    """The tensors by name, contiguous on the CPU, each in memory of its own: safetensors takes no others."""
    separate, seen = {}, set()
    for info, tensor in zip(infos, tensors, strict=True):
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(storage.data_ptr())
        separate[info.name] = tensor
    return separate

"""Common parts of the transports that use vLLM's own weight transfer: their receiver, and tensors as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from torchrl_rloo.weight_update.protocol import TensorInfo, unpack
from torchrl_rloo.weight_update.transport import PackedStorage


class ByteStorage(PackedStorage):
    """Buckets as lists of tensors of bytes (uint8, ``[nbytes]``), which vLLM packs without gaps.

    Args:
        sizes: packed size of each bucket in bytes.
        keep: True for all buckets in host memory, False for the two latest on the device.
        device: GPU of the trainer.
    """

    def __init__(self, sizes: Sequence[int], keep: bool, device: torch.device):
        # Device memory is scarce: keep whole versions in host memory, and two buckets on the device
        nbytes, place = (sum(sizes), torch.device("cpu")) if keep else (2 * max(sizes), device)
        super().__init__(torch.empty(nbytes, dtype=torch.uint8, device=place), sizes, None if keep else 2)
        self._infos: dict[int, list[TensorInfo]] = {}

    def put(self, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]) -> None:
        super().put(bucket, infos, tensors)
        self._infos[bucket] = list(infos)

    def get(self, bucket: int) -> list[torch.Tensor]:
        return [view.reshape(-1).view(torch.uint8) for view in unpack(self.view(bucket), self._infos[bucket])]


class VLLMTransfer:
    """One of vLLM's weight transfer engines, which hands over tensors instead of loading them.

    Args:
        engine: class of the engine.
        backend: name of the engine in vLLM.
        device: device of the worker's model.
        rank: rank of the worker in its engine.
        workers: number of workers of the engine.
    """

    def __init__(self, engine: type, backend: str, device: torch.device, rank: int, workers: int):
        from vllm.config import WeightTransferConfig

        place = SimpleNamespace(data_parallel_index=0, world_size=workers, rank=rank)
        settings = SimpleNamespace(parallel_config=place, model_config=None)
        self.engine = engine(WeightTransferConfig(backend=backend), settings, device, self)
        self._taken: list[torch.Tensor] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take tensors of bytes in place of vLLM's model."""
        self._taken += [tensor for _, tensor in weights]

    def take(self, infos: Sequence[TensorInfo], update_info: Any) -> list[torch.Tensor]:
        """Receive one bucket."""
        self._taken = []
        self.engine.receive_weights(update_info)
        found, self._taken = self._taken, []
        tensors = []
        for info, data in zip(infos, found, strict=True):
            if data.is_cuda:
                data.record_stream(torch.cuda.current_stream())  # vLLM received it on another stream
            if data.storage_offset() % info.torch_dtype.itemsize:
                data = data.clone()
            tensors.append(data.view(info.torch_dtype).view(info.shape))
        return tensors

    def close(self) -> None:
        """Leave the group or release the buffer."""
        self.engine.shutdown()


def byte_description(infos: Sequence[TensorInfo]) -> dict[str, list]:
    """Return names, dtypes and shapes of tensors as bytes, as vLLM's update infos take them."""
    return {
        "names": [info.name for info in infos],
        "dtype_names": ["uint8"] * len(infos),
        "shapes": [[info.nbytes] for info in infos],
    }


def require_cuda(transport: str) -> None:
    """Raise ValueError without a CUDA device."""
    if not torch.cuda.is_available():
        raise ValueError(f"transport={transport}() requires a CUDA device; use SharedMemory() or Collective()")

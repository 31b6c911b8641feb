"""CUDA IPC transport of vLLM: buckets in GPU memory that the trainer shares with an engine on the same GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from torchrl_rloo.weight_update.protocol import TensorInfo
from torchrl_rloo.weight_update.transport import Link, Receiver, Transport
from torchrl_rloo.weight_update.vllm_wire import ByteStorage, VLLMTransfer, byte_description, require_cuda

_CLASSES = {0: torch.Tensor, 4: torch.storage.TypedStorage, 5: torch.uint8}  # of the arguments of an exported buffer
_TUPLES = (1, 2)  # its size and strides


class VLLMIPCReceiver(Receiver):
    """Receiver around vLLM's ``IPCWeightTransferEngine``."""

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int):
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferInitInfo

        self._inner = VLLMTransfer(IPCWeightTransferEngine, "ipc", device, rank, options["workers"])
        self._inner.engine.init_transfer_engine(IPCWeightTransferInitInfo(packed=True))

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

        update_info = IPCWeightTransferUpdateInfo(
            **byte_description(infos),
            ipc_handles={payload["gpu"]: decode_export(payload["export"])},
            tensor_sizes=[info.nbytes for info in infos],
        )
        return self._inner.take(infos, update_info)

    def close(self) -> None:
        self._inner.close()


class VLLMIPCLink(Link):
    """Buffer in GPU memory that the workers of one engine have mapped.

    Each bucket replaces the last one, which the workers have copied by then.

    Args:
        workers: number of workers of the engine.
        device: GPU of the trainer.
    """

    def __init__(self, workers: int, device: torch.device):
        super().__init__({"workers": workers})
        self._device = device
        self._buffer: torch.Tensor | None = None
        self._payload: dict[str, Any] = {}

    def send(self, stored: list[torch.Tensor]) -> dict[str, Any]:
        nbytes = sum(tensor.numel() for tensor in stored)
        if self._buffer is None or self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            gpu = str(torch.cuda.get_device_properties(self._device).uuid)
            self._payload = {"gpu": gpu, "export": encode_export(reduce_tensor(self._buffer)[1])}
        offset = 0
        for tensor in stored:
            self._buffer[offset : offset + tensor.numel()].copy_(tensor)
            offset += tensor.numel()
        if self._buffer.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()  # the workers read it on other streams
        return self._payload

    def close(self) -> None:
        self._buffer = None


class VLLMIPC(Transport):
    """Transport that shares each bucket in GPU memory by vLLM's ``IPCWeightTransferEngine``.

    The engine must be on the GPU of rank 0, in another process. Its worker copies each bucket from GPU memory to GPU
    memory.

    Raises:
        ValueError: without a CUDA device.
    """

    name, receiver = "vllm_ipc", VLLMIPCReceiver

    def __init__(self):
        require_cuda("VLLMIPC")
        self.device = torch.device("cuda", torch.cuda.current_device())

    def store(self, version: int, sizes: Sequence[int], keep: bool) -> ByteStorage:
        return ByteStorage(sizes, keep, self.device)

    def connect(self, workers: int, timeout: float, node_id: str | None = None) -> VLLMIPCLink:
        return VLLMIPCLink(workers, self.device)


def encode_export(arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments of ``rebuild_cuda_tensor`` for a buffer of bytes as plain JSON.

    Raises:
        ValueError: if torch exports other classes.
    """
    wrong = {place: arguments[place] for place, expected in _CLASSES.items() if arguments[place] is not expected}
    if wrong:
        raise ValueError(f"torch exports a CUDA buffer with {wrong}; this version of torch is not supported")
    encoded = []
    for place, value in enumerate(arguments):
        if place in _CLASSES:
            encoded.append(None)
        elif place in _TUPLES:
            encoded.append(list(value))
        else:
            encoded.append({"bytes": value.hex()} if isinstance(value, bytes) else value)
    return encoded


def decode_export(encoded: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of ``rebuild_cuda_tensor`` that :func:`encode_export` encoded."""
    decoded = []
    for place, value in enumerate(encoded):
        if place in _CLASSES:
            decoded.append(_CLASSES[place])
        elif place in _TUPLES:
            decoded.append(tuple(value))
        else:
            decoded.append(bytes.fromhex(value["bytes"]) if isinstance(value, dict) else value)
    return tuple(decoded)

"""NCCL transport of vLLM: packed broadcasts to engines on other GPUs, over vLLM's own communicator."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from torchrl_rloo.weight_update.protocol import TensorInfo
from torchrl_rloo.weight_update.sender import SenderThread
from torchrl_rloo.weight_update.transport import Link, Receiver, Transport
from torchrl_rloo.weight_update.vllm_wire import ByteStorage, VLLMTransfer, byte_description, require_cuda


class VLLMNCCLReceiver(Receiver):
    """Receiver around vLLM's ``NCCLWeightTransferEngine``."""

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int):
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferInitInfo

        self._inner = VLLMTransfer(NCCLWeightTransferEngine, "nccl", device, rank, options["world_size"] - 1)
        self._inner.engine.init_transfer_engine(NCCLWeightTransferInitInfo(**options))

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

        return self._inner.take(infos, NCCLWeightTransferUpdateInfo(**byte_description(infos)))

    def close(self) -> None:
        self._inner.close()


class VLLMNCCLLink(Link):
    """Communicator of the trainer and the workers of one engine, with a thread that broadcasts.

    Args:
        options: fields of vLLM's ``NCCLWeightTransferInitInfo``.
        device: GPU of the trainer.
        timeout: seconds to wait for the workers.
    """

    def __init__(self, options: Mapping[str, Any], device: torch.device, timeout: float):
        super().__init__(options)
        joined: list[Any] = []
        sender = SenderThread(
            partial(_join, self.options, device, joined),
            partial(_broadcast, self.options, device),
            _leave,
            lambda: [_leave(group) for group in joined],  # wakes a broadcast whose worker is lost
            device=device,
            timeout=timeout,
        )
        self._sender, self._device = sender, device
        self.close = weakref.finalize(self, sender.stop)  # otherwise its thread would never end

    def joined(self) -> None:
        self._sender.wait_joined()

    def send(self, stored: list[torch.Tensor]) -> dict[str, Any]:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the broadcast is on another thread's stream
        self._sender.send(stored)
        return {}


class VLLMNCCL(Transport):
    """Transport that broadcasts each bucket with vLLM's ``NCCLWeightTransferEngine``, for vLLM on other GPUs.

    vLLM packs the tensors of a bucket into one buffer. The workers join by an NCCL id that their engine's connection
    carries, so the trainer opens no port except those of NCCL. Each engine has a communicator. Weights are not
    encrypted.

    Args:
        packed_buffer_bytes: largest size of vLLM's buffers, of which it has two at each end.

    Raises:
        ValueError: without a CUDA device, or if ``packed_buffer_bytes`` is below 1.
    """

    name, receiver = "vllm_nccl", VLLMNCCLReceiver

    def __init__(self, packed_buffer_bytes: int = 64 << 20):
        require_cuda("VLLMNCCL")
        if packed_buffer_bytes < 1:
            raise ValueError(f"packed_buffer_bytes={packed_buffer_bytes} must be at least 1")
        self.packed_buffer_bytes = packed_buffer_bytes
        self.device = torch.device("cuda", torch.cuda.current_device())

    def store(self, version: int, sizes: Sequence[int], keep: bool) -> ByteStorage:
        return ByteStorage(sizes, keep, self.device)

    def connect(self, workers: int, timeout: float, node_id: str | None = None) -> VLLMNCCLLink:
        options = {
            "rank_offset": 1,  # the trainer is rank 0
            "world_size": 1 + workers,
            "nccl_unique_id_b64": _new_unique_id(),
            "packed": True,
            "packed_buffer_size_bytes": self.packed_buffer_bytes,
            "packed_num_buffers": 2,
        }
        return VLLMNCCLLink(options, self.device, timeout)


def _new_unique_id() -> str:
    from base64 import b64encode

    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return b64encode(bytes(NCCLLibrary().ncclGetUniqueId().internal)).decode()


def _join(options: Mapping[str, Any], device: torch.device, joined: list[Any]) -> Any:
    """Join the workers as rank 0, and note the communicator."""
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, uid_init_process_group

    info = NCCLWeightTransferInitInfo(**options)
    joined.append(uid_init_process_group(info.nccl_unique_id_bytes, 0, info.world_size, device))
    return joined[0]


def _broadcast(options: Mapping[str, Any], device: torch.device, group: Any, tensors: list[torch.Tensor]) -> None:
    """Broadcast the bytes of one bucket in vLLM's packed format."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    packed_nccl_broadcast_producer(
        iter([("", tensor) for tensor in tensors]),
        group,
        0,
        lambda item: item[1].to(device),
        buffer_size_bytes=options["packed_buffer_size_bytes"],
        num_buffers=options["packed_num_buffers"],
    )


def _leave(group: Any) -> None:
    group.destroy()

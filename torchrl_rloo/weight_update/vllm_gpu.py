"""GPU transports of vLLM: NCCL to engines on other GPUs, and CUDA IPC to an engine on the trainer's GPU.

vLLM moves the bytes on both sides, and the checksums of our protocol are around them. A bucket is one packed tensor of
bytes to vLLM, so vLLM packs and casts nothing.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from types import SimpleNamespace
from typing import Any

import torch

from torchrl_rloo.runtime.threads import PackageThread
from torchrl_rloo.weight_update.protocol import TensorInfo, unpack
from torchrl_rloo.weight_update.transport import Link, PackedStorage, Receiver, Transport

# Places in the arguments of ``rebuild_cuda_tensor``
_CLASSES = {0: torch.Tensor, 4: torch.storage.TypedStorage, 5: torch.uint8}
_TUPLES = {1, 2}  # size and strides
_BYTES = {7, 11, 13}  # handles of the memory, of its counter and of an event


class VLLMReceiver(Receiver):
    """Receiver around one of vLLM's weight transfer engines, which hands over a bucket instead of loading it."""

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int):
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        engines = {"nccl": NCCLWeightTransferEngine, "ipc": IPCWeightTransferEngine}
        place = SimpleNamespace(data_parallel_index=0, world_size=options["workers"], rank=rank)
        settings = SimpleNamespace(parallel_config=place, model_config=None)
        engine = engines[options["backend"]]
        self._engine = engine(WeightTransferConfig(backend=options["backend"]), settings, device, self)
        self._engine.init_transfer_engine(self._engine.parse_init_info(options["init_info"]))
        self._bucket: torch.Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the bucket in place of vLLM's model."""
        ((_, self._bucket),) = weights

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        fields = dict(payload)
        if "ipc_handles" in fields:
            fields["ipc_handles"] = {gpu: decode_export(export) for gpu, export in fields["ipc_handles"].items()}
        self._engine.receive_weights(self._engine.parse_update_info(fields))
        bucket, self._bucket = self._bucket, None
        return unpack(bucket, infos)

    def close(self) -> None:
        self._engine.shutdown()


class _GPUTransport(Transport):
    """Transport that needs a CUDA device: rank 0's current one."""

    receiver = VLLMReceiver

    def __init__(self) -> None:
        require_cuda(type(self).__name__)
        self.device = torch.device("cuda", torch.cuda.current_device())

    def store(self, version: int, sizes: Sequence[int], keep: bool) -> PackedStorage:
        # Device memory is scarce: keep whole versions in host memory, and two buckets on the device
        nbytes, place = (sum(sizes), torch.device("cpu")) if keep else (2 * max(sizes), self.device)
        return PackedStorage(torch.empty(nbytes, dtype=torch.uint8, device=place), sizes, None if keep else 2)


class VLLMNCCLLink(Link):
    """Link around vLLM's ``NCCLTrainerWeightTransferEngine``, to which it is the client and the source of one bucket.

    The workers join by an NCCL id that our ``connect`` carries. vLLM's own rendezvous would open a port of the trainer
    that unpickles what it receives.
    """

    def __init__(self, workers: int, device: torch.device, timeout: float):
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

        self._unique_id, self._size, self._device, self._timeout = _new_unique_id(), 1 + workers, device, timeout
        init_info = {
            "rank_offset": 1,  # the trainer is rank 0
            "world_size": self._size,
            "nccl_unique_id_b64": b64encode(self._unique_id).decode(),
        }
        super().__init__({"backend": "nccl", "workers": workers, "init_info": init_info})
        self._engine = NCCLTrainerWeightTransferEngine(client=self, source=self, packed=False)
        self._bucket: torch.Tensor | None = None
        self._call: Callable[[dict[str, Any]], Any] = lambda payload: None

    def open(self, announce: Callable[[dict[str, Any]], Any]) -> None:
        # All must join at the same time, and the thread that joins never returns if a worker fails
        joined: Future[Any] = Future()
        PackageThread(self._join, joined, name="weight broadcast").start()
        announce(self.options)
        try:
            self._engine.model_update_group = joined.result(self._timeout)
        except TimeoutError as error:
            raise TimeoutError(
                f"no NCCL group with the workers within timeout={self._timeout:g} s; check the network between them"
            ) from error

    def _join(self, joined: Future[Any]) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has its own current device
            joined.set_result(uid_init_process_group(self._unique_id, 0, self._size, self._device))
        except BaseException as error:  # raised by the thread that waits
            joined.set_exception(error)

    def deliver(self, stored: torch.Tensor, call: Callable[[dict[str, Any]], Any]) -> None:
        self._bucket, self._call = stored.to(self._device), call
        self._engine.send_weights()  # calls update_weights on another thread while it broadcasts
        self._bucket = None

    def metadata(self) -> list[Any]:
        """Describe the bucket to vLLM, as its source of weights."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta("bucket", torch.uint8, tuple(self._bucket.shape))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "bucket", self._bucket

    def start_weight_update(self) -> None:
        """Do nothing, as vLLM's client: our protocol starts and finishes updates of several buckets."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers receive the bucket, as vLLM's client."""
        self._call(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing, as vLLM's client."""

    def close(self) -> None:
        self._engine.shutdown()


class VLLMNCCL(_GPUTransport):
    """Transport that broadcasts each bucket by vLLM's NCCL weight transfer, to vLLM on other GPUs and machines.

    Each engine has a communicator. Weights are not encrypted, and NCCL's sockets accept anyone, so trainer and engines
    must share a private network.

    Raises:
        ValueError: without a CUDA device.
    """

    name = "vllm_nccl"

    def connect(self, workers: int, timeout: float, node_id: str | None = None) -> VLLMNCCLLink:
        return VLLMNCCLLink(workers, self.device, timeout)


class VLLMIPCLink(Link):
    """Link that shares each bucket in GPU memory by vLLM's packed producer.

    vLLM's ``IPCTrainerWeightTransferEngine`` would wait for a call of every training rank, but only rank 0 sends.
    """

    def __init__(self, workers: int, device: torch.device):
        super().__init__({"backend": "ipc", "workers": workers, "init_info": {"packed": True}})
        self._device = device
        self._gpu = str(torch.cuda.get_device_properties(device).uuid)

    def deliver(self, stored: torch.Tensor, call: Callable[[dict[str, Any]], Any]) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

        bucket = [("bucket", stored)]
        for chunk in packed_ipc_producer(iter(bucket), self._gpu, lambda item: item[1], stored.numel()):
            fields = {name: getattr(chunk, name) for name in ("names", "shapes", "dtype_names", "tensor_sizes")}
            handles = {gpu: encode_export(export) for gpu, export in chunk.ipc_handle.items()}
            call(fields | {"ipc_handles": handles})


class VLLMIPC(_GPUTransport):
    """Transport that shares each bucket in GPU memory by vLLM's CUDA IPC, to vLLM in another process on the same GPU.

    The engine must be on the GPU of rank 0. Its worker copies each bucket from GPU memory to GPU memory.

    Raises:
        ValueError: without a CUDA device.
    """

    name = "vllm_ipc"

    def connect(self, workers: int, timeout: float, node_id: str | None = None) -> VLLMIPCLink:
        return VLLMIPCLink(workers, self.device)


def require_cuda(transport: str) -> None:
    """Raise ValueError without a CUDA device."""
    if not torch.cuda.is_available():
        raise ValueError(f"transport={transport}() requires a CUDA device; use SharedMemory() or Files(directory)")


def _new_unique_id() -> bytes:
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


def encode_export(arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments of ``rebuild_cuda_tensor`` for a buffer of bytes as plain JSON, which engines take."""
    wrong = {place: arguments[place] for place, expected in _CLASSES.items() if arguments[place] is not expected}
    if wrong or not all(isinstance(arguments[place], bytes) for place in _BYTES):
        raise ValueError(f"torch exports a CUDA buffer with {wrong}; this version of torch is not supported")
    encoded = [None if place in _CLASSES else value for place, value in enumerate(arguments)]
    return [value.hex() if place in _BYTES else value for place, value in enumerate(encoded)]


def decode_export(encoded: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of ``rebuild_cuda_tensor`` that :func:`encode_export` encoded."""
    decoded = [_CLASSES.get(place, value) for place, value in enumerate(encoded)]
    decoded = [bytes.fromhex(value) if place in _BYTES else value for place, value in enumerate(decoded)]
    return tuple(tuple(value) if place in _TUPLES else value for place, value in enumerate(decoded))

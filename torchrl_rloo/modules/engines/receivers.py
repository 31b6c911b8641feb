"""How the tensors of a bucket come into an engine's worker: the receiving end of each transport."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
import torch.distributed as dist

from torchrl_rloo.modules.engines.weight_protocol import TensorInfo, packed_size, unpack


class Receiver(Protocol):
    """The end of a transport in a worker.

    Args:
        options: ``connect``'s, from the sending end.
        device: of the worker's model.
        rank: of the worker within its engine.
    """

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int): ...

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of one bucket, in memory that nobody else writes to."""

    def close(self) -> None:
        """Lets go of what the transport holds."""


class DirectReceiver:
    """Tensors by reference, from a trainer in the same process."""

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int):
        pass

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        return payload["tensors"]

    def close(self) -> None:
        pass


class SharedMemoryReceiver:
    """Tensors packed into one of two files in memory, which the trainer fills in turn."""

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int):
        size = options["nbytes"]
        for path in options["paths"]:
            if not Path(path).is_file():  # torch would make an empty one
                raise FileNotFoundError(
                    f"{path} is not on this machine: send to engines on other machines with the transport Collective() "
                    "or Files(directory)"
                )
        self.buffers = [torch.from_file(p, shared=True, size=size, dtype=torch.uint8) for p in options["paths"]]

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        return unpack(self.buffers[payload["buffer"]][: packed_size(infos)].clone(), infos)

    def close(self) -> None:
        self.buffers = []


class CollectiveReceiver:
    """Tensors packed into one buffer, which the trainer broadcasts to all workers of all engines."""

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int):
        host, port, self.timeout = options["host"], options["port"], options["timeout"]
        self.device = device if options["backend"] == "nccl" else torch.device("cpu")
        store = dist.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=self.timeout), wait_for_workers=False
        )
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing, and tells which of our addresses reaches the trainer
            address = probe.getsockname()[0]
        store = dist.PrefixStore(options["group"], store)
        rank += options["rank_offset"]
        self.group = join_group(options["backend"], store, address, rank, options["world_size"], self.timeout)

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        buffer = torch.empty(packed_size(infos), dtype=torch.uint8, device=self.device)
        broadcast(self.group, buffer, self.timeout)
        return unpack(buffer, infos)

    def close(self) -> None:
        self.group.abort()
        self.group = None


class FilesReceiver:
    """Tensors from a safetensors file, in a file system that the trainer shares with the worker."""

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int):
        pass

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        tensors = safetensors.torch.load(Path(payload["path"]).read_bytes())  # no map of a file that will be removed
        return [tensors[info.name] for info in infos]

    def close(self) -> None:
        pass


RECEIVERS: dict[str, type[Receiver]] = {
    "direct": DirectReceiver,
    "shared_memory": SharedMemoryReceiver,
    "collective": CollectiveReceiver,
    "files": FilesReceiver,
}


def join_group(
    backend: str, store: dist.Store, address: str, rank: int, world_size: int, timeout: float
) -> dist.ProcessGroup:
    """A process group beside the default one, which vLLM's worker and a sharded trainer have for themselves.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        store: where the members meet.
        address: of this machine, under which the others reach it.
        rank: of this process in the group; the trainer is 0.
        world_size: members, the trainer included.
        timeout: seconds to wait for the others.
    """
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        # Twice: our own wait ends first, with an error; a time-out of NCCL's own would end the process.
        options._timeout = timedelta(seconds=2 * timeout)
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def broadcast(group: dist.ProcessGroup, buffer: torch.Tensor, timeout: float) -> None:
    """Fills ``buffer`` with that of rank 0, within ``timeout`` seconds."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([buffer], options).wait(timedelta(seconds=timeout))

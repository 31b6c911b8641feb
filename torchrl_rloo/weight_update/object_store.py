"""Object store transport: each bucket once in Ray's object store, for engines in actors on any node of a cluster."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchrl_rloo.weight_update.protocol import TensorInfo, packed_size, read_manifest
from torchrl_rloo.weight_update.shared_memory import SharedMemory, SharedMemoryStorage
from torchrl_rloo.weight_update.target import EngineError, WeightStep, WeightTarget
from torchrl_rloo.weight_update.transport import Receiver, Storage, Transport


class ObjectStoreReceiver(Receiver):
    """Receiver in a process of the cluster, whose tensors are views of the object store and must not be written."""

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        arrays = payload["reference"].future().result()  # ray.get warns in an actor with an event loop
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensors = [torch.from_numpy(array) for array in arrays]
        return [t.view(info.torch_dtype).view(info.shape) for t, info in zip(tensors, infos, strict=True)]


class ObjectStoreStorage(Storage):
    """References to the buckets of a version. The object store drops a bucket without references.

    Args:
        sizes: packed size of each bucket in bytes.
    """

    def __init__(self, sizes: Sequence[int]):
        self._sizes = list(sizes)
        self._payloads: dict[int, dict[str, Any]] = {}

    def put(self, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]) -> None:
        import ray

        # Arrays, since Ray would copy tensors once more; of bytes, since numpy has no bfloat16
        arrays = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for t in tensors]
        self._payloads[bucket] = {"reference": ray.put(arrays), "sizes": self._sizes}

    def get(self, bucket: int) -> dict[str, Any]:
        return self._payloads[bucket]

    def clear(self) -> None:
        """Drop all buckets."""
        self._payloads.clear()


class ObjectStore(Transport):
    """Transport that puts each bucket once into Ray's object store, from which each node of an engine copies it once.

    Engines must be ``RayEngine``, each on one node. An engine in the process of its actor reads the object store
    directly. For one with child processes, such as vLLM, the actor copies each bucket to shared memory.

    The object store of the trainer's node must have room for the model, and for a second version during a push.
    """

    name, receiver = "object_store", ObjectStoreReceiver

    def __init__(self) -> None:
        self._stored: list[ObjectStoreStorage] = []

    def store(self, version: int, sizes: Sequence[int], keep: bool) -> ObjectStoreStorage:
        self._stored.append(ObjectStoreStorage(sizes))
        return self._stored[-1]

    def release(self, storage: ObjectStoreStorage, reusable: bool) -> None:
        storage.clear()  # an engine that is late has its own reference
        self._stored = [other for other in self._stored if other is not storage]

    def close(self) -> None:
        for storage in list(self._stored):
            self.release(storage, reusable=False)


class ObjectStoreRelay:
    """Hands updates from the object store on to an engine, in the engine's actor.

    An engine in this process reads the object store. Child processes of an engine are not in the cluster, so the relay
    copies each bucket to shared memory. A later version uses the file again.
    """

    def __init__(self) -> None:
        self._files: SharedMemory | None = None  # None while no connection needs any
        self._stored: SharedMemoryStorage | None = None
        self._manifest: list[TensorInfo] = []
        self._receiver = ObjectStoreReceiver({}, torch.device("cpu"), 0)

    def update_weights(
        self, engine: WeightTarget, step: WeightStep, info: Mapping[str, Any], *, timeout: float
    ) -> list[dict]:
        """Do a step of an update in the engine, with the arguments of :meth:`WeightTarget.update_weights`."""
        if step == "connect":
            self.close()
            if info.get("transport") == ObjectStore.name and not engine.in_process:
                self._files, self._manifest = SharedMemory(), read_manifest(info)
                info = {**info, "transport": SharedMemory.name}
        elif step == "bucket" and self._files is not None:
            info = {**info, "payload": self._copy(info)}
        try:
            reports = engine.update_weights(step, info, timeout=timeout)
        except BaseException:
            self._release(reusable=False)  # a late worker may still read it
            raise
        if step in ("start", "finish", "abort"):
            self._release(reusable=step == "finish")
        return reports

    def close(self) -> None:
        """Remove the files."""
        self._release(reusable=False)
        if self._files is not None:
            self._files.close()
        self._files = None

    def _copy(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a bucket to shared memory, and return its payload there."""
        infos = self._manifest[info["first"] : info["last"]]
        tensors = self._receiver.receive(infos, info["payload"])
        if self._stored is None:
            self._stored = self._files.store(info["version"], info["payload"]["sizes"], keep=True)
        if packed_size(infos) != self._stored.sizes[info["bucket"]]:
            raise EngineError(f"bucket {info['bucket']} of version {info['version']} is of another update")
        self._stored.put(info["bucket"], infos, tensors)
        return self._stored.get(info["bucket"])

    def _release(self, reusable: bool) -> None:
        if self._stored is not None:
            self._files.release(self._stored, reusable)
            self._stored = None

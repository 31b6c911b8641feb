"""Object store transport: shared memory on the trainer's node, Ray's object store for engines on other nodes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch

from torchrl_rloo.weight_update.protocol import (
    EngineError,
    TensorInfo,
    WeightStep,
    WeightTarget,
    packed_size,
    read_manifest,
    unpack,
)
from torchrl_rloo.weight_update.shared_memory import SharedMemory, SharedMemoryReceiver, SharedMemoryStorage
from torchrl_rloo.weight_update.transport import Link


class ObjectStoreReceiver(SharedMemoryReceiver):
    """Receiver in a process of the cluster, whose tensors are views of shared memory and must not be written."""

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        if "reference" not in payload:
            return super().receive(infos, payload)
        array = payload["reference"].future().result()  # ray.get warns in an actor with an event loop
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return unpack(torch.from_numpy(array), infos)


class StoredBucket(NamedTuple):
    """Bucket of a version, for engines on any node."""

    storage: ObjectStoreStorage
    number: int


class ObjectStoreStorage(SharedMemoryStorage):
    """Version in one mapped file. A bucket gets into the object store once an engine elsewhere needs it."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._lock, self._references = Lock(), {}

    def get(self, bucket: int) -> StoredBucket:
        return StoredBucket(self, bucket)

    def local_payload(self, bucket: int) -> dict[str, Any]:
        """Return the payload for engines on this node."""
        return super().get(bucket)

    def remote_payload(self, bucket: int) -> dict[str, Any]:
        """Return the payload for engines on other nodes."""
        import ray

        with self._lock:  # engines of several sessions
            if bucket not in self._references:
                self._references[bucket] = ray.put(self.view(bucket).numpy())
            return {"reference": self._references[bucket], "sizes": self.sizes}

    def drop_references(self) -> None:
        """Let the object store drop all buckets."""
        self._references.clear()  # an engine that is late has its own reference


class _NodeLink(Link):
    def __init__(self, is_local: bool):
        super().__init__()
        self._is_local = is_local

    def send(self, stored: StoredBucket) -> dict[str, Any]:
        storage, number = stored
        return storage.local_payload(number) if self._is_local else storage.remote_payload(number)


class ObjectStore(SharedMemory):
    """Transport to engines in Ray actors, on any node of the cluster.

    Engines on the trainer's node map one file, as with :class:`~torchrl_rloo.weight_update.SharedMemory`. For engines
    on other nodes, each bucket is put into Ray's object store once, and each of these nodes copies it once. An engine
    in the process of its actor reads it there. For one with child processes, such as vLLM, the actor copies each bucket
    to shared memory.

    Engines must be ``RayEngine``, each on one node. If some are on other nodes, the trainer's object store must have
    room for the model, and for a second version during a push.
    """

    name, receiver, storage_class = "object_store", ObjectStoreReceiver, ObjectStoreStorage

    def connect(self, workers: int, timeout: float, node_id: str | None = None) -> Link:
        import ray

        return _NodeLink(node_id == ray.get_runtime_context().get_node_id())

    def release(self, storage: ObjectStoreStorage, reusable: bool) -> None:
        storage.drop_references()
        super().release(storage, reusable)

    def close(self) -> None:
        for storage in list(self._files):
            storage.drop_references()
        super().close()


class ObjectStoreRelay:
    """Hands updates from the object store on to an engine, in the engine's actor.

    An engine in this process reads the object store. Child processes of an engine are not in the cluster, so the relay
    copies each bucket of the object store to shared memory. A later version uses the file again.
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
        elif step == "bucket" and self._files is not None and "reference" in info["payload"]:
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

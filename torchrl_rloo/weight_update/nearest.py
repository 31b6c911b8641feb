"""Choice of a transport by the place of the engines, for ``transport="auto"``."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_rloo.weight_update.object_store import ObjectStore
from torchrl_rloo.weight_update.protocol import TensorInfo, packed_size, unpack
from torchrl_rloo.weight_update.shared_memory import SharedMemory
from torchrl_rloo.weight_update.target import WeightTarget
from torchrl_rloo.weight_update.transport import Direct, PackedStorage, Storage, Transport


class NearestTransport:
    """Fastest transport that reaches all engines of a push, chosen again for each, since engines may move.

    Engines of this process take :class:`Direct`, and those of this node :class:`SharedMemory`. If a Ray actor is on
    another node, all engines take :class:`ObjectStore`.
    """

    def __init__(self) -> None:
        self.direct, self.shared_memory, self.object_store = Direct(), SharedMemory(), ObjectStore()

    def choose(self, engines: Sequence[WeightTarget]) -> Transport:
        """Return the transport for some engines; without engines, the one for processes of this node."""
        if engines and all(engine.in_process for engine in engines):
            return self.direct
        if any(map(_is_on_another_node, engines)) and all(engine.reads_object_store for engine in engines):
            return self.object_store
        return self.shared_memory

    def reaches(self, transport: Transport, engine: WeightTarget) -> bool:
        """Return whether one of these transports reaches an engine where it is now."""
        if transport is self.shared_memory:
            return not _is_on_another_node(engine)
        return transport is not self.direct or engine.in_process

    def copy_for(
        self,
        engine: WeightTarget,
        version: int,
        manifest: Sequence[TensorInfo],
        buckets: Sequence[tuple[int, int]],
        storage: Storage,
    ) -> tuple[Transport, Storage]:
        """Copy a version from memory of this node, for an engine that it does not reach.

        Args:
            engine: engine that restarted on another node, or joined.
            version: policy version of the weights.
            manifest: all tensors.
            buckets: first and last tensor of each bucket.
            storage: storage of the version.

        Returns:
            A transport that reaches the engine, and its storage of the version.
        """
        transport, parts = self.choose([engine]), [manifest[first:last] for first, last in buckets]
        copied = transport.store(version, [packed_size(infos) for infos in parts], keep=True)
        for number, infos in enumerate(parts):
            packed = isinstance(storage, PackedStorage)
            copied.put(number, infos, unpack(storage.view(number), infos) if packed else storage.get(number)["tensors"])
        return transport, copied

    def close(self) -> None:
        """Release the resources of all transports, which may be used again."""
        for transport in (self.direct, self.shared_memory, self.object_store):
            transport.close()


def _is_on_another_node(engine: WeightTarget) -> bool:
    """Return whether a Ray actor is on another node than this process."""
    if not engine.reads_object_store or engine.node_id is None:
        return False
    import ray

    return engine.node_id != ray.get_runtime_context().get_node_id()

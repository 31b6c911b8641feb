"""Transport, Storage, Link and Receiver: the ends of a connection from the trainer to engines' workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from torchrl_rloo.weight_update.protocol import TensorInfo, pack, packed_size, unpack
from torchrl_rloo.weight_update.shards import Piece
from torchrl_rloo.weight_update.target import WeightTarget


class Receiver(ABC):
    """Receiving end of a transport, in one worker of an engine.

    Args:
        options: options of the :class:`Link`, after a round trip through JSON.
        device: device of the worker's model.
        rank: rank of the worker in its engine.
    """

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int):  # noqa: B027
        pass

    @abstractmethod
    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of one bucket, which do not change until the update ends in this engine."""

    def close(self) -> None:  # noqa: B027
        """Release resources."""


class Storage(ABC):
    """Buckets of one version at the trainer.

    Attributes:
        window: number of latest buckets that remain; None if all do.
        kept: whether all buckets remain while the training model changes.
    """

    window: int | None = None
    kept: bool = True

    @abstractmethod
    def put(self, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]) -> None:
        """Store a bucket. With a ``window``, all engines have received the one that it replaces."""

    @abstractmethod
    def get(self, bucket: int) -> Any:
        """Return what :meth:`Link.send` takes."""

    def opener(self) -> Callable[[], Storage] | None:
        """Return a function that opens the storage in another training rank, to write buckets there as well.

        It can be pickled, and raises OSError on another machine. None if only this process can write.
        """
        return None


class Link:
    """Connection to the workers of one engine.

    Args:
        options: options of the receivers, as plain JSON.
    """

    def __init__(self, options: Mapping[str, Any] | None = None):
        self.options = dict(options or {})

    def joined(self) -> None:  # noqa: B027
        """Wait until all workers have connected."""

    def send(self, stored: Any) -> dict[str, Any]:
        """Send a stored bucket to the workers, or start to.

        Returns:
            Payload for the receivers, as plain JSON (except for :class:`Direct`).
        """
        return stored

    def close(self) -> None:  # noqa: B027
        """Close the connection."""


class Transport(ABC):
    """Sending end of a transport.

    Attributes:
        name: name of the transport in ``connect``.
        receiver: class of the receiving end.
    """

    name: ClassVar[str]
    receiver: ClassVar[type[Receiver]]

    @abstractmethod
    def store(self, version: int, sizes: Sequence[int], keep: bool) -> Storage:
        """Prepare to store a version.

        Args:
            version: policy version of the weights.
            sizes: packed size of each bucket in bytes.
            keep: True if the buckets must remain after the push, while the training model changes.
        """

    def check(self, engines: Sequence[WeightTarget]) -> None:  # noqa: B027
        """Raise ``ValueError`` if the transport does not reach an engine."""

    def release(self, storage: Storage, reusable: bool) -> None:  # noqa: B027
        """Free a storage, or reuse it for a later version if no worker can still read it."""

    def connect(self, workers: int, timeout: float, node_id: str | None = None) -> Link:
        """Prepare for the workers of one engine to connect.

        Args:
            workers: number of workers of the engine.
            timeout: seconds that any later operation may take.
            node_id: Ray's id of the engine's node; None if it is in no actor.
        """
        return Link()

    def close(self) -> None:  # noqa: B027
        """Release resources and remove files; the transport may be used again."""


class PackedStorage(Storage):
    """Buckets one after the other in one buffer, or the two latest in turn.

    Args:
        buffer: uint8 tensor ``[nbytes]``.
        sizes: packed size of each bucket in bytes.
        window: 2 for two alternating halves of the buffer; None for all buckets.
    """

    def __init__(self, buffer: torch.Tensor, sizes: Sequence[int], window: int | None = None):
        self.buffer, self.sizes = buffer, list(sizes)
        self.window, self.kept = window, window is None
        half = max(self.sizes)
        self.offsets = [sum(self.sizes[:i]) if window is None else i % window * half for i in range(len(self.sizes))]

    def put(self, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]) -> None:
        assert packed_size(infos) == self.sizes[bucket]
        pack(tensors, self.view(bucket))

    def put_pieces(
        self, bucket: int, infos: Sequence[TensorInfo], pieces: Sequence[tuple[int, Piece, torch.Tensor]]
    ) -> None:
        """Store blocks of tensors.

        Args:
            bucket: number of the bucket.
            infos: all tensors of the bucket.
            pieces: index in ``infos``, place and values of each block.
        """
        views = unpack(self.view(bucket), infos)
        for number, piece, values in pieces:
            piece.of(views[number]).copy_(values)

    def get(self, bucket: int) -> Any:
        return self.view(bucket)

    def view(self, bucket: int) -> torch.Tensor:
        """Return the part of the buffer with a bucket."""
        return self.buffer[self.offsets[bucket] : self.offsets[bucket] + self.sizes[bucket]]


class DirectReceiver(Receiver):
    """Receiver of tensors of the trainer's process."""

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        return payload["tensors"]


class DirectStorage(Storage):
    """References to the tensors of the two latest buckets, or copies of all tensors.

    Args:
        keep: whether to copy the tensors.
    """

    def __init__(self, keep: bool):
        self.kept, self.window = keep, None if keep else 2
        self._buckets: dict[int, list[torch.Tensor]] = {}

    def put(self, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]) -> None:
        if self.window is not None:
            self._buckets.pop(bucket - self.window, None)  # gathered tensors take memory
        self._buckets[bucket] = [t.detach().to("cpu", copy=True) if self.kept else t for t in tensors]

    def get(self, bucket: int) -> dict[str, Any]:
        return {"tensors": list(self._buckets[bucket])}


class Direct(Transport):
    """Transport that passes tensors by reference to engines in the trainer's process, which copy them at loading."""

    name, receiver = "direct", DirectReceiver

    def check(self, engines: Sequence[WeightTarget]) -> None:
        elsewhere = [type(engine).__name__ for engine in engines if not engine.in_process]
        if elsewhere:
            raise ValueError(
                f"transport=Direct() requires engines in this process, but {elsewhere[0]} is in another; use "
                "SharedMemory(), Collective() or Files(directory)"
            )

    def store(self, version: int, sizes: Sequence[int], keep: bool) -> Storage:
        return DirectStorage(keep)

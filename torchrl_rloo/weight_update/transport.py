"""Transport, Storage, Link and Receiver: the ends of a connection from the trainer to engines' workers."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from torchrl_rloo.runtime.lookup import import_object
from torchrl_rloo.weight_update.protocol import EngineError, TensorInfo, pack, packed_size, unpack
from torchrl_rloo.weight_update.shards import Piece

TRANSPORTS: dict[str, type[Transport]] = {}  # by name; each class enters itself when it is imported
OWN = "TORCHRL_RLOO_TRANSPORTS"  # environment variable: dotted paths of users' transports, with commas
ELSEWHERE = {"object_store": "torchrl_rloo.ray.object_store.ObjectStore"}  # imported at the first use


class Receiver(ABC):
    """Receiving end of a transport, in a worker of an engine.

    Args:
        options: options of the :class:`Link`.
        device: device of the engine's weights.
        rank: number of the worker in its engine.
    """

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int):  # noqa: B027
        pass

    @abstractmethod
    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of one bucket, which do not change until the update ends in this engine.

        Args:
            infos: name, dtype and shape of each tensor, in the order to return.
            payload: what :meth:`Link.send` gave at the trainer.
        """

    def close(self) -> None:  # noqa: B027
        """Release resources."""


class Storage(ABC):
    """Buckets of one version at the trainer.

    Attributes:
        window: number of latest buckets that remain. None if all do.
        kept: whether all buckets remain while the training model changes, so that an engine may be filled later.
    """

    window: int | None = None
    kept: bool = True

    @abstractmethod
    def put(self, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]) -> None:
        """Store a bucket. With a ``window``, all engines have received the one that it replaces."""

    @abstractmethod
    def get(self, bucket: int) -> Any:
        """Return what :meth:`Link.send` takes."""

    def opener(self) -> Callable[[], PackedStorage] | None:
        """Return a function that opens the storage in another training rank; None if only this process can write.

        It can be pickled, and raises OSError on another machine.
        """
        return None


class Link:
    """Connection to the workers of one engine, with ``options`` for their receivers as plain JSON."""

    def __init__(self, options: Mapping[str, Any] | None = None):
        self.options = dict(options or {})

    def open(self, announce: Callable[[dict[str, Any]], Any]) -> None:
        """Call ``announce`` with the options, upon which the workers connect, and return once they have."""
        announce(self.options)

    def send(self, stored: Any) -> dict[str, Any]:
        """Return the payload of a stored bucket for the receivers, as plain JSON (except for :class:`Direct`)."""
        return stored

    def deliver(self, stored: Any, call: Callable[[dict[str, Any]], Any]) -> None:
        """Call ``call`` with the payload, upon which the workers receive the bucket, and return once they have."""
        call(self.send(stored))

    def close(self) -> None:  # noqa: B027
        """Close the connection."""


class Transport(ABC):
    """Sending end of a transport: a subclass sets its ``name`` and its class of ``receiver``.

    An engine in another process finds both ends by the name. There, the environment variable
    ``TORCHRL_RLOO_TRANSPORTS`` must list the dotted path of a transport of your own.
    """

    name: ClassVar[str]
    receiver: ClassVar[type[Receiver]]

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):  # subclasses share the receiver of their base
            TRANSPORTS[cls.name] = cls

    @abstractmethod
    def store(self, version: int, sizes: Sequence[int], keep: bool) -> Storage:
        """Prepare to store a version in buckets of packed ``sizes``, which with ``keep`` remain after the push."""

    def release(self, storage: Storage, reusable: bool) -> None:  # noqa: B027
        """Free a storage, or reuse it for a later version if no worker can still read it."""

    def connect(self, workers: int, timeout: float, node_id: str | None = None) -> Link:
        """Prepare for the workers of one engine to connect, on Ray's node ``node_id`` if it is in an actor."""
        return Link()

    def close(self) -> None:  # noqa: B027
        """Release resources and remove files; the transport may be used again."""


def find_transport(name: str) -> type[Transport]:
    """Return the transport of a name, or raise EngineError if there is none.

    A process that has not imported a user's transport finds it by the environment variable :data:`OWN`.
    """
    if name not in TRANSPORTS and name in ELSEWHERE:
        return import_object(ELSEWHERE[name], "transport")
    if name not in TRANSPORTS:
        for path in filter(None, os.environ.get(OWN, "").split(",")):
            import_object(path.strip(), OWN)
    if name not in TRANSPORTS:
        known = sorted(TRANSPORTS.keys() | ELSEWHERE)
        raise EngineError(f"transport={name!r} must be one of {known}; list your own in {OWN}=my_module.MyTransport")
    return TRANSPORTS[name]


def open_receiver(info: Mapping[str, Any], device: torch.device, rank: int) -> Receiver:
    """Return the receiving end that the message of ``connect`` announces."""
    return find_transport(info["transport"]).receiver(info.get("options", {}), device, rank)


class PackedStorage(Storage):
    """Buckets of packed ``sizes`` in one uint8 buffer ``[nbytes]``: one after the other, or the two latest in turn."""

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
        """Store blocks of the tensors ``infos``: the index in ``infos``, place and values of each block."""
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
    """References to the tensors of the two latest buckets, or copies of all tensors if ``keep``."""

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

    def store(self, version: int, sizes: Sequence[int], keep: bool) -> Storage:
        return DirectStorage(keep)

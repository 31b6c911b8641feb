"""Transport and Receiver: the two ends of a connection for tensors from the trainer to engines' workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from torchrl_rloo.weight_update.protocol import TensorInfo


class Receiver(ABC):
    """Receiving end of a transport, in one worker of an engine.

    Args:
        options: options from :meth:`Transport.open`, after a round trip through JSON.
        device: device of the worker's model.
        rank: rank of the worker in its engine.
    """

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int):  # noqa: B027
        pass

    @abstractmethod
    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of one bucket, in memory that no other code writes to."""

    def close(self) -> None:  # noqa: B027
        """Release resources."""


class Transport(ABC):
    """Sending end of a transport.

    Attributes:
        name: name of the transport in ``connect``.
        receiver: class of the receiving end.
    """

    name: ClassVar[str]
    receiver: ClassVar[type[Receiver]]

    def open(self, workers: Sequence[int], nbytes: int, timeout: float) -> list[dict[str, Any]]:
        """Prepare for the workers to connect, and close an earlier connection.

        Args:
            workers: number of workers of each engine.
            nbytes: packed size of the largest bucket in bytes.
            timeout: seconds that any later operation may take.

        Returns:
            Options of the receivers, one dict per engine.
        """
        return [{} for _ in workers]

    def connected(self) -> None:  # noqa: B027
        """Note that all workers have connected."""

    @abstractmethod
    def send(
        self, version: int, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Send a bucket to all workers, or start to send it.

        The previous bucket may still be in flight, but all workers have received the one before it.

        Args:
            version: policy version of the weights.
            bucket: number of the bucket. 0 begins a version.
            infos: name, dtype and shape of the tensors.
            tensors: tensors of the bucket, which must not change until the update ends.

        Returns:
            Payload for the receivers, as plain JSON (except for :class:`Direct`).
        """

    def close(self) -> None:  # noqa: B027
        """Release resources and remove files; the transport can be opened again."""


class DirectReceiver(Receiver):
    """Receiver of the trainer's own tensors."""

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        return payload["tensors"]


class Direct(Transport):
    """Transport that passes tensors by reference to engines in the trainer's process, which copy them at loading."""

    name, receiver = "direct", DirectReceiver

    def send(
        self, version: int, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        return {"tensors": list(tensors)}

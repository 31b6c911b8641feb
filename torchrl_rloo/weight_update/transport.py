"""Transport and Receiver: the two ends that carry buckets of tensors from the trainer to engines' workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from torchrl_rloo.weight_update.protocol import TensorInfo


class Receiver(ABC):
    """Receiving end of a transport, in one worker of an engine.

    Args:
        options: returned by :meth:`Transport.open`, after a round trip through JSON.
        device: of the worker's model.
        rank: of the worker within its engine.
    """

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int):  # noqa: B027
        pass

    @abstractmethod
    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of one bucket, in memory that nobody else writes to."""

    def close(self) -> None:  # noqa: B027
        """Free what the transport holds."""


class Transport(ABC):
    """Sending end of a transport.

    Attributes:
        name: of the transport, in ``connect``.
        receiver: its receiving end.
    """

    name: ClassVar[str]
    receiver: ClassVar[type[Receiver]]

    def open(self, workers: Sequence[int], nbytes: int, timeout: float) -> list[dict[str, Any]]:
        """Prepare for the workers to connect, and close what was open before.

        Args:
            workers: number of workers of each engine.
            nbytes: packed size of the largest bucket.
            timeout: seconds that any later operation may take.

        Returns:
            For each engine, the options of its workers' receivers.
        """
        return [{} for _ in workers]

    def connected(self) -> None:  # noqa: B027
        """Note that all workers have connected."""

    @abstractmethod
    def send(
        self, version: int, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Send a bucket to all workers, or start to send it.

        All workers have received the bucket before the previous one; the previous one may still be in transit.

        Args:
            version: of the weights.
            bucket: number of the bucket; 0 begins a version.
            infos: of the tensors.
            tensors: the tensors, which do not change until the update ends.

        Returns:
            Payload for the receivers, as plain JSON (except for :class:`Direct`).
        """

    def close(self) -> None:  # noqa: B027
        """Free what the transport holds and remove its files; it can be opened again."""


class DirectReceiver(Receiver):
    """Receives the trainer's own tensors."""

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        return payload["tensors"]


class Direct(Transport):
    """Passes tensors by reference to engines in the trainer's process, which copy them as they load them."""

    name, receiver = "direct", DirectReceiver

    def send(
        self, version: int, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        return {"tensors": list(tensors)}

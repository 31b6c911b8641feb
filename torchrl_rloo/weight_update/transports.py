"""How buckets of tensors get from the trainer to the workers of engines: the sending end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from torchrl_rloo.modules.engines.weight_protocol import TensorInfo


class Transport(ABC):
    """The sending end of a transport; its other end is in :mod:`torchrl_rloo.modules.engines.receivers`.

    Attributes:
        name: of the receiver.
    """

    name: ClassVar[str]

    def open(self, workers: Sequence[int], nbytes: int, timeout: float) -> list[dict[str, Any]]:
        """Makes ready for the workers to connect; what was open before is closed.

        Args:
            workers: how many workers each engine has.
            nbytes: size of the largest bucket, packed.
            timeout: seconds that anything may take from now on.

        Returns:
            For each engine, the options that its workers' receivers take.
        """
        return [{} for _ in workers]

    def connected(self) -> None:  # noqa: B027
        """All workers have connected."""

    @abstractmethod
    def send(
        self, version: int, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Sends a bucket, or has it sent, to all workers at once.

        All workers have the bucket before the last one by then, but maybe not yet the last one.

        Args:
            version: of the weights.
            bucket: its number; 0 begins a version.
            infos: of the tensors.
            tensors: the tensors themselves, which stay as they are until the update ends.

        Returns:
            What the receivers need to know of it.
        """

    def close(self) -> None:  # noqa: B027
        """Frees what the transport holds and leaves nothing behind; it can be opened again."""

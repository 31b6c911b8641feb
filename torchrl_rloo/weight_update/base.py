"""What carries new weights to a sampler. TorchRL's base class for this is deprecated, so the protocol is our own."""

from __future__ import annotations

from abc import ABC, abstractmethod


class WeightSyncError(RuntimeError):
    """Weights did not arrive everywhere. It names the peer, the tensors, the version, the cause and what to do."""


class WeightUpdater(ABC):
    """One way for weights to reach a sampler; a subclass per transport."""

    @abstractmethod
    def push_weights(self, version: int) -> None:
        """Sends the training model's present weights and returns once the sampler has them.

        Args:
            version: the policy version that these weights are.

        Raises:
            RuntimeError: if the weights did not arrive. The sampler then still has its old ones, or refuses to sample
                until it has new ones.
        """

"""WeightUpdater, and the updaters of samplers in this process.

TorchRL's base class for weight updaters is deprecated, so the protocol is our own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn


class WeightSyncError(RuntimeError):
    """Failed push. The message names the engine, the tensors, the version, the cause and the remedy."""


class WeightUpdater(ABC):
    """Sender of the training model's weights to a sampler."""

    @abstractmethod
    def push_weights(self, version: int) -> None:
        """Send the current weights and return once the sampler has them.

        Args:
            version: policy version of these weights.

        Raises:
            RuntimeError: if the weights did not arrive. The sampler then keeps its old ones, or refuses to sample.
        """


class InProcessWeightUpdater(WeightUpdater):
    """Copies parameters and buffers to a sampler in this process, casting to the sampler's dtype.

    Nothing is copied if source and target are one module.

    Args:
        source: training model.
        target: sampler's model, of the same architecture.

    Raises:
        ValueError: if names or shapes differ.
    """

    def __init__(self, source: nn.Module, target: nn.Module):
        self.source, self.target = source, target
        have, want = source.state_dict(), target.state_dict()
        if missing := sorted(have.keys() ^ want.keys()):
            raise ValueError(f"source and target do not have the same tensors; they differ in {missing[:5]}")
        if unequal := [k for k in have if have[k].shape != want[k].shape]:
            k = unequal[0]
            raise ValueError(f"tensor {k!r} has shape {list(have[k].shape)} in source, {list(want[k].shape)} in target")

    @torch.no_grad()
    def push_weights(self, version: int) -> None:
        """Copy the weights; ``version`` needs no transport within one process."""
        if self.source is not self.target:
            source, target = self.source.state_dict(), self.target.state_dict()
            torch._foreach_copy_(list(target.values()), [source[k] for k in target])


class SequentialWeightUpdater(WeightUpdater):
    """Pushes through several updaters in order, e.g. to a copy in this process and from it to an engine.

    Args:
        *updaters: at least one.
    """

    def __init__(self, *updaters: WeightUpdater):
        if not updaters:
            raise ValueError("SequentialWeightUpdater needs at least one updater")
        self.updaters = updaters

    def push_weights(self, version: int) -> None:
        """Push through each updater; after a failure the later ones keep their old weights."""
        for updater in self.updaters:
            updater.push_weights(version)

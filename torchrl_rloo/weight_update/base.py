"""WeightUpdater, and updaters of samplers in this process.

TorchRL's base class for weight updaters is deprecated, so this module defines its own protocol.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn


class WeightSyncError(RuntimeError):
    """Failed push. The message names the engine, the tensors, the version, the cause and the fix."""


class WeightUpdater(ABC):
    """Base class of senders of the training model's weights to a sampler."""

    version = 0
    current_version = 0

    def initialize(self): pass

    def resume_from(self, version):
        self.version = self.current_version = version

    def push_weights(self):
        self.version += 1
        self._push_old(self.version)
        self.current_version = self.version
        return self.version

    def _push_old(self, version: int) -> None:
        """Send the current weights and return once the sampler has them.

        Args:
            version: policy version of these weights.

        Raises:
            RuntimeError: if the weights did not arrive. The sampler then keeps its old weights or refuses to sample.
        """


class InProcessWeightUpdater(WeightUpdater):
    """Updater that copies parameters and buffers to a sampler in this process and casts them to its dtype.

    It copies nothing if source and target are the same module.

    Args:
        source: training model.
        target: model of the sampler, with the same architecture.

    Raises:
        ValueError: if names or shapes differ.

    Example:
        >>> source, target = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> InProcessWeightUpdater(source, target).push_weights(version=1)
        >>> bool((source.weight == target.weight).all())
        True
    """

    def __init__(self, source: nn.Module, target: nn.Module):
        self.source, self.target = source, target
        have, want = source.state_dict(), target.state_dict()
        if missing := sorted(have.keys() ^ want.keys()):
            raise ValueError(f"source and target must have the same tensors, but differ in {missing[:5]}")
        if unequal := [k for k in have if have[k].shape != want[k].shape]:
            k = unequal[0]
            raise ValueError(
                f"tensor {k!r} must have one shape, but has {list(have[k].shape)} in source and {list(want[k].shape)} "
                "in target"
            )

    @torch.no_grad()
    def _push_old(self, version: int) -> None:
        """Copy the weights; ``version`` is ignored within one process."""
        if self.source is not self.target:
            source, target = self.source.state_dict(), self.target.state_dict()
            torch._foreach_copy_(list(target.values()), [source[k] for k in target])


class SequentialWeightUpdater(WeightUpdater):
    """Updater that pushes through several updaters in order, for example to a local copy and from it to an engine.

    Args:
        *updaters: one or more updaters.

    Raises:
        ValueError: if there are no updaters.
    """

    def __init__(self, *updaters: WeightUpdater):
        if not updaters:
            raise ValueError("updaters=() must have at least one updater")
        self.updaters = updaters

    def _push_old(self, version: int) -> None:
        """Push through each updater; after a failure the later ones keep their old weights."""
        for updater in self.updaters:
            updater._push_old(version)

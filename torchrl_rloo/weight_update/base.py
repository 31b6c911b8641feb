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
    """Base class of senders of the training model's weights to a sampler.

    A version names one set of weights. It is spent when a push begins and never used again, also if the push fails.

    Attributes:
        version: last version spent. 0 names the initial weights.
    """

    version: int = 0
    _current_version: int = 0

    @property
    def current_version(self) -> int:
        """Highest version that a sampler has."""
        return self._current_version

    def push_weights(self) -> int:
        """Send the current weights under a new version, and return it once a sampler has them.

        Raises:
            RuntimeError: if the weights did not arrive. The version is spent. Samplers keep their old weights or refuse
                to sample.
        """
        self.version += 1
        self._send(self.version)
        self._current_version = self.version
        return self.version

    @abstractmethod
    def _send(self, version: int) -> None:
        """Send the current weights as ``version`` and return once a sampler has them."""

    def initialize(self) -> None:  # noqa: B027
        """Give samplers that were never filled the current weights under the current version.

        Call it before training. A sampler in this process needs nothing, since a checkpoint has its weights.

        Raises:
            RuntimeError: if the weights did not arrive.
        """

    def resume_from(self, version: int) -> None:
        """Continue the numbering of a checkpoint, whose weights the model has, unless more versions are spent already.

        Samplers count as unfilled until :meth:`initialize` or the next push.

        Raises:
            ValueError: if ``version`` is negative.
        """
        if version < 0:
            raise ValueError(f"version={version} must be at least 0")
        self.version = self._current_version = max(version, self.version)  # spent versions stay spent


class InProcessWeightUpdater(WeightUpdater):
    """Updater that copies parameters and buffers to a sampler in this process and casts them to its dtype.

    It copies nothing if source and target are the same module. Otherwise, a checkpoint must also contain the target.
    Its weights are older than those of the source if updates are rare.

    Args:
        source: training model.
        target: model of the sampler, with the same architecture.

    Raises:
        ValueError: if names or shapes differ.

    Example:
        >>> source, target = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> InProcessWeightUpdater(source, target).push_weights()
        1
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
    def _send(self, version: int) -> None:
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
        self.version = max(updater.version for updater in updaters)

    @property
    def current_version(self) -> int:
        """Highest version at the last updater, whose samplers sample."""
        return self.updaters[-1].current_version

    def push_weights(self) -> int:
        """Push through each updater under one version, which none of them has spent.

        Raises:
            RuntimeError: if an updater failed. The later ones keep their old weights.
        """
        self.version = max(self.version, *(updater.version for updater in self.updaters))
        return super().push_weights()

    def _send(self, version: int) -> None:
        # After a failure the later updaters keep their old weights and skip the version
        for updater in self.updaters:
            updater.version = version - 1
            updater.push_weights()

    def initialize(self) -> None:
        """Initialize the samplers of each updater in order."""
        for updater in self.updaters:
            updater.initialize()

    def resume_from(self, version: int) -> None:
        """Continue the numbering of a checkpoint in all updaters."""
        version = max(version, *(updater.version for updater in self.updaters))
        super().resume_from(version)
        for updater in self.updaters:
            updater.resume_from(version)

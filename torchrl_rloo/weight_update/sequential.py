"""Several weight updates, one after the other."""

from __future__ import annotations

from torchrl_rloo.weight_update.base import WeightUpdater


class SequentialWeightUpdater(WeightUpdater):
    """Pushes through several updaters in order: to a copy in the training process, say, and from it to an engine.

    Args:
        *updaters: at least one.
    """

    def __init__(self, *updaters: WeightUpdater):
        if not updaters:
            raise ValueError("SequentialWeightUpdater needs at least one updater")
        self.updaters = updaters

    def push_weights(self, version: int) -> None:
        """Pushes through each; one that fails ends it, and those after it have the old weights."""
        for updater in self.updaters:
            updater.push_weights(version)

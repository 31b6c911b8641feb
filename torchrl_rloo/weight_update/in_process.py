"""Weights for a sampler in the same process: copied tensor by tensor, or shared outright."""

from __future__ import annotations

import torch
from torch import nn

from torchrl_rloo.weight_update.base import WeightUpdater


class InProcessWeightUpdater(WeightUpdater):
    """Copies parameters and buffers from the training model to the sampler's, casting to the sampler's dtype.

    If the two are one module nothing needs to be copied, and a push only confirms the new version.

    Args:
        source: the training model.
        target: the sampler's model, of the same architecture.

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
        """Copies the weights; ``version`` needs no transport within one process."""
        if self.source is not self.target:
            source, target = self.source.state_dict(), self.target.state_dict()
            torch._foreach_copy_(list(target.values()), [source[k] for k in target])

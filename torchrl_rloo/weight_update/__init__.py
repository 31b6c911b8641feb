"""How new weights reach a sampler: one transport per file."""

from torchrl_rloo.weight_update.base import WeightUpdater
from torchrl_rloo.weight_update.in_process import InProcessWeightUpdater

__all__ = ["InProcessWeightUpdater", "WeightUpdater"]

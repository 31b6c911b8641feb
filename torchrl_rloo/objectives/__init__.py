"""Losses: TensorDict shells around the formulas of ``functional``."""

from torchrl_rloo.objectives.rloo import RLOOLoss, RLOOLossOutput

__all__ = ["RLOOLoss", "RLOOLossOutput"]

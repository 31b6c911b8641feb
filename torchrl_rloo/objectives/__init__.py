"""Losses: TensorDict shells around the formulas of ``functional``."""

from torchrl_rloo.objectives.rloo import RLOOLoss, RLOOLossOutput, merge_outputs

__all__ = ["RLOOLoss", "RLOOLossOutput", "merge_outputs"]

"""Losses: TensorDict modules around ``torchrl_rloo.functional``."""

from torchrl_rloo.objectives.distillation import DistillationLoss
from torchrl_rloo.objectives.kl import KL, AdaptiveEntropyCoefficient, AdaptiveKLCoefficient
from torchrl_rloo.objectives.preference import PreferenceLoss, RewardModelLoss
from torchrl_rloo.objectives.presets import PRESETS, Preset, make_method
from torchrl_rloo.objectives.rloo import RLOOLoss, RLOOLossOutput
from torchrl_rloo.objectives.sft import SFTLoss
from torchrl_rloo.objectives.step import merge_outputs
from torchrl_rloo.objectives.value import ValueLoss

__all__ = [
    "KL",
    "PRESETS",
    "AdaptiveEntropyCoefficient",
    "AdaptiveKLCoefficient",
    "DistillationLoss",
    "PreferenceLoss",
    "Preset",
    "RLOOLoss",
    "RLOOLossOutput",
    "RewardModelLoss",
    "SFTLoss",
    "ValueLoss",
    "make_method",
    "merge_outputs",
]

"""Losses: TensorDict modules around ``torchrl_rloo.functional``."""

from torchrl_rloo.objectives.kl import KL, AdaptiveEntropyCoefficient, AdaptiveKLCoefficient
from torchrl_rloo.objectives.preference import (
    PreferenceLoss,
    PreferenceLossOutput,
    RewardModelLoss,
    RewardModelLossOutput,
)
from torchrl_rloo.objectives.presets import PRESETS, Preset, make_method
from torchrl_rloo.objectives.rloo import RLOOLoss, RLOOLossOutput
from torchrl_rloo.objectives.sft import SFTLoss, SFTLossOutput
from torchrl_rloo.objectives.step import LossOutput, Normalizers, merge_outputs
from torchrl_rloo.objectives.value import ValueLoss, ValueLossOutput

__all__ = [
    "KL",
    "PRESETS",
    "AdaptiveEntropyCoefficient",
    "AdaptiveKLCoefficient",
    "LossOutput",
    "Normalizers",
    "PreferenceLoss",
    "PreferenceLossOutput",
    "Preset",
    "RLOOLoss",
    "RLOOLossOutput",
    "RewardModelLoss",
    "RewardModelLossOutput",
    "SFTLoss",
    "SFTLossOutput",
    "ValueLoss",
    "ValueLossOutput",
    "make_method",
    "merge_outputs",
]

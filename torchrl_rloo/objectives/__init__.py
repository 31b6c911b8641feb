"""Losses: TensorDict modules around ``torchrl_rloo.functional``."""

from torchrl_rloo.objectives.controllers import AdaptiveEntropyCoefficient, AdaptiveKLCoefficient
from torchrl_rloo.objectives.kl import KL
from torchrl_rloo.objectives.normalizers import Normalizers
from torchrl_rloo.objectives.output import LossOutput, RLOOLossOutput, merge_outputs
from torchrl_rloo.objectives.preference import PreferenceLoss, PreferenceLossOutput
from torchrl_rloo.objectives.presets import PRESETS, Preset, make_method
from torchrl_rloo.objectives.reward_model import RewardModelLoss, RewardModelLossOutput
from torchrl_rloo.objectives.rloo import RLOOLoss
from torchrl_rloo.objectives.sft import SFTLoss, SFTLossOutput
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

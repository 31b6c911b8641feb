"""Losses: TensorDict shells around ``torchrl_rloo.functional``."""

from torchrl_rloo.objectives.controllers import AdaptiveEntropyCoefficient, AdaptiveKLCoefficient
from torchrl_rloo.objectives.counts import LossCounts
from torchrl_rloo.objectives.output import RLOOLossOutput, merge_outputs
from torchrl_rloo.objectives.preference import PreferenceLoss, merge_preferences
from torchrl_rloo.objectives.presets import PRESETS, Preset
from torchrl_rloo.objectives.reward_model import RewardModelLoss, RewardModelLossOutput, merge_reward_outputs
from torchrl_rloo.objectives.rloo import RLOOLoss
from torchrl_rloo.objectives.sft import SFTLoss
from torchrl_rloo.objectives.value import ValueLoss

__all__ = [
    "PRESETS",
    "AdaptiveEntropyCoefficient",
    "AdaptiveKLCoefficient",
    "LossCounts",
    "PreferenceLoss",
    "Preset",
    "RLOOLoss",
    "RLOOLossOutput",
    "RewardModelLoss",
    "RewardModelLossOutput",
    "SFTLoss",
    "ValueLoss",
    "merge_outputs",
    "merge_preferences",
    "merge_reward_outputs",
]

"""Reward functions: plain functions from completions to floats."""

from torchrl_rloo.rewards.accuracy import CosineScaled, MathAccuracy, ReasoningAccuracy
from torchrl_rloo.rewards.boxed import boxed_accuracy, last_boxed
from torchrl_rloo.rewards.controls import Shuffled
from torchrl_rloo.rewards.formats import think_format
from torchrl_rloo.rewards.lengths import SoftOverlong
from torchrl_rloo.rewards.protocol import RewardFunction, call_reward, final_text, reward_name
from torchrl_rloo.rewards.repetition import RepetitionPenalty

__all__ = [
    "CosineScaled",
    "MathAccuracy",
    "ReasoningAccuracy",
    "RepetitionPenalty",
    "RewardFunction",
    "Shuffled",
    "SoftOverlong",
    "boxed_accuracy",
    "call_reward",
    "final_text",
    "last_boxed",
    "reward_name",
    "think_format",
]

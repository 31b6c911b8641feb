"""Transforms that make a task of a ChatEnv: data, feedback, rewards, KL."""

from torchrl_rloo.envs.transforms.data import DataLoadingPrimer, DatasetExhaustedError
from torchrl_rloo.envs.transforms.feedback import FeedbackTransform
from torchrl_rloo.envs.transforms.kl import KLRewardTransform
from torchrl_rloo.envs.transforms.reward import RewardTransform
from torchrl_rloo.envs.transforms.shaping import (
    CalibrateScores,
    ClipRewards,
    NormalizeRewards,
    ScoreNames,
    ShapingTransform,
    TruncationPolicy,
)
from torchrl_rloo.envs.transforms.turn_reward import TurnRewardTransform

__all__ = [
    "CalibrateScores",
    "ClipRewards",
    "DataLoadingPrimer",
    "DatasetExhaustedError",
    "FeedbackTransform",
    "KLRewardTransform",
    "NormalizeRewards",
    "RewardTransform",
    "ScoreNames",
    "ShapingTransform",
    "TruncationPolicy",
    "TurnRewardTransform",
]

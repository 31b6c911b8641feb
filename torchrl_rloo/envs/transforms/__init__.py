"""Transforms that turn a ChatEnv into a task: data, feedback, tools, rewards, KL."""

from torchrl_rloo.envs.transforms.data import DataLoadingPrimer, DatasetExhaustedError
from torchrl_rloo.envs.transforms.feedback import AddThinkingPrompt, FeedbackTransform, UserSimulator
from torchrl_rloo.envs.transforms.kl import KLRewardTransform, add_reference_kl
from torchrl_rloo.envs.transforms.repository import RepositoryTransform
from torchrl_rloo.envs.transforms.reward import RewardTransform, TurnRewardTransform
from torchrl_rloo.envs.transforms.shaping import (
    CalibrateScores,
    ClipRewards,
    NormalizeRewards,
)
from torchrl_rloo.envs.transforms.tools import BrowserTransform, ToolTransform

__all__ = [
    "BrowserTransform",
    "AddThinkingPrompt",
    "CalibrateScores",
    "ClipRewards",
    "DataLoadingPrimer",
    "DatasetExhaustedError",
    "FeedbackTransform",
    "KLRewardTransform",
    "NormalizeRewards",
    "RepositoryTransform",
    "RewardTransform",
    "ToolTransform",
    "TurnRewardTransform",
    "UserSimulator",
    "add_reference_kl",
]

"""Reward functions: plain functions from completions to floats."""

from torchrl_rloo.rewards.boxed import boxed_accuracy, last_boxed
from torchrl_rloo.rewards.controls import Shuffled
from torchrl_rloo.rewards.protocol import RewardFunction, call_reward, reward_name

__all__ = ["RewardFunction", "Shuffled", "boxed_accuracy", "call_reward", "last_boxed", "reward_name"]

"""Conversations as environments."""

from torchrl_rloo.envs.chat import ChatEnv, step_rows
from torchrl_rloo.envs.dataset import DatasetChatEnv

__all__ = ["ChatEnv", "DatasetChatEnv", "step_rows"]

"""Conversations as environments."""

from torchrl_rloo.envs.chat import ChatEnv
from torchrl_rloo.envs.dataset import DatasetChatEnv

__all__ = ["ChatEnv", "DatasetChatEnv"]

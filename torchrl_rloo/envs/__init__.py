"""Chat environments: conversations with a policy as batches of TensorDict rows."""

from torchrl_rloo.envs.chat import ChatEnv
from torchrl_rloo.envs.dataset import DatasetChatEnv
from torchrl_rloo.envs.stepping import RowStepper
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.runtime.event_loop import set_call_threads

__all__ = ["ChatEnv", "DatasetChatEnv", "RowStepper", "TurnTransform", "set_call_threads"]

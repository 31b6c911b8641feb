"""Text environments of any common interface, as conversations to train on."""

from torchrl_rloo.envs.text.adapters import MLGymWrapper
from torchrl_rloo.envs.text.session import Outcome, TextSession
from torchrl_rloo.envs.text.transform import TextEnvTransform, text_env

__all__ = [
    "MLGymWrapper",
    "Outcome",
    "TextEnvTransform",
    "TextSession",
    "text_env",
]

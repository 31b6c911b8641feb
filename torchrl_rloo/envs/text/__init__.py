"""Text environments of any common interface, as conversations to train on."""

from torchrl_rloo.envs.text.adapters import STYLES, MLGymWrapper, wrap
from torchrl_rloo.envs.text.games import GuessNumber
from torchrl_rloo.envs.text.session import Outcome, TextSession
from torchrl_rloo.envs.text.transform import TextEnvTransform, TextTask, seed_dataset, text_env

__all__ = [
    "STYLES",
    "GuessNumber",
    "MLGymWrapper",
    "Outcome",
    "TextEnvTransform",
    "TextSession",
    "TextTask",
    "seed_dataset",
    "text_env",
    "wrap",
]

"""Text environments of any common interface, as conversations to train on."""

from torchrl_rloo.envs.text.games import GuessNumber
from torchrl_rloo.envs.text.mlgym import MLGymWrapper
from torchrl_rloo.envs.text.session import Outcome, TextSession
from torchrl_rloo.envs.text.task import TextTask, seed_dataset, text_env
from torchrl_rloo.envs.text.transform import TextEnvTransform
from torchrl_rloo.envs.text.wrapping import STYLES, wrap

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

"""Standard tasks: dataset format, prompt, rewards, evaluation metric and a generated stand-in of each."""

from torchrl_rloo.envs.tasks.base import EMBEDDED, Task, TaskBase
from torchrl_rloo.envs.tasks.mixture import Mixture, mix_prompts
from torchrl_rloo.envs.tasks.registry import TASKS, load_task

__all__ = [
    "EMBEDDED",
    "TASKS",
    "Mixture",
    "Task",
    "TaskBase",
    "load_task",
    "mix_prompts",
]

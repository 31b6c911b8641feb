"""Standard tasks: each has a dataset format, a prompt, rewards, an evaluation metric and synthetic rows."""

from torchrl_rloo.envs.tasks.base import EMBEDDED, Task, TaskBase
from torchrl_rloo.envs.tasks.mixture import Mixture
from torchrl_rloo.envs.tasks.registry import CUSTOM, TASKS, conversation_settings, load_task

__all__ = [
    "CUSTOM",
    "EMBEDDED",
    "TASKS",
    "Mixture",
    "Task",
    "TaskBase",
    "conversation_settings",
    "load_task",
]

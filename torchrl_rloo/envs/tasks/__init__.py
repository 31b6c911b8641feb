"""Standard tasks: each has a dataset format, a prompt, rewards, an evaluation metric and synthetic rows."""

from torchrl_rloo.envs.tasks.base import Task, TaskBase
from torchrl_rloo.envs.tasks.registry import load_task

__all__ = [
    "Task",
    "TaskBase",
    "load_task",
]

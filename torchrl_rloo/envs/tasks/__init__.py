"""Standard tasks: each has a dataset format, a prompt, rewards, an evaluation metric and synthetic rows."""

from torchrl_rloo.envs.tasks.base import EMBEDDED, Task, TaskBase
from torchrl_rloo.envs.tasks.registry import CUSTOM, conversation_settings, load_task

__all__ = [
    "CUSTOM",
    "EMBEDDED",
    "Task",
    "TaskBase",
    "conversation_settings",
    "load_task",
]

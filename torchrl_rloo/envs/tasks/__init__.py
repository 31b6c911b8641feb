"""Standard tasks: each has a dataset format, a prompt, rewards, an evaluation metric and synthetic rows."""

from torchrl_rloo.envs.tasks.base import EMBEDDED, Task, TaskBase
from torchrl_rloo.envs.tasks.conversation import conversation_settings
from torchrl_rloo.envs.tasks.custom import CUSTOM
from torchrl_rloo.envs.tasks.mixture import Mixture
from torchrl_rloo.envs.tasks.registry import TASKS, load_task

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

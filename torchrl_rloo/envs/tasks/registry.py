"""Tasks by name."""

from __future__ import annotations

from collections.abc import Mapping

from torchrl_rloo.envs.tasks.base import Task, TaskBase
from torchrl_rloo.envs.tasks.code import CODE
from torchrl_rloo.envs.tasks.countdown import COUNTDOWN
from torchrl_rloo.envs.tasks.custom import CUSTOM
from torchrl_rloo.envs.tasks.gsm8k import GSM8K
from torchrl_rloo.envs.tasks.instructions import INSTRUCTIONS
from torchrl_rloo.envs.tasks.math import MATH
from torchrl_rloo.envs.tasks.multiple_choice import MULTIPLE_CHOICE
from torchrl_rloo.envs.tasks.repository import REPOSITORY
from torchrl_rloo.runtime.lookup import did_you_mean, import_object

TASKS = {task.name: task for task in (GSM8K, MATH, COUNTDOWN, INSTRUCTIONS, MULTIPLE_CHOICE, CODE, REPOSITORY, CUSTOM)}


def load_task(name: str, tasks: Mapping[str, Task] = TASKS) -> TaskBase:
    """Return a task by its name or dotted path.

    Args:
        name: name in ``tasks``, or dotted path ``"module.name"`` of a :class:`TaskBase`, or of a class or function that
            returns one when called without arguments.
        tasks: named tasks.

    Raises:
        ValueError: for an unknown name or path.
        TypeError: if the path is not that of a task.

    Example:
        >>> load_task("gsm8k").dataset["source"]
        'openai/gsm8k'
        >>> load_task("torchrl_rloo.envs.tasks.gsm8k.GSM8K").name
        'gsm8k'
    """
    if name in tasks:
        return tasks[name]
    if "." not in name:
        raise ValueError(
            f"task={name!r} is unknown{did_you_mean(name, tasks)}; valid: {sorted(tasks)}, or the dotted path of your "
            "task, module.TASK"
        )
    task = import_object(name, "task")
    task = task() if callable(task) else task
    if not isinstance(task, TaskBase):
        raise TypeError(f"task={name!r} must be a Task (torchrl_rloo.envs.tasks), got {task!r:.100}")
    return task

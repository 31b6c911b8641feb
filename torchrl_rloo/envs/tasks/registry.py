"""Tasks by name."""

from __future__ import annotations

from difflib import get_close_matches

from torchrl_rloo.envs.tasks.base import Task
from torchrl_rloo.envs.tasks.code import CODE
from torchrl_rloo.envs.tasks.countdown import COUNTDOWN
from torchrl_rloo.envs.tasks.gsm8k import GSM8K
from torchrl_rloo.envs.tasks.instructions import INSTRUCTIONS
from torchrl_rloo.envs.tasks.math import MATH
from torchrl_rloo.envs.tasks.multiple_choice import MULTIPLE_CHOICE

TASKS = {task.name: task for task in (GSM8K, MATH, COUNTDOWN, INSTRUCTIONS, MULTIPLE_CHOICE, CODE)}


def load_task(name: str) -> Task:
    """A task by its name.

    Raises:
        ValueError: for a name that is not in :data:`TASKS`.

    Example:
        >>> load_task("gsm8k").dataset["source"]
        'openai/gsm8k'
    """
    if name not in TASKS:
        near = get_close_matches(name, TASKS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"task {name!r} is unknown{hint}; known are {sorted(TASKS)}")
    return TASKS[name]

"""Tasks by name, the task of a user's own prompts, and a user's settings of a task's conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl.envs import Transform

from torchrl_rloo.envs.tasks.answers import COUNTDOWN, GSM8K, INSTRUCTIONS, MATH, MULTIPLE_CHOICE, SUMS
from torchrl_rloo.envs.tasks.base import Scorer, Task, TaskBase
from torchrl_rloo.envs.tasks.environments import GYMNASIUM, OPENENV, TEXTARENA, VERIFIERS
from torchrl_rloo.envs.tasks.pictures import CHARTQA, GEOMETRY3K
from torchrl_rloo.envs.tasks.programs import CODE, REPOSITORY
from torchrl_rloo.envs.tasks.reasoning_gym import ReasoningGym
from torchrl_rloo.rewards.protocol import RewardFunction, reward_name
from torchrl_rloo.runtime.lookup import did_you_mean, import_object


class CustomTask(Task):
    """Task of prompts from the user's source, with unchanged columns, evaluated with the training rewards."""

    def make_rewards(self) -> list[RewardFunction]:
        """Return the user's rewards of a mixture's part; raise without any."""
        if self.rewards:
            return super().make_rewards()
        raise ValueError(f"task={self.name!r} has no default rewards; set reward.functions=[my_module.my_reward]")

    def make_scorer(self, rewards: Sequence[RewardFunction] | None = None) -> Scorer:
        """Return the rewards by name, the first as the headline; None for an empty list, if the environment rewards."""
        if rewards is None and (self.rewards or self.scorer):
            return super().make_scorer()
        if rewards is None:
            raise ValueError(
                f"task={self.name!r} has no default scorer; set eval.scorer=my_module.score, or in the recipe evaluate "
                "eval.scorers={name: my_module.score}"
            )
        return {reward_name(function): function for function in rewards} or None


def _no_rows(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    raise ValueError("task='custom' has no default prompts; set data.source to a file, a directory or a hub id")


CUSTOM = CustomTask(name="custom", synthetic_rows=_no_rows, rewards=(), scorer=None)
TASKS: dict[str, TaskBase] = {
    task.name: task
    for task in (
        *(SUMS, GSM8K, MATH, COUNTDOWN, INSTRUCTIONS, MULTIPLE_CHOICE, CODE, REPOSITORY),
        *(GEOMETRY3K, CHARTQA, ReasoningGym(), GYMNASIUM, OPENENV, TEXTARENA, VERIFIERS, CUSTOM),
    )
}


def load_task(name: str, tasks: Mapping[str, TaskBase] = TASKS) -> TaskBase:
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
        >>> load_task("torchrl_rloo.envs.tasks.answers.GSM8K").name
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


def conversation_settings(
    task: TaskBase, transforms: Sequence[Any] | None, limits: Mapping[str, Any], context: int | None
) -> tuple[Callable[[], Sequence[Transform]], dict[str, Any]]:
    """Return a factory of environment transforms, and the limits of a conversation.

    Args:
        task: task with default transforms and limits.
        transforms: settings ``{_target_: dotted path, argument: value}`` of transforms, in order; None uses the task's.
        limits: arguments of :class:`~torchrl_rloo.envs.ChatEnv` that override the task's.
        context: context length of the model in tokens; the default ``max_tokens`` of multi-turn conversations.

    Returns:
        ``(make_transforms, limits)``. Each call of ``make_transforms`` makes new transforms, so that two environments
        share no counters.

    Raises:
        ValueError: for limits on single-turn conversations.
    """
    from hydra.utils import instantiate

    several = bool(task.make_transforms() if transforms is None else transforms)
    if limits and not several:
        name = next(iter(limits))
        raise ValueError(
            f"environment.{name}={limits[name]} is ignored by task={task.name}, whose conversations have one turn; set "
            "environment.transforms, which answer the policy, or leave it null"
        )
    for name, values in task.different_limits.items() if transforms is None else ():
        if name not in limits:
            raise ValueError(
                f"the tasks of the mixture have different limits, {name}: {values}; set environment.{name}"
            )
    limits = {**task.limits, **limits}
    if several:
        limits = {"max_tokens": context} | limits
    if transforms is None:
        return task.make_transforms, limits
    return lambda: [instantiate(transform) for transform in transforms], limits

"""Transforms and limits of a task's conversations, with a user's settings as overrides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl.envs import Transform

from torchrl_rloo.envs.tasks.base import TaskBase


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
    limits = {**task.limits, **limits}
    if several:
        limits = {"max_tokens": context} | limits
    if transforms is None:
        return task.make_transforms, limits
    return lambda: [instantiate(transform) for transform in transforms], limits

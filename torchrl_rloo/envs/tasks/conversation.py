"""Turns and limits of a task's conversations, with a user's settings in place of its own."""

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
        task: has its own of both.
        transforms: ``{_target_: dotted path, argument: value}`` each, in order; None takes the task's.
        limits: arguments of :class:`~torchrl_rloo.envs.ChatEnv` in place of the task's.
        context: tokens that the model takes; limits a conversation of several turns that has no other limit.

    Returns:
        ``(make_transforms, limits)``. Each call of the first makes new transforms, so that two environments share no
        counters.

    Raises:
        ValueError: for limits of a conversation of one turn.
    """
    from hydra.utils import instantiate

    several = bool(task.make_transforms() if transforms is None else transforms)
    if limits and not several:
        name = next(iter(limits))
        raise ValueError(
            f"environment.{name}={limits[name]} has no effect: conversations of task {task.name} have one turn; set "
            "environment.transforms, which answer the policy, or leave it null"
        )
    limits = {**task.limits, **limits}
    if several:
        limits = {"max_tokens": context} | limits
    if transforms is None:
        return task.make_transforms, limits
    return lambda: [instantiate(transform) for transform in transforms], limits

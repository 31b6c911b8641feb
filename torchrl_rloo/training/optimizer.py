"""Optimizer steps and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch.nn.utils import clip_grad_norm_


def optimizer_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    max_grad_norm: float | None = None,
) -> torch.Tensor:
    """Clip the gradient, step optimizer and schedule, and clear the gradient.

    Args:
        model: module with the trained parameters.
        optimizer: optimizer of these parameters.
        scheduler: schedule of the optimizer. None keeps the learning rate constant.
        max_grad_norm: largest norm of the gradient. None disables clipping.

    Returns:
        Norm of the gradient before clipping, a scalar.

    Raises:
        TypeError: if ``scheduler`` is not a schedule.
        ValueError: if ``max_grad_norm`` is not above 0.
        RuntimeError: if the norm is not finite. Nothing is stepped.
    """
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise TypeError(f"scheduler={scheduler!r} must be a learning-rate schedule; pass max_grad_norm by name")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm} must be above 0; use None to disable clipping")
    norm = clip_grad_norm_(model.parameters(), max_grad_norm or math.inf, error_if_nonfinite=True)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    optimizer.zero_grad()
    return norm


def catch_up(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> None:
    """Step a schedule up to ``steps``, after a batch that gave fewer updates than planned."""
    while scheduler.last_epoch < steps:
        scheduler.step()


def linear_schedule(
    optimizer: torch.optim.Optimizer, total_steps: int, *, warmup_steps: int | None = 0, final_fraction: float = 0.0
) -> torch.optim.lr_scheduler.LambdaLR:
    """Schedule a linear warmup and a linear decay of the learning rate.

    With ``peak`` the learning rate of the optimizer, step ``s`` has::

        lr = peak * min(1, (s + 1) / warmup_steps) * (1 - min(1, s / total_steps) * (1 - final_fraction))

    Args:
        optimizer: optimizer whose learning rates are the peak.
        total_steps: optimizer steps of the run.
        warmup_steps: steps of the warmup. None takes 5, or a tenth of a run shorter than 50 steps.
        final_fraction: share of the peak at the end, in [0, 1].

    Returns:
        A schedule to be stepped after every optimizer step.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> schedule, rates = linear_schedule(optimizer, 4, warmup_steps=2, final_fraction=0.5), []
        >>> for _ in range(5):
        ...     rates.append(round(schedule.get_last_lr()[0], 3))
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates
        [0.5, 0.875, 0.75, 0.625, 0.5]
    """
    if warmup_steps is None:
        warmup_steps = min(5, total_steps // 10)
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be at least 1")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must be between 0 and total_steps={total_steps}; lower it")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction={final_fraction} must be between 0 and 1")

    def factor(step: int) -> float:
        rising = min(1.0, (step + 1) / max(1, warmup_steps))
        return rising * (1 - min(1.0, step / total_steps) * (1 - final_fraction))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

"""One optimizer step, and the learning-rate schedule."""

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
        model: the trained parameters.
        optimizer: of these parameters.
        scheduler: of the optimizer; None for a constant learning rate.
        max_grad_norm: limit of the gradient's norm; None does not clip.

    Returns:
        Norm of the gradient before clipping, scalar.

    Raises:
        TypeError: for a ``scheduler`` that is none.
        ValueError: if ``max_grad_norm`` is not above 0.
        RuntimeError: if the norm is not finite; nothing is stepped.
    """
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise TypeError(f"scheduler={scheduler!r} must be a learning-rate schedule; is it max_grad_norm?")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm} must be above 0; null does not clip")
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
    r"""Let the learning rate rise linearly over the first steps, and fall linearly to a fraction over all of them.

    .. math:: \eta_s = \eta \min(1, (s + 1) / W) \, (1 - \min(1, s / S) (1 - f))

    Args:
        optimizer: its learning rates are the peak :math:`\eta`.
        total_steps: optimizer steps of the run, :math:`S`.
        warmup_steps: steps of the rise, :math:`W`. None: 5, or a tenth of a run that is shorter than 50 steps.
        final_fraction: share of the peak at the end, :math:`f`.

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
        raise ValueError(f"warmup_steps={warmup_steps} must be between 0 and total_steps={total_steps}: lower it")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction={final_fraction} must be between 0 and 1")

    def factor(step: int) -> float:
        rising = min(1.0, (step + 1) / max(1, warmup_steps))
        return rising * (1 - min(1.0, step / total_steps) * (1 - final_fraction))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

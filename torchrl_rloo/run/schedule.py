"""The learning-rate schedule."""

from __future__ import annotations

import torch


def linear_schedule(
    optimizer: torch.optim.Optimizer, total_steps: int, *, warmup_steps: int | None = 0, final_fraction: float = 0.0
) -> torch.optim.lr_scheduler.LambdaLR:
    """Learning rate that falls linearly to a fraction, and over the first steps also rises linearly from near 0.

    Args:
        optimizer: whose learning rates are taken as the start of the fall.
        total_steps: optimizer steps of the run.
        warmup_steps: steps of the rise; the first has ``1 / warmup_steps`` of the learning rate. None: 5, or a tenth of
            a run that is shorter than 50 steps.
        final_fraction: what is left of the learning rate at the end.

    Raises:
        ValueError: if a number is out of range.
    """
    if warmup_steps is None:
        warmup_steps = min(5, total_steps // 10)
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must be between 0 and total_steps={total_steps}: lower it")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction={final_fraction} must be between 0 and 1")

    def factor(step: int) -> float:
        rising = min(1.0, (step + 1) / max(1, warmup_steps))
        return rising * (1 - min(1.0, step / total_steps) * (1 - final_fraction))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

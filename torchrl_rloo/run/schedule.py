"""The learning-rate schedule."""

from __future__ import annotations

import torch


def linear_schedule(
    optimizer: torch.optim.Optimizer, total_steps: int, *, warmup_steps: int = 0, final_fraction: float = 0.0
) -> torch.optim.lr_scheduler.LambdaLR:
    """Learning rate up linearly over the first optimizer steps, then down linearly to a fraction of its peak.

    Args:
        optimizer: whose learning rates are the peaks.
        total_steps: optimizer steps of the run.
        warmup_steps: of which the first ones rise; the first step has ``1 / warmup_steps`` of the peak.
        final_fraction: what is left of the peak at the end.

    Raises:
        ValueError: if a number is out of range.
    """
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must be between 0 and total_steps={total_steps}")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction={final_fraction} must be between 0 and 1")

    def factor(step: int) -> float:
        rising = min(1.0, (step + 1) / max(1, warmup_steps))
        return rising * (1 - min(1.0, step / total_steps) * (1 - final_fraction))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

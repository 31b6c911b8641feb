"""The loss of a value estimate, and how much of the returns it explains."""

from __future__ import annotations

import torch


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, targets: torch.Tensor, epsilon: float | None = None
) -> torch.Tensor:
    r"""Half the squared error, pessimistic about estimates that have left their neighbourhood.

    .. math:: \tfrac{1}{2} \max\left( (V - R)^2, \;
        (\mathrm{clip}(V, V_{old} - \epsilon, V_{old} + \epsilon) - R)^2 \right)

    The value loss of the implementations of PPO (Schulman et al. 2017, arXiv 1707.06347), with their factor of a half.

    Args:
        values: ``[B, A]`` under the current weights; carries the gradient.
        old_values: ``[B, A]`` when the targets were computed.
        targets: ``[B, A]``, returns :math:`R`.
        epsilon: how far a value may go from the old one; None for no clip.

    Returns:
        ``[B, A]``, never negative.
    """
    error = (values - targets).square()
    if epsilon is not None:
        clipped = old_values + (values - old_values).clamp(-epsilon, epsilon)
        error = torch.maximum(error, (clipped - targets).square())
    return 0.5 * error


def explained_variance(values: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""Share of the targets' variance that the values explain, :math:`1 - \mathrm{Var}(R - V) / \mathrm{Var}(R)`.

    Args:
        values: ``[B, A]``.
        targets: ``[B, A]``.
        mask: ``[B, A]`` bool, True on the tokens that count; or how often each one does.

    Returns:
        A scalar: 1 for a perfect estimate (up to a constant), 0 for a constant one, negative for a worse one; NaN where
        the targets do not vary.
    """
    times = mask.flatten().long()
    targets, errors = (x.flatten().repeat_interleave(times) for x in (targets, targets - values))
    if not len(targets):
        return errors.new_tensor(torch.nan)
    variance = targets.var(correction=0)
    return torch.where(variance > 0, 1 - errors.var(correction=0) / variance, torch.nan)

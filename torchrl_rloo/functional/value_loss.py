"""Loss of value estimates, and the share of the returns that they explain."""

from __future__ import annotations

import torch


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, targets: torch.Tensor, epsilon: float | None = None
) -> torch.Tensor:
    """Return half the squared error, with the change of each value clipped.

    Value loss of PPO implementations (Schulman et al. 2017, arXiv 1707.06347), with their factor of a half::

        1/2 max((V - R)^2, (clip(V, V_old - epsilon, V_old + epsilon) - R)^2)

    Args:
        values: ``[B, A]`` under the current weights; carries the gradient.
        old_values: ``[B, A]`` under the weights that computed the targets.
        targets: ``[B, A]``, returns ``R``.
        epsilon: largest distance of a value from the old one. None disables the clip.

    Returns:
        ``[B, A]``, never negative.
    """
    error = (values - targets).square()
    if epsilon is not None:
        clipped = old_values + (values - old_values).clamp(-epsilon, epsilon)
        error = torch.maximum(error, (clipped - targets).square())
    return 0.5 * error


def explained_variance(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the share of the targets' variance that the values explain: ``1 - Var(R - V) / Var(R)``.

    Args:
        values: ``[n]`` estimates ``V``.
        targets: ``[n]`` returns ``R``.

    Returns:
        A scalar: 1 for a perfect estimate up to a constant, 0 for a constant one, negative for a worse one. NaN if
        the targets do not vary.
    """
    if not len(targets):
        return targets.new_tensor(torch.nan)
    variance = targets.var(correction=0)
    return torch.where(variance > 0, 1 - (targets - values).var(correction=0) / variance, torch.nan)

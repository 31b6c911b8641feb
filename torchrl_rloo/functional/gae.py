"""Generalized advantage estimation over the action tokens of each row."""

from __future__ import annotations

import torch


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    discount: float = 1.0,
    lam: float = 0.95,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute advantages and returns from the values before each action token.

    Equation 16 of Schulman et al. 2016 (arXiv 1506.02438)::

        delta_t = r_t + discount * V_{t+1} - V_t
        A_t = delta_t + discount * lam * A_{t+1}
        R_t = A_t + V_t

    Time counts action tokens: the first token of a turn follows the last token of the previous turn. The value after
    the last token is 0. With ``lam=1`` and ``discount=1`` the advantage is the sum of future rewards minus the value.
    With ``lam=0`` it is the one-step error.

    Args:
        rewards: ``[B, A]``, reward credited to each action token.
        values: ``[B, A]``, value estimate before each action token.
        mask: ``[B, A]`` bool, True on action tokens.
        discount: discount factor per token.
        lam: weight of longer horizons, in [0, 1].

    Returns:
        ``(advantages, returns)``, both ``[B, A]``, 0 where the mask is False.

    Example:
        >>> mask = torch.tensor([[True, True]])
        >>> gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), mask, lam=1.0)
        (tensor([[0.5000, 0.5000]]), tensor([[1., 1.]]))
    """
    following = advantage = values.new_zeros(len(values))
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        real, value = mask[:, t], values[:, t]
        delta = rewards[:, t] + discount * following - value
        advantage = torch.where(real, delta + discount * lam * advantage, advantage)
        following = torch.where(real, value, following)
        advantages[:, t] = torch.where(real, advantage, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)

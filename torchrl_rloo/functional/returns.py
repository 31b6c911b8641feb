"""Returns of tokens and turns, and estimates of them by a critic.

Tokens are ``[B, A]``: the action tokens of each row, left-aligned, with a mask ``[B, A]``.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def rewards_to_go(rewards: torch.Tensor, mask: torch.Tensor, discount: float = 1.0) -> torch.Tensor:
    """Return the discounted sum of rewards from each action token on: ``G_t = sum_{s >= t} discount^(s - t) r_s``.

    Equation 3.8 of Sutton and Barto, "Reinforcement Learning", second edition, including the current reward. Time
    counts the entries of a row: action tokens here, turns in the turn-level returns.

    Shapes: ``rewards [B, A]``, ``mask [B, A]`` to ``[B, A]``.
    """
    returns = torch.where(mask, rewards, 0.0).double()
    window = 1  # returns[t] sums the rewards t .. t + window - 1; each pass joins two windows
    while window < returns.shape[-1]:
        returns = returns + discount**window * pad(returns[:, window:], (0, window))
        window *= 2
    return torch.where(mask, returns, 0.0).to(rewards.dtype)


def turn_index(action_mask: torch.Tensor) -> torch.Tensor:
    """Return the turn of each action token; a turn is a maximal run of action tokens.

    Shapes: ``action_mask [B, T]`` to ``[B, T]`` int64.
    """
    starts = action_mask & ~pad(action_mask[:, :-1], (1, 0), value=False)
    return torch.where(action_mask, starts.cumsum(-1) - 1, -1)


def turn_rewards(rewards: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the token rewards of each turn.

    Shapes: ``rewards [B, L]``, ``turns [B, L]`` to ``(rewards [B, K], mask [B, K])``.
    """
    n_turns = int(turns.max()) + 1 if turns.numel() else 0
    counts = turns.amax(-1) + 1 if turns.shape[-1] else turns.new_zeros(len(turns))
    inside = turns >= 0
    earned = torch.where(inside, rewards, 0.0).double()
    total = earned.new_zeros(len(rewards), n_turns + 1).scatter_add(1, torch.where(inside, turns, n_turns), earned)
    return total[:, :n_turns].to(rewards.dtype), torch.arange(n_turns, device=turns.device) < counts[:, None]


def spread_turns(values: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return the value of its turn at each token, 0 on tokens without a turn.

    Shapes: ``values [B, K]``, ``turns [B, L]`` to ``[B, L]``.
    """
    if not values.shape[-1]:
        return values.new_zeros(turns.shape)
    return torch.where(turns >= 0, values.gather(1, turns.clamp(min=0)), 0.0)


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


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, targets: torch.Tensor, epsilon: float | None = None
) -> torch.Tensor:
    """Return half the squared error, with the change of each value clipped.

    Value loss of PPO implementations (Schulman et al. 2017, arXiv 1707.06347), with their factor of a half::

        1/2 max((V - R)^2, (clip(V, V_old - epsilon, V_old + epsilon) - R)^2)

    Shapes: ``values [B, A]``, ``old_values [B, A]``, ``targets [B, A]`` to ``[B, A]``.
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

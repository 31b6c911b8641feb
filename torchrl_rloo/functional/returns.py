"""Returns of tokens and turns.

Tokens are ``[B, A]``: the action tokens of each row, left-aligned, with a mask ``[B, A]``.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def rewards_to_go(rewards: torch.Tensor, mask: torch.Tensor, discount: float = 1.0) -> torch.Tensor:
    """Return the discounted sum of rewards from each action token on: ``G_t = sum_{s >= t} discount^(s - t) r_s``.

    Equation 3.8 of Sutton and Barto, "Reinforcement Learning", second edition, including the current reward. Time
    counts the entries of a row: action tokens here, turns in the turn-level returns.

    Args:
        rewards: ``[B, A]``; entries outside the mask are ignored.
        mask: ``[B, A]`` bool, left-aligned.
        discount: discount factor per entry, in [0, 1].

    Returns:
        ``[B, A]`` in the dtype of ``rewards``, 0 outside the mask. Differentiable.

    Example:
        >>> rewards_to_go(torch.tensor([[0.0, 0.0, 1.0]]), torch.ones(1, 3, dtype=torch.bool), 0.5)
        tensor([[0.2500, 0.5000, 1.0000]])
    """
    returns = torch.where(mask, rewards, 0.0).double()
    window = 1  # returns[t] sums the rewards t .. t + window - 1; each pass joins two windows
    while window < returns.shape[-1]:
        returns = returns + discount**window * pad(returns[:, window:], (0, window))
        window *= 2
    return torch.where(mask, returns, 0.0).to(rewards.dtype)


def turn_index(action_mask: torch.Tensor) -> torch.Tensor:
    """Return the turn of each action token; a turn is a maximal run of action tokens.

    Args:
        action_mask: ``[B, T]`` bool, True on action tokens and False on the other tokens of the row.

    Returns:
        ``[B, T]`` int64: 0, 1, ... on action tokens, -1 elsewhere.

    Example:
        >>> turn_index(torch.tensor([[False, True, True, False, True]]))
        tensor([[-1,  0,  0, -1,  1]])
    """
    starts = action_mask & ~pad(action_mask[:, :-1], (1, 0), value=False)
    return torch.where(action_mask, starts.cumsum(-1) - 1, -1)


def turn_rewards(rewards: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the token rewards of each turn.

    Args:
        rewards: ``[B, L]``, one per token.
        turns: ``[B, L]`` int64 from :func:`turn_index`, -1 on tokens without a turn.

    Returns:
        ``(rewards [B, K], mask [B, K])``, with ``K`` the largest number of turns of a row. The mask is True on the
        turns that a row has. :func:`rewards_to_go` turns them into turn-level returns.
    """
    n_turns = int(turns.max()) + 1 if turns.numel() else 0
    counts = turns.amax(-1) + 1 if turns.shape[-1] else turns.new_zeros(len(turns))
    inside = turns >= 0
    earned = torch.where(inside, rewards, 0.0).double()
    total = earned.new_zeros(len(rewards), n_turns + 1).scatter_add(1, torch.where(inside, turns, n_turns), earned)
    return total[:, :n_turns].to(rewards.dtype), torch.arange(n_turns, device=turns.device) < counts[:, None]


def spread_turns(values: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return the value of its turn at each token, 0 on tokens without a turn.

    Args:
        values: ``[B, K]``, one per turn.
        turns: ``[B, L]`` int64 from :func:`turn_index`.

    Returns:
        ``[B, L]``.
    """
    if not values.shape[-1]:
        return values.new_zeros(turns.shape)
    return torch.where(turns >= 0, values.gather(1, turns.clamp(min=0)), 0.0)

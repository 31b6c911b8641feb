"""Advantage estimator with a running baseline for each prompt, or for each role."""

from __future__ import annotations

from typing import Any, Literal

import torch

from torchrl_rloo.data import keys

_KEYS = {"prompt": keys.PROMPT_ID, "role": keys.ROLE_ID}


class RunningBaseline:
    r"""Estimator that subtracts an exponential moving average of the rewards of the prompt, or role, in earlier draws.

    .. math:: A_i = r_i - b_p, \qquad b_p \leftarrow d \, b_p + (1 - d) \, \bar r_g

    All rows of a group use the baseline from before the group. A row's baseline does not depend on the row, and even a
    group of one row has a signal. Groups update it in the order of their index. A group in which all rows abstain
    changes nothing. ``"prompt_id"`` tells prompts apart, and ``"role_id"`` roles (:class:`~torchrl_rloo.data.Role`).

    Args:
        decay: :math:`d`, weight of the old average, in ``[0, 1)``.
        initial: baseline of a prompt, or role, that was never drawn.
        by: ``"prompt"``, or ``"role"`` for one baseline for each role over all prompts.

    Attributes:
        baselines: current baseline of each prompt or role that was drawn, by its id.
        key: entry of rows with that id.

    Raises:
        ValueError: if ``decay`` is out of range, or ``by`` is unknown.

    Example:
        >>> baseline = RunningBaseline(decay=0.5)
        >>> group, prompt = torch.tensor([0]), torch.tensor([7])
        >>> [baseline(torch.tensor([1.0]), group, prompt).item() for _ in range(3)]
        [1.0, 0.5, 0.25]
    """

    rescales, needs_group, wants_prompts = False, False, True

    def __init__(self, *, decay: float = 0.9, initial: float = 0.0, by: Literal["prompt", "role"] = "prompt"):
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be at least 0 and below 1")
        if by not in _KEYS:
            raise ValueError(f"by={by!r} must be one of {list(_KEYS)}")
        self.decay, self.initial, self.key = decay, initial, _KEYS[by]
        self.baselines: dict[int, float] = {}

    def __call__(self, rewards: torch.Tensor, groups: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        """Return the advantages of the rows, and update the baselines.

        Args:
            rewards: ``[N]``, NaN where a row abstains.
            groups: ``[N]`` int64, index of each row's group.
            prompts: ``[N]`` int64, id of each row's prompt, or role.

        Returns:
            ``[N]`` in the dtype of ``rewards``; 0 where a row abstains.
        """
        advantages = torch.zeros_like(rewards)
        for group in groups.unique().tolist():
            rows = (groups == group) & ~rewards.isnan()
            if rows.any():
                prompt, earned = int(prompts[rows][0]), rewards[rows].double()
                baseline = self.baselines.get(prompt, self.initial)
                advantages[rows] = (earned - baseline).to(rewards.dtype)
                self.baselines[prompt] = self.decay * baseline + (1 - self.decay) * earned.mean().item()
        return advantages

    def state_dict(self) -> dict[str, Any]:
        """Return the baselines for a checkpoint."""
        return {"baselines": dict(self.baselines)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the baselines."""
        self.baselines = dict(state["baselines"])

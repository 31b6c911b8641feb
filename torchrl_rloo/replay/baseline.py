"""RunningBaseline: an estimator that remembers what each prompt earned before."""

from __future__ import annotations

from typing import Any

import torch


class RunningBaseline:
    r"""The reward less an exponential moving average of what the same prompt earned in earlier draws.

    .. math:: A_i = r_i - b_p, \qquad b_p \leftarrow d \, b_p + (1 - d) \, \bar r_g

    Every row of a group sees the baseline as it was before the group, so a row's baseline does not depend on the row,
    and a group of one has a signal, too. Groups are taken in the order of their index; a group of which all rows
    abstain changes nothing. Prompts are told apart by ``"prompt_id"``.

    Args:
        decay: :math:`d`, share of the old average that stays, from 0 to below 1.
        initial: the baseline of a prompt that was never drawn.

    Attributes:
        baselines: the present baseline of each prompt that was drawn.

    Raises:
        ValueError: for a decay out of range.

    Example:
        >>> baseline = RunningBaseline(decay=0.5)
        >>> group, prompt = torch.tensor([0]), torch.tensor([7])
        >>> [baseline(torch.tensor([1.0]), group, prompt).item() for _ in range(3)]
        [1.0, 0.5, 0.25]
    """

    rescales, needs_group, wants_prompts = False, False, True

    def __init__(self, *, decay: float = 0.9, initial: float = 0.0):
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be at least 0 and below 1")
        self.decay, self.initial = decay, initial
        self.baselines: dict[int, float] = {}

    def __call__(self, rewards: torch.Tensor, groups: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        """Advantages of the rows, and an update by each of their groups.

        Args:
            rewards: ``[N]``, NaN where a row abstains.
            groups: ``[N]`` int64, the index of each row's group.
            prompts: ``[N]`` int64, which prompt each row answers.

        Returns:
            ``[N]`` in the dtype of ``rewards``; 0 for a row that abstains.
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
        """The baselines, for a checkpoint."""
        return {"baselines": dict(self.baselines)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the baselines."""
        self.baselines = dict(state["baselines"])

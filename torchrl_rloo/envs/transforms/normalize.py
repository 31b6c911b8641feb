"""Normalization of reward functions' scores by their running standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_rloo.envs.transforms.shaping import SHAPING_LOCK, ScoreSource, ShapingTransform
from torchrl_rloo.functional.rewards import Moments, column_moments, decay_moments, merge_moments, normalize_scores


class NormalizeRewards(ShapingTransform):
    """Shaping that divides each function's scores by their running standard deviation.

    Weights then mean the same for functions of different scale, and the learning rate for reward models of any scale.
    A function whose scores have all been equal is not divided.

    The statistics cover all scores before the current batch. No row is scaled by its own score, and all rows of a batch
    share one scale. A batch ends at the environment's reset, or in a collector when its rows were returned.
    Neither the scale nor the later statistics depend on the order in which groups end. Moments are merged exactly (Chan
    et al. 1979).

    Args:
        rewards: see :class:`ShapingTransform`.
        functions: see :class:`ShapingTransform`.
        center: whether to subtract the mean. Under leave-one-out, or any baseline that is a mean over the group, this
            constant cancels. It matters without such a baseline (REINFORCE, a critic), where a function abstains on
            some members of a group, and for ``clip_range``.
        decay: factor in (0, 1] on the weight of earlier scores at the end of each batch. 1 forgets none; 0.99 remembers
            about 100 batches.
        min_count: minimum number of scores, at least 2, in the statistics. Until then, scores are left unchanged and
            counted.
        epsilon: positive number added to the standard deviation.

    Attributes:
        moments: moments of the chosen functions' scores before the current batch.
        collected: whether a collector calls :meth:`end_batch`; otherwise resets do.
        counts: ``"shaping/<function>/unnormalized"``, the number of scores left unchanged because of ``min_count``.

    Example:
        >>> from torchrl_rloo.envs.transforms import ScoreNames
        >>> normalize = NormalizeRewards(ScoreNames(["reward_model"], [1.0]), min_count=2, decay=0.99)
        >>> normalize.names
        ['reward_model']
    """

    def __init__(
        self,
        rewards: ScoreSource,
        functions: Sequence[str] | None = None,
        *,
        center: bool = False,
        decay: float = 1.0,
        min_count: int = 64,
        epsilon: float = 1e-4,
    ):
        super().__init__(rewards, functions)
        if not 0 < decay <= 1:
            raise ValueError(f"decay={decay} must be in (0, 1]; use 1 to forget nothing")
        if min_count < 2:
            raise ValueError(f"min_count={min_count} must be at least 2; one score has no standard deviation")
        if not epsilon > 0:
            raise ValueError(f"epsilon={epsilon} must be positive")
        self.center, self.decay, self.min_count, self.epsilon = center, decay, min_count, epsilon
        self.moments, self.collected = Moments.zeros(len(self.names)), False
        self._current: list[Moments] = []  # of each group or step of the current batch

    def shape(self, scores: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
        """Return scores divided by the standard deviation before this batch; see :class:`ShapingTransform`."""
        new = column_moments(scores)
        self._current.append(new)
        for name, count, known in zip(self.names, new.count.tolist(), self.moments.count.tolist(), strict=True):
            if known < self.min_count:
                self.counts[f"shaping/{name}/unnormalized"] += int(count)
        return normalize_scores(
            scores, self.moments, center=self.center, min_count=self.min_count, epsilon=self.epsilon
        )

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if not self.collected:
            self.end_batch()
        return tensordict_reset

    def end_batch(self) -> None:
        """Add the scores of the current batch to the statistics."""
        with SHAPING_LOCK:
            current, self._current = self._current, []
            # Merge in an order of their values, so that rounding does not depend on which group ended first
            current.sort(key=lambda moments: [column.tolist() for column in moments])
            merged = reduce(merge_moments, current, Moments.zeros(len(self.names)))
            if merged.count.any():
                self.moments = merge_moments(decay_moments(self.moments, self.decay), merged)

    def get_extra_state(self) -> dict[str, Any]:
        """Return counters and statistics, for ``state_dict``.

        A collector runs the groups of an unfinished batch again after a resume, so their scores are left out.
        """
        current = [] if self.collected else [list(moments) for moments in self._current]
        moments = {"names": list(self.names), "moments": list(self.moments), "current": current}
        return super().get_extra_state() | moments

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore counters and statistics, in place.

        Raises:
            ValueError: if the statistics belong to other functions.
        """
        if state["names"] != self.names:
            raise ValueError(
                f"the state has statistics of {state['names']}, but this transform has functions={self.names}; resume "
                "with the same functions"
            )
        super().set_extra_state(state)
        self.moments, self._current = Moments(*state["moments"]), [Moments(*moments) for moments in state["current"]]

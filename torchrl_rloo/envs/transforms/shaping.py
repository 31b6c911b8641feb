"""Reward shaping: transforms of reward functions' scores before these become a return.

Put each transform directly after the :class:`RewardTransform` or another shaping transform, and before those that
change the return itself (:class:`TurnRewardTransform`, :class:`KLRewardTransform`)::

    rewards = RewardTransform([accuracy, reward_model], weights=[1.0, 0.5])
    shaping = [CalibrateScores(rewards, 2.5, functions=["reward_model"]), NormalizeRewards(rewards)]
    DatasetChatEnv(..., rewards=rewards, after_rewards=[*shaping, KLRewardTransform(ref, 0.05)])

They act on the chosen functions of rows that are done, and shape each function separately. ``("next", "rewards")``
``[F]`` then holds the shaped scores, ``("next", "raw_rewards")`` ``[F]`` the original ones, and ``("next", "reward")``
``[1, 1]`` is combined again with weights and clip. NaN, by which a function abstains, stays NaN.
"""

from __future__ import annotations

import json
import math
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded

from torchrl_rloo.envs.transforms.reward import RewardTransform
from torchrl_rloo.envs.turn_transform import EnvTransform
from torchrl_rloo.functional.rewards import (
    Moments,
    calibrate_scores,
    column_moments,
    combine_rewards,
    decay_moments,
    merge_moments,
    normalize_scores,
)

SHAPING_LOCK = Lock()  # a collector scores groups on several threads


class ShapingTransform(EnvTransform):
    """Base class of score shaping; a subclass implements :meth:`shape`."""

    def __init__(self, rewards: RewardTransform, functions: Sequence[str] | None = None):
        super().__init__()
        names = list(rewards.names)
        functions = names if functions is None else functions
        if isinstance(functions, str) or not functions or not set(functions) <= set(names):
            raise ValueError(f"functions={functions!r} must be a list of names among {names}, or None for all")
        self.__dict__["rewards"] = rewards  # not a submodule: the environment saves its state already
        self.names = [name for name in names if name in set(functions)]
        self.columns = [names.index(name) for name in self.names]
        self.counts: Counter[str] = Counter()

    @abstractmethod
    def shape(self, scores: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
        """Return shaped scores of the chosen functions."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        # Keep the original scores, which only the first shaping transform sees; a turn before the last may have none
        rows = next_tensordict.unbind(0)
        for row in rows:
            if "rewards" in row.keys() and "raw_rewards" not in row.keys():
                row.set("raw_rewards", row["rewards"])
        finished = [row for row in rows if row["done"].any()]
        # Shape the rows that are done, and combine their scores again
        if finished:
            scores = torch.stack([row["rewards"] for row in finished])
            self._check_order(scores, torch.stack([row["reward"].reshape(()) for row in finished]))
            truncated = torch.stack([row["truncated"].any() for row in finished])
            with SHAPING_LOCK:
                scores[:, self.columns] = self.shape(scores[:, self.columns], truncated)
            returns = combine_rewards(scores, self.rewards.weights, self.rewards.clip_range)
            for row, each, total in zip(finished, scores, returns, strict=True):
                row.set("rewards", each).set("reward", total.reshape(1, 1))
        return next_tensordict

    def _check_order(self, scores: torch.Tensor, returns: torch.Tensor) -> None:
        expected = combine_rewards(scores, self.rewards.weights, self.rewards.clip_range)
        if not torch.allclose(returns, expected, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ValueError(
                f"{type(self).__name__} would overwrite a return that a transform before it has changed (such as a KL "
                "penalty or turn rewards); put shaping right after the RewardTransform"
            )

    def get_extra_state(self) -> dict[str, Any]:
        """Return the counters, for ``state_dict``."""
        return {"counts": dict(self.counts)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the counters, in place."""
        self.counts.clear()
        self.counts.update(state["counts"])

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Add the scores from before shaping."""
        shape = self.parent.batch_size
        reward_spec["raw_rewards"] = Unbounded(shape=(*shape, len(self.rewards.names)))
        return reward_spec


class ClipRewards(ShapingTransform):
    """Shaping that clips each function's scores before they are combined.

    Args:
        rewards: see :class:`ShapingTransform`.
        low: lower bound; ``-inf`` disables it.
        high: upper bound; ``inf`` disables it.
        functions: see :class:`ShapingTransform`.

    Attributes:
        counts: ``"shaping/<function>/clipped"``, the number of scores outside of the bounds.

    Example:
        >>> clip = ClipRewards(RewardTransform("accuracy"), -5.0, 5.0)
        >>> clip.shape(torch.tensor([[7.0], [1.0]]), torch.tensor([False, False])).tolist()
        [[5.0], [1.0]]
    """

    def __init__(self, rewards: RewardTransform, low: float, high: float, functions: Sequence[str] | None = None):
        super().__init__(rewards, functions)
        if not low < high:
            raise ValueError(f"low={low} must be below high={high}")
        self.low, self.high = float(low), float(high)

    def shape(self, scores: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
        """Return scores clipped to the bounds; see :class:`ShapingTransform`."""
        for name, outside in zip(self.names, ((scores < self.low) | (scores > self.high)).sum(0).tolist(), strict=True):
            self.counts[f"shaping/{name}/clipped"] += outside
        return scores.clamp(self.low, self.high)


class CalibrateScores(ShapingTransform):
    """Shaping that divides a reward model's logits by the temperature at which it is calibrated.

    Args:
        rewards: see :class:`ShapingTransform`.
        temperature: positive temperature, or the path of a ``calibration.json`` that holds it under ``"temperature"``,
            as reward-model training writes it.
        bias: constant added to the quotient. Without ``sigmoid`` it cancels within a group.
        sigmoid: whether to convert the score to a probability.
        functions: see :class:`ShapingTransform`.

    Example:
        >>> calibrate = CalibrateScores(RewardTransform("accuracy"), 2.0)
        >>> calibrate.shape(torch.tensor([[3.0]]), torch.tensor([False])).tolist()
        [[1.5]]
    """

    def __init__(
        self,
        rewards: RewardTransform,
        temperature: float | str | os.PathLike,
        bias: float = 0.0,
        *,
        sigmoid: bool = False,
        functions: Sequence[str] | None = None,
    ):
        super().__init__(rewards, functions)
        if isinstance(temperature, str | os.PathLike):
            temperature = _read_temperature(Path(temperature))
        if not (math.isfinite(temperature) and temperature > 0 and math.isfinite(bias)):
            raise ValueError(f"temperature={temperature} must be finite and positive, and bias={bias} finite")
        self.temperature, self.bias, self.sigmoid = float(temperature), float(bias), sigmoid

    def shape(self, scores: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
        """Return calibrated scores; see :class:`ShapingTransform`."""
        return calibrate_scores(scores, self.temperature, self.bias, self.sigmoid)


def _read_temperature(path: Path) -> float:
    found = json.loads(path.read_text())
    value = found.get("temperature") if isinstance(found, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path} must hold a number under 'temperature', but holds {found!r:.200}")
    return value


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
        >>> NormalizeRewards(RewardTransform("accuracy"), min_count=2, decay=0.99).names
        ['math_accuracy']
    """

    def __init__(
        self,
        rewards: RewardTransform,
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
        """Restore counters and statistics, in place."""
        if state["names"] != self.names:
            raise ValueError(
                f"the state has statistics of {state['names']}, but this transform has functions={self.names}; resume "
                "with the same functions"
            )
        super().set_extra_state(state)
        self.moments, self._current = Moments(*state["moments"]), [Moments(*moments) for moments in state["current"]]

"""Reward shaping: what happens to the scores of reward functions before they become a return.

Each transform here stands right after the :class:`RewardTransform`, or after another of them, and before those that
change the return itself (:class:`TurnRewardTransform`, :class:`KLRewardTransform`)::

    rewards = RewardTransform([accuracy, reward_model], weights=[1.0, 0.5])
    shaping = [CalibrateScores(rewards, 2.5, functions=["reward_model"]), NormalizeRewards(rewards)]
    DatasetChatEnv(..., rewards=rewards, after_rewards=[*shaping, KLRewardTransform(ref, 0.05)])

They act on rows that are done and on the functions they are told, and keep the functions apart: ``("next", "rewards")``
holds the shaped scores ``[F]``, ``("next", "raw_rewards")`` what the functions gave, and ``("next", "reward")`` is
combined again, with weights and clip. NaN, by which a function abstains, stays NaN.
"""

from __future__ import annotations

import json
import math
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

from torchrl_rloo.functional.rewards import combine_rewards
from torchrl_rloo.functional.shaping import (
    TRUNCATION_MODES,
    Moments,
    TruncationMode,
    calibrate_scores,
    column_moments,
    forget,
    merge_moments,
    normalize_scores,
    truncated_scores,
)


class ScoreSource(Protocol):
    """Whose scores a transform shapes: a :class:`RewardTransform`, or :class:`ScoreNames`."""

    names: Sequence[str]
    weights: Sequence[float]
    clip_range: tuple[float, float] | None


@dataclass(frozen=True)
class ScoreNames:
    """What a transform has to know of scores that no :class:`RewardTransform` gives.

    Attributes:
        names: of the ``F`` functions, in the order of ``("next", "rewards")``.
        weights: one for each.
        clip_range: bounds of the weighted sum, or None.
    """

    names: Sequence[str]
    weights: Sequence[float]
    clip_range: tuple[float, float] | None = None


class ShapingTransform(Transform):
    """What all shaping has in common; a kind of shaping defines :meth:`shape`.

    Args:
        rewards: the :class:`RewardTransform` whose scores are shaped, or :class:`ScoreNames`.
        functions: names of the functions that it applies to; None for all.

    Attributes:
        counts: what was done so far.

    Raises:
        ValueError: for a name that is not of ``rewards``; at a step, where another transform has changed the return.
    """

    def __init__(self, rewards: ScoreSource, functions: Sequence[str] | None = None):
        super().__init__()
        names = list(rewards.names)
        functions = names if functions is None else functions
        if isinstance(functions, str) or not functions or not set(functions) <= set(names):
            raise ValueError(f"functions={functions!r} must be a list of names among {names}, or None for all")
        self.__dict__["rewards"] = rewards  # not a submodule: its state is saved where it stands itself
        self.names = [name for name in names if name in set(functions)]
        self.columns = [names.index(name) for name in self.names]
        self.counts: Counter[str] = Counter()

    @abstractmethod
    def shape(self, scores: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
        """Shaped scores of the chosen functions.

        Args:
            scores: ``[n, len(names)]`` of rows that are done, NaN where a function abstained.
            truncated: bool ``[n]``.
        """

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rows = next_tensordict.unbind(0)
        for row in rows:
            if "raw_rewards" not in row.keys():
                row.set("raw_rewards", row["rewards"])
        finished = [row for row in rows if row["done"].any()]
        if finished:
            scores = torch.stack([row["rewards"] for row in finished])
            self._check_order(scores, torch.stack([row["reward"].reshape(()) for row in finished]))
            truncated = torch.stack([row["truncated"].any() for row in finished])
            scores[:, self.columns] = self.shape(scores[:, self.columns], truncated)
            returns = combine_rewards(scores, self.rewards.weights, self.rewards.clip_range)
            for row, each, total in zip(finished, scores, returns, strict=True):
                row.set("rewards", each).set("reward", total.reshape(1, 1))
        return next_tensordict

    def _check_order(self, scores: torch.Tensor, returns: torch.Tensor) -> None:
        expected = combine_rewards(scores, self.rewards.weights, self.rewards.clip_range)
        if not torch.allclose(returns, expected, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ValueError(
                f"{type(self).__name__} combines scores to returns anew, but a transform before it has changed the "
                "return (a KL or rewards of turns, say), which would be lost: put shaping right after the "
                "RewardTransform"
            )

    def get_extra_state(self) -> dict[str, Any]:
        """The counters, for ``state_dict``."""
        return {"counts": dict(self.counts)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores the counters, in place."""
        self.counts.clear()
        self.counts.update(state["counts"])

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Adds the scores as the functions gave them."""
        shape = self.parent.batch_size
        reward_spec["raw_rewards"] = Unbounded(shape=(*shape, len(self.rewards.names)))
        return reward_spec


class NormalizeRewards(ShapingTransform):
    """Divides each function's scores by the running standard deviation of that function's scores.

    It makes weights mean the same for functions of unlike scale, and the learning rate for a reward model of any. The
    statistics are those of all scores that came before the environment's last reset: scores enter after they were
    normalised, so that no row is judged by a scale that it has set itself. All rows between two resets, so all members
    of a group, are on one scale, whatever the order or number of steps in which they end, and so are the statistics
    after them, up to rounding in float64. The moments are merged exactly (Chan et al. 1979).

    Args:
        rewards: see :class:`ShapingTransform`.
        functions: see :class:`ShapingTransform`.
        center: whether to subtract the mean as well. Under leave-one-out, or any baseline that is a mean over the
            group, this changes nothing: the same number is subtracted from every member of a group and cancels. It does
            matter where there is no such baseline (REINFORCE, a critic), where a function abstains on some members of
            a group, and to ``clip_range``.
        decay: at each reset, what earlier scores weigh relative to before; 1 forgets none, 0.99 has a memory of about
            100 resets. Unlike the merge it depends on where resets fall.
        min_count: how many scores statistics have to be of; until then scores stay as they are and are counted.
        epsilon: added to the standard deviation.

    A function whose scores have all been equal has no scale and is not divided.

    Attributes:
        moments: of the chosen functions' scores up to the last reset.
        counts: ``"<function>/unnormalised"``: scores left as they were for want of ``min_count``.
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
            raise ValueError(f"decay={decay} must be above 0 and at most 1")
        if min_count < 2:
            raise ValueError(f"min_count={min_count} must be at least 2: one score has no spread")
        if not epsilon > 0:
            raise ValueError(f"epsilon={epsilon} must be a positive number")
        self.center, self.decay, self.min_count, self.epsilon = center, decay, min_count, epsilon
        self.moments, self._since_reset = Moments.zeros(len(self.names)), Moments.zeros(len(self.names))

    def shape(self, scores: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
        """Scores over the standard deviation up to the last reset; they enter at the next one."""
        new = column_moments(scores)
        self._since_reset = merge_moments(self._since_reset, new)
        for name, count, known in zip(self.names, new.count.tolist(), self.moments.count.tolist(), strict=True):
            if known < self.min_count:
                self.counts[f"{name}/unnormalised"] += int(count)
        return normalize_scores(
            scores, self.moments, center=self.center, min_count=self.min_count, epsilon=self.epsilon
        )

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if self._since_reset.count.any():
            self.moments = merge_moments(forget(self.moments, self.decay), self._since_reset)
            self._since_reset = Moments.zeros(len(self.names))
        return tensordict_reset

    def get_extra_state(self) -> dict[str, Any]:
        """Counters and statistics."""
        moments = {"names": list(self.names), "moments": list(self.moments), "since_reset": list(self._since_reset)}
        return super().get_extra_state() | moments

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores counters and statistics.

        Raises:
            ValueError: if they are of other functions.
        """
        if state["names"] != self.names:
            raise ValueError(f"the state has statistics of {state['names']}, this transform is of {self.names}")
        super().set_extra_state(state)
        self.moments, self._since_reset = (Moments(*state[k]) for k in ("moments", "since_reset"))


class ClipRewards(ShapingTransform):
    """Bounds each function's score, before scores are combined.

    Args:
        rewards: see :class:`ShapingTransform`.
        low: the smallest score; ``-inf`` for no bound.
        high: the largest; ``inf`` for no bound.
        functions: see :class:`ShapingTransform`.

    Attributes:
        counts: ``"<function>/clipped"``: scores that were outside.
    """

    def __init__(self, rewards: ScoreSource, low: float, high: float, functions: Sequence[str] | None = None):
        super().__init__(rewards, functions)
        if not low < high:
            raise ValueError(f"low={low} must be less than high={high}")
        self.low, self.high = float(low), float(high)

    def shape(self, scores: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
        """Scores between the bounds."""
        for name, outside in zip(self.names, ((scores < self.low) | (scores > self.high)).sum(0).tolist(), strict=True):
            self.counts[f"{name}/clipped"] += outside
        return scores.clamp(self.low, self.high)


class CalibrateScores(ShapingTransform):
    """A reward model's logits, divided by the temperature at which it is calibrated.

    Args:
        rewards: see :class:`ShapingTransform`.
        temperature: a positive number, or the path of a ``calibration.json`` that has it under ``"temperature"``, as
            the training of a reward model writes it.
        bias: added to the quotient. Without ``sigmoid`` it cancels in a group, as any constant does.
        sigmoid: whether the score becomes a probability.
        functions: see :class:`ShapingTransform`.
    """

    def __init__(
        self,
        rewards: ScoreSource,
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
            raise ValueError(f"temperature={temperature} must be a positive number and bias={bias} a finite one")
        self.temperature, self.bias, self.sigmoid = float(temperature), float(bias), sigmoid

    def shape(self, scores: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
        """Calibrated scores."""
        return calibrate_scores(scores, self.temperature, self.bias, self.sigmoid)


def _read_temperature(path: Path) -> float:
    found = json.loads(path.read_text())
    value = found.get("temperature") if isinstance(found, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path} must hold a number under 'temperature', it holds {found!r:.200}")
    return value


class TruncationPolicy(ShapingTransform):
    r"""What becomes of the return of rows that a token, turn or time limit cut off.

    ===============  =================================================================================================
    ``"keep"``       nothing
    ``"scale"``      it is multiplied by ``value``, in [0, 1]. A negative return gets better by that
    ``"replace"``    it becomes ``value``
    ``"penalty"``    ``value`` is added to it, at most 0
    ``"abstain"``    the row abstains: it is left out of the baseline and has advantage 0
    ===============  =================================================================================================

    ``"scale"`` and ``"replace"`` with a negative value are the two forms of ProRL v2's stop-properly penalty. The
    return meant is what the chosen functions contribute, :math:`\sum_k w_k r_k`; scores change so that it comes out
    (:func:`~torchrl_rloo.functional.shaping.truncated_scores`), and ``clip_range`` comes after. ``"abstain"`` for some
    of the functions leaves the row what the others gave. To leave out the tokens of truncated rows, but not their
    return, use the loss's ``mask_truncated_completions``.

    Args:
        rewards: see :class:`ShapingTransform`.
        mode: one of the above.
        value: see above; not for ``"keep"`` and ``"abstain"``.
        functions: see :class:`ShapingTransform`.

    Attributes:
        counts: ``"shaped_truncated_rows"``: rows whose return was changed so.
    """

    def __init__(
        self,
        rewards: ScoreSource,
        mode: TruncationMode,
        value: float | None = None,
        *,
        functions: Sequence[str] | None = None,
    ):
        super().__init__(rewards, functions)
        if mode not in TRUNCATION_MODES:
            raise ValueError(f"mode={mode!r} must be one of {TRUNCATION_MODES}")
        allowed = {"scale": "in [0, 1]", "replace": "a finite number", "penalty": "a finite number of at most 0"}
        fits = {
            "scale": lambda v: 0 <= v <= 1,
            "replace": math.isfinite,
            "penalty": lambda v: math.isfinite(v) and v <= 0,
        }
        if mode in allowed and (value is None or not fits[mode](value)):
            raise ValueError(f"value={value} must be {allowed[mode]} for mode={mode!r}")
        if mode not in allowed and value is not None:
            raise ValueError(f"value={value} means nothing for mode={mode!r}")
        if mode in ("replace", "penalty") and any(rewards.weights[k] <= 0 for k in self.columns):
            raise ValueError(
                f"mode={mode!r} shares the value out by weight, so the weights of {self.names} must be positive, got "
                f"{[rewards.weights[k] for k in self.columns]}: leave the others out of functions"
            )
        self.mode, self.value = mode, 0.0 if value is None else float(value)

    def shape(self, scores: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
        """Scores of which truncated rows have the return they should."""
        if self.mode != "keep":
            self.counts["shaped_truncated_rows"] += int(truncated.sum())
        weights = torch.tensor([float(self.rewards.weights[k]) for k in self.columns])
        return truncated_scores(scores, truncated, weights, self.mode, self.value)

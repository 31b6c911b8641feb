"""RewardTransform: what finished trajectories earn, by plain reward functions."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.functional import combine_rewards
from torchrl_rloo.rewards.protocol import (
    MalformedScoresError,
    RewardFunction,
    call_reward,
    call_reward_row_by_row,
    reward_name,
)

_LOGGER = logging.getLogger(__name__)


class RewardTransform(Transform):
    """Scores each trajectory when it ends, and writes ``("next", "reward")`` and ``("next", "rewards")``.

    Put it after the transforms that may continue a conversation: rows that are not done get reward 0.

    Args:
        functions: reward functions (:mod:`torchrl_rloo.rewards.protocol`), called once for all rows that end together.
        weights: one per function; default 1 each.
        clip_range: bounds of the weighted sum, applied before any KL penalty; None for none.
        max_failures: in how many batches in a row a function may raise for every row before the run stops, since it
            would learn nothing. A function that raises is called again row by row; the rows on which it still raises
            abstain, with the traceback in the log.

    Attributes:
        counts: ``"<name>/failed_rows"``, ``"<name>/failed_calls"`` (batches of which every row failed) and
            ``"<name>/not_finite"``, over the transform's life.

    Raises:
        ValueError: for no functions, two of one name, or another number of weights than of functions.
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[RewardFunction],
        *,
        weights: Sequence[float] | None = None,
        clip_range: tuple[float, float] | None = None,
        max_failures: int = 3,
    ):
        super().__init__()
        self.functions = [functions] if callable(functions) else list(functions)
        self.names = [reward_name(f) for f in self.functions]
        self.weights = [1.0] * len(self.functions) if weights is None else [float(w) for w in weights]
        if not self.functions:
            raise ValueError("functions is empty: give at least one reward function")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"reward functions are logged by name, but the names {self.names} are not all different")
        if len(self.weights) != len(self.functions):
            raise ValueError(f"{len(self.weights)} weights {self.weights} for {len(self.functions)} reward functions")
        if not all(math.isfinite(w) for w in self.weights):
            raise ValueError(f"weights={self.weights} must be finite numbers")
        if max_failures < 1:
            raise ValueError(f"max_failures={max_failures} must be at least 1")
        if clip_range is not None and not clip_range[0] < clip_range[1]:
            raise ValueError(f"clip_range={clip_range} must be (low, high) with low < high")
        self.clip_range, self.max_failures = clip_range, max_failures
        self.counts: Counter[str] = Counter()
        self._failures_in_a_row: Counter[str] = Counter()

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rows, next_rows = tensordict.unbind(0), next_tensordict.unbind(0)
        finished = [i for i, row in enumerate(next_rows) if row["done"].any()]
        scores = torch.full((len(rows), len(self.functions)), torch.nan)
        total = torch.zeros(len(rows))
        if finished:
            scores[finished] = self._score([rows[i] for i in finished], [next_rows[i] for i in finished])
            total[finished] = combine_rewards(scores[finished], self.weights, self.clip_range)
        for row, reward, each in zip(next_rows, total, scores, strict=True):
            row.set("reward", reward.reshape(1, 1)).set("rewards", each)
        return next_tensordict

    def _score(self, rows: list[TensorDictBase], next_rows: list[TensorDictBase]) -> torch.Tensor:
        """``[n, F]``."""
        columns = {k: [_plain(r[k]) for r in rows] for k in rows[0].keys() if k not in keys.RESERVED}
        ids = [r[keys.PROMPT_TOKENS][r[keys.ACTION_MASK]].tolist() for r in next_rows]
        prompts, completions = [r[keys.QUERY] for r in rows], [r[keys.COMPLETION] for r in next_rows]
        scores = []
        for name, function in zip(self.names, self.functions, strict=True):
            failed = 0
            try:
                values, bad = call_reward(function, prompts, completions, ids, columns)
            except MalformedScoresError as error:
                values, bad, failed = torch.full((len(rows),), torch.nan), 0, len(rows)
                self._count_failed_call(name, error)
            except Exception as error:
                values, bad, failed = call_reward_row_by_row(function, prompts, completions, ids, columns)
                if failed == len(rows):
                    self._count_failed_call(name, error)
            if failed < len(rows):
                self._failures_in_a_row[name] = 0
            self.counts[f"{name}/failed_rows"] += failed
            self.counts[f"{name}/not_finite"] += bad
            scores.append(values)
        return torch.stack(scores, -1)

    def _count_failed_call(self, name: str, error: Exception) -> None:
        _LOGGER.error("reward %s failed for every row: %s: %s", name, type(error).__name__, error)
        self.counts[f"{name}/failed_calls"] += 1
        self._failures_in_a_row[name] += 1
        if self._failures_in_a_row[name] >= self.max_failures:
            raise RuntimeError(
                f"reward {name} raised for every row of {self.max_failures} batches in a row, so nothing can be "
                f"learned from it; last: {type(error).__name__}: {error}"
            ) from error

    def get_extra_state(self) -> dict[str, dict[str, int]]:
        """The counters, for ``state_dict``."""
        return {"counts": dict(self.counts), "failures_in_a_row": dict(self._failures_in_a_row)}

    def set_extra_state(self, state: dict[str, dict[str, int]]) -> None:
        """Restores the counters, in place."""
        for counter, saved in ((self.counts, "counts"), (self._failures_in_a_row, "failures_in_a_row")):
            counter.clear()
            counter.update(state[saved])

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Adds the scores of each function beside their sum."""
        shape = self.parent.batch_size
        reward_spec["rewards"] = Unbounded(shape=(*shape, len(self.functions)))
        return reward_spec


def _plain(value):
    """A column's entry as the dataset had it: Python values, numbers for scalar tensors."""
    return value.tolist() if isinstance(value, torch.Tensor) else value

"""RewardTransform: what finished trajectories earn, by plain reward functions."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import EachScore, Returns, WeightedScores, final_return
from torchrl_rloo.data.rows import put, value_of
from torchrl_rloo.data.segments import sampled_ids
from torchrl_rloo.functional import combine_rewards
from torchrl_rloo.rewards.executors import Executor
from torchrl_rloo.rewards.latency import Histogram
from torchrl_rloo.rewards.protocol import RewardBatch, RewardFunction, TrainerState
from torchrl_rloo.rewards.quarantine import Quarantine
from torchrl_rloo.rewards.registry import RewardSpec
from torchrl_rloo.rewards.runner import RewardRunner

FIRST_TRAJECTORIES = 64  # of equal reward before a warning

_LOGGER = logging.getLogger(__name__)


class RewardTransform(Transform):
    """Scores each trajectory when it ends, and writes ``("next", "reward")`` and ``("next", "rewards")``.

    Put it after the transforms that may continue a conversation. The weighted sum is added to the reward that the
    environment itself gave for the last turn: 0, unless it is one that rewards. A sample on which a function fails, in
    whatever way, is one on which it abstains (:class:`~torchrl_rloo.rewards.runner.RewardRunner`). A trajectory has no
    reward (NaN) if all functions abstain or the environment did. What functions give to ``log_extra`` is added to
    ``("next", "log_extra")``, one dictionary a row. If the first trajectories all earn the same, the log says so.

    Args:
        functions: reward functions (:mod:`torchrl_rloo.rewards.protocol`), or names and settings that
            :func:`~torchrl_rloo.rewards.load_reward` takes, called for all rows that end together; none where the
            environment alone rewards.
        weights: one per function; default 1 each.
        clip_range: bounds of the weighted sum, applied before any KL penalty; None for none.
        executor: where functions run (:mod:`torchrl_rloo.rewards.executors`), or a mapping from their names; default:
            in line, without a time limit.
        max_consecutive_failures: this many samples in a row that a function fails on stop the run, since it would learn
            nothing; None for no limit.
        quarantine: file for the samples that a function failed on, as lines of JSON.
        deduplicate: whether identical trajectories are scored once; False for functions that draw random numbers.

    Attributes:
        names: of the functions.
        counts: see :class:`~torchrl_rloo.rewards.runner.RewardRunner`.
        trainer_state: what functions see of the run's progress; the training loop sets its fields.

    Raises:
        ValueError: for two functions of one name, another number of weights than of functions, weights that are not
            finite, an empty clip range, or what the runner refuses.

    Example:
        >>> from torchrl_rloo.rewards import boxed_accuracy
        >>> RewardTransform(boxed_accuracy, clip_range=(-1.0, 1.0)).names
        ['boxed_accuracy']
    """

    scores_outcomes = True

    def __init__(
        self,
        functions: RewardSpec | Sequence[RewardSpec],
        *,
        weights: Sequence[float] | None = None,
        clip_range: tuple[float, float] | None = None,
        executor: Executor | Mapping[str, Executor] | None = None,
        max_consecutive_failures: int | None = 100,
        quarantine: str | os.PathLike | None = None,
        deduplicate: bool = True,
    ):
        super().__init__()
        self.runner = RewardRunner(
            functions,
            executor=executor,
            max_consecutive_failures=max_consecutive_failures,
            quarantine=quarantine,
            deduplicate=deduplicate,
        )
        n = len(self.functions)
        self.weights = [1.0] * n if weights is None else [float(w) for w in weights]
        if len(self.weights) != n:
            raise ValueError(f"{len(self.weights)} weights {self.weights} for {n} reward functions")
        if not all(math.isfinite(w) for w in self.weights):
            raise ValueError(f"weights={self.weights} must be finite numbers")
        if clip_range is not None and not clip_range[0] < clip_range[1]:
            raise ValueError(f"clip_range={clip_range} must be (low, high) with low < high")
        self.clip_range = clip_range
        self.trainer_state = TrainerState()
        self._metrics: dict[str, list[float]] = {}
        self._first: list[tuple[float | None, bool]] | None = []  # reward and truncation of the first trajectories

    @property
    def functions(self) -> list[RewardFunction]:
        """The reward functions."""
        return self.runner.functions

    @property
    def names(self) -> list[str]:
        """The names of the reward functions."""
        return self.runner.names

    @property
    def counts(self) -> Counter[str]:
        """What went wrong so far."""
        return self.runner.counts

    @property
    def latency(self) -> dict[str, Histogram]:
        """How long calls took in this process, ``"<name>/call"`` and ``"<name>/sample"``."""
        return self.runner.latency

    @property
    def executor(self) -> Executor | None:
        """The one executor given for all functions, even for none; else None."""
        return self.runner.executor

    @property
    def quarantine(self) -> Quarantine:
        """File of the samples that functions failed on."""
        return self.runner.quarantine

    def report_progress(self, step: int, max_steps: int, epoch: float, num_tokens: int) -> None:
        """Tell reward functions how far the run is; they see it as ``trainer_state``."""
        self.trainer_state.global_step, self.trainer_state.max_steps = step, max_steps
        self.trainer_state.epoch, self.trainer_state.num_input_tokens_seen = epoch, num_tokens

    def returns(self, *, raw: bool = False, each: bool = False) -> Returns:
        """Return a function from rows to the returns that groups are compared by, before any KL.

        Args:
            raw: take scores as they were before shaping.
            each: each function's scores, not their weighted sum.
        """
        if not self.names:
            return final_return
        return EachScore(raw) if each else WeightedScores(self.weights, self.clip_range, raw)

    def metrics(self) -> dict[str, float]:
        """Return means of what functions gave to ``log_metric`` since the last call, as ``logged/<name>``."""
        taken, self._metrics = self._metrics, {}
        return {f"logged/{name.replace('/', '_')}": sum(v) / len(v) for name, v in list(taken.items())}

    def timings(self) -> dict[str, float]:
        """Return quantiles of the seconds that functions take for a sample, over all their calls so far."""
        latency = {name.removesuffix("/sample"): h for name, h in self.latency.items() if name.endswith("/sample")}
        quantiles = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        return {
            f"time/reward/{name}/{q}": h.quantile(p) for name, h in latency.items() if h.n for q, p in quantiles.items()
        }

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rows, next_rows = tensordict.unbind(0), next_tensordict.unbind(0)
        finished = [i for i, row in enumerate(next_rows) if row["done"].any()]
        scores = torch.full((len(rows), len(self.functions)), torch.nan)
        total = torch.zeros(len(rows))
        if finished and self.functions:
            scores[finished] = self._score([rows[i] for i in finished], [next_rows[i] for i in finished])
            total[finished] = combine_rewards(scores[finished], self.weights, self.clip_range)
        for row, reward, each in zip(next_rows, total, scores, strict=True):
            put(row, {"reward": row["reward"] + reward.reshape(1, 1), "rewards": each})
        if self._first is not None:
            self._look_for_signal([next_rows[i] for i in finished])
        return next_tensordict

    def _look_for_signal(self, finished: list[TensorDictBase]) -> None:
        """Warn once if the first trajectories all earn the same, since equal rewards have no gradient."""
        for row in finished:
            reward = float(row["reward"])
            self._first.append((None if math.isnan(reward) else reward, bool(row["truncated"])))
        rewards = {reward for reward, _ in self._first}
        if len(rewards) > 1:
            self._first = None
        elif len(self._first) >= FIRST_TRAJECTORIES:
            reward, truncated = rewards.pop(), sum(truncated for _, truncated in self._first)
            _LOGGER.warning(
                "the first %d trajectories all earned %s, so there is nothing to learn from yet (%d of them were cut "
                "off at a limit). Read a prompt and a completion as the policy sees them: is the chat template right, "
                "does the policy know the system prompt and the format, does it have enough tokens, and does the "
                "reward function find the answer?",
                len(self._first),
                "no reward" if reward is None else f"{reward:g}",
                truncated,
            )
            self._first = None

    def _score(self, rows: list[TensorDictBase], next_rows: list[TensorDictBase]) -> torch.Tensor:
        """``[n, F]``."""
        batch = RewardBatch(
            prompts=[value_of(r, keys.QUERY) for r in rows],
            completions=[value_of(r, keys.COMPLETION) for r in next_rows],
            completion_ids=[sampled_ids(r).tolist() for r in next_rows],
            columns={k: [_plain(value_of(r, k)) for r in rows] for k in rows[0].keys() if k not in keys.RESERVED},
            truncated=[bool(r["truncated"]) for r in next_rows],
            trainer_state=self.trainer_state,
        )
        scored = self.runner(batch)
        for name, value in scored.metrics.items():
            self._metrics.setdefault(name, []).append(value)
        if scored.extra:
            for i, row in enumerate(next_rows):
                extra = {column: values[i] for column, values in scored.extra.items()}
                row.set("log_extra", NonTensorData((row["log_extra"] if "log_extra" in row.keys() else {}) | extra))
        return torch.tensor([[math.nan if score is None else score for score in column] for column in scored.scores]).T

    def close(self) -> None:
        """Ends the workers of the executors."""
        self.runner.close()

    def get_extra_state(self) -> dict[str, dict[str, int]]:
        """The counters, for ``state_dict``."""
        return self.runner.state_dict()

    def set_extra_state(self, state: dict[str, dict[str, int]]) -> None:
        """Restores the counters, in place."""
        self.runner.load_state_dict(state)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Adds the scores of each function beside their sum."""
        shape = self.parent.batch_size
        reward_spec["rewards"] = Unbounded(shape=(*shape, len(self.functions)))
        return reward_spec


def _plain(value: Any) -> Any:
    """A column's entry as the dataset had it: Python values, numbers for scalar tensors."""
    return value.tolist() if isinstance(value, torch.Tensor) else value

"""Rewards of plain functions: for finished trajectories, and for each turn."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.data import Composite, Unbounded

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import Returns, SeparateScores, WeightedScores, final_return
from torchrl_rloo.data.rows import copy_row, entry_of, non_tensor_value, set_entries
from torchrl_rloo.data.segments import action_ids, refuse_segments
from torchrl_rloo.data.stop_reasons import is_done
from torchrl_rloo.data.templates import Messages, is_conversation, join_conversation
from torchrl_rloo.envs.abstaining import is_abstaining, mark_abstaining
from torchrl_rloo.envs.chat import plain_value
from torchrl_rloo.envs.turn_transform import CountingTransform, EnvTransform
from torchrl_rloo.functional.rewards import combine_rewards
from torchrl_rloo.rewards.executors import Executor
from torchrl_rloo.rewards.protocol import MAX_HISTORY, RewardBatch, RewardFunction, TrainerState
from torchrl_rloo.rewards.registry import RewardSpec
from torchrl_rloo.rewards.runner import Quarantine, RewardRunner
from torchrl_rloo.runtime.clock import Histogram
from torchrl_rloo.runtime.lookup import is_async

FIRST_TRAJECTORIES = 64  # number of first trajectories whose equal reward causes a warning

_LOGGER = logging.getLogger(__name__)


class RewardTransform(EnvTransform):
    """Transform that scores each trajectory when it ends.

    It writes the return ``("next", "reward")`` ``[1, 1]`` and the scores ``("next", "rewards")`` ``[F]`` of ``F``
    functions, float32. Rows that are not done keep their reward, and their scores are NaN. Put it after the transforms
    that may continue a conversation.

    The weighted sum of the scores is added to the environment's reward for the last turn, which is 0 unless the
    environment rewards. A function that fails on a sample abstains
    (:class:`~torchrl_rloo.rewards.runner.RewardRunner`). The return is NaN if all functions abstain. If
    the trajectory abstains (:func:`~torchrl_rloo.envs.abstaining.is_abstaining`) or the environment's reward is NaN,
    return and scores are NaN, and no function is called. What functions pass to ``log_extra`` is added to
    ``("next", "log_extra")``, one dictionary per row. A warning is logged if the first trajectories all earn the same.

    Of rewards of tokens (:mod:`torchrl_rloo.rewards.protocol`) the sum is the score, and a :class:`TurnRewardTransform`
    after this transform credits the tokens with them.

    Args:
        functions: reward functions (:mod:`torchrl_rloo.rewards.protocol`), or names and settings for
            :func:`~torchrl_rloo.rewards.load_reward`, called once for all rows that end together. Empty if only the
            environment rewards.
        weights: one weight per function; None means 1 each.
        clip_range: ``(low, high)`` bounds of the weighted sum, applied before any KL penalty; None disables clipping.
        executor: where functions run (:mod:`torchrl_rloo.rewards.executors`), or a mapping from function names; None
            runs them inline, without a time limit.
        max_consecutive_failures: number of consecutive samples that a function fails on before the run stops, since it
            would learn nothing; None disables it.
        quarantine: JSON-lines file for the samples that a function failed on; None writes none.
        deduplicate: whether to score identical trajectories once; use False for functions that are random.

    Attributes:
        names: names of the functions.
        counts: those of :class:`~torchrl_rloo.rewards.runner.RewardRunner`, with ``"rewards/"`` before each name.
        trainer_state: progress of the run that functions see; :meth:`report_progress` sets it.

    Raises:
        ValueError: if two functions share a name, ``weights`` has another length or a non-finite entry, the clip range
            is empty, or the runner rejects its settings.

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
        # Checks that need the number of functions
        n = len(self.functions)
        self.weights = [1.0] * n if weights is None else [float(w) for w in weights]
        if len(self.weights) != n:
            raise ValueError(f"weights={self.weights} must have one number for each of {n} reward functions")
        if not all(math.isfinite(w) for w in self.weights):
            raise ValueError(f"weights={self.weights} must be finite")
        if clip_range is not None and not clip_range[0] < clip_range[1]:
            raise ValueError(f"clip_range={clip_range} must be (low, high) with low < high")
        self.clip_range = clip_range
        self.trainer_state = TrainerState()
        self._metrics: dict[str, list[float]] = {}
        # Reward and truncation of the first trajectories; None once the check for a signal is done
        self._first_outcomes: list[tuple[float | None, bool]] | None = []

    @property
    def functions(self) -> list[RewardFunction]:
        """Reward functions."""
        return self.runner.functions

    @property
    def names(self) -> list[str]:
        """Names of the reward functions."""
        return self.runner.names

    @property
    def counts(self) -> Counter[str]:
        """Counters of failed, duplicate and retried samples so far."""
        return Counter({f"rewards/{name}": number for name, number in list(self.runner.counts.items())})

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Add counters of a copy of this transform in another process."""
        self.runner.counts.update({name.removeprefix("rewards/"): number for name, number in counts.items()})

    @property
    def latency(self) -> dict[str, Histogram]:
        """Histograms of seconds in this process, per call (``"<name>/call"``) and per sample (``"<name>/sample"``)."""
        return self.runner.latency

    @property
    def executor(self) -> Executor | None:
        """Executor that was given for all functions, or None."""
        return self.runner.executor

    @property
    def quarantine(self) -> Quarantine:
        """Quarantine file of the samples that functions failed on."""
        return self.runner.quarantine

    def report_progress(
        self,
        step: int,
        max_steps: int,
        epoch: float,
        num_tokens: int,
        log_history: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Report the run's progress to reward functions, which see it as ``trainer_state``."""
        self.trainer_state = TrainerState(
            global_step=step,
            max_steps=max_steps,
            epoch=epoch,
            num_input_tokens_seen=num_tokens,
            log_history=[dict(entry) for entry in log_history[-MAX_HISTORY:]],
        )

    def returns(self, *, raw: bool = False, per_function: bool = False) -> Returns:
        """Return a function from rows to the returns that the baseline compares, before any KL.

        Without reward functions these are the final returns, which include a KL.
        """
        if not self.names:
            return final_return
        return SeparateScores(raw) if per_function else WeightedScores(self.weights, self.clip_range, raw)

    def metrics(self) -> dict[str, float]:
        """Return the means of what functions passed to ``log_metric`` since the last call, as ``logged/<name>``."""
        taken, self._metrics = self._metrics, {}
        return {f"logged/{name.replace('/', '_')}": sum(v) / len(v) for name, v in list(taken.items())}

    def timings(self) -> dict[str, float]:
        """Return ``time/reward/<name>/<quantile>``: p50, p99 and max of the seconds per sample in all calls."""
        latency = {name.removesuffix("/sample"): h for name, h in self.latency.items() if name.endswith("/sample")}
        quantiles = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        return {
            f"time/reward/{name}/{q}": h.quantile(p) for name, h in latency.items() if h.n for q, p in quantiles.items()
        }

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        # Score the rows that are done and have a return; the scores of the others are NaN
        rows, next_rows = tensordict.unbind(0), next_tensordict.unbind(0)
        mark_abstaining(self.parent, next_rows)
        before = torch.stack([entry_of(row, "reward") for row in next_rows])  # [n, 1, 1], from the environment
        usable = (~before.isnan()).flatten().tolist()
        finished = [i for i, row in enumerate(next_rows) if usable[i] and is_done(row)]
        scores = torch.full((len(rows), len(self.functions)), torch.nan)
        total = torch.zeros(len(rows))
        if finished and self.functions:
            scores[finished] = self._score([rows[i] for i in finished], [next_rows[i] for i in finished])
            total[finished] = combine_rewards(scores[finished], self.weights, self.clip_range)
        # Add the sum to what the environment gave
        rewards = (before + total[:, None, None]).unbind(0)
        for row, reward, each in zip(next_rows, rewards, scores.unbind(0), strict=True):
            set_entries(row, {"reward": reward, "rewards": each})
        if self._first_outcomes is not None:
            self._look_for_signal([rows[i] for i in finished], [next_rows[i] for i in finished])
        return next_tensordict

    def _look_for_signal(self, rows: list[TensorDictBase], finished: list[TensorDictBase]) -> None:
        """Warn once if the first trajectories all earn the same, since equal rewards give no gradient."""
        for row in finished:
            reward = float(row["reward"])
            self._first_outcomes.append((None if math.isnan(reward) else reward, bool(row["truncated"])))
        # Stop looking at the first difference; warn only after enough equal rewards
        rewards = {reward for reward, _ in self._first_outcomes}
        if len(rewards) > 1:
            self._first_outcomes = None
        elif len(self._first_outcomes) >= FIRST_TRAJECTORIES:
            reward, truncated = rewards.pop(), sum(truncated for _, truncated in self._first_outcomes)
            hints = self.runner.form_hints(self._make_batch(rows, finished)).items()
            _LOGGER.warning(
                "the first %d trajectories all earned %s, so there is nothing to learn from yet (%d of them were cut "
                "off at a limit). Read a prompt and a completion as the policy sees them: check the chat template, "
                "the system prompt and the answer format, the token limits, and that the reward function finds the "
                "answer.%s",
                len(self._first_outcomes),
                "no reward" if reward is None else f"{reward:g}",
                truncated,
                "".join(f" Reward {name}: {hint}." for name, hint in hints),
            )
            self._first_outcomes = None

    def _score(self, rows: list[TensorDictBase], next_rows: list[TensorDictBase]) -> torch.Tensor:
        """Return the scores ``[n, F]`` of finished rows, NaN where a function abstained."""
        # Run the functions, and record what they log
        scored = self.runner(self._make_batch(rows, next_rows))
        for name, value in scored.metrics.items():
            self._metrics.setdefault(name, []).append(value)
        if scored.extra:
            for i, row in enumerate(next_rows):
                extra = {column: values[i] for column, values in scored.extra.items()}
                row.set("log_extra", NonTensorData((row["log_extra"] if "log_extra" in row.keys() else {}) | extra))
        for weight, tokens in zip(self.weights, scored.tokens, strict=True):
            for i, rewards in tokens.items():
                _add_token_rewards(next_rows[i], weight, rewards)
        return torch.tensor([[math.nan if score is None else score for score in column] for column in scored.scores]).T

    def _make_batch(self, rows: list[TensorDictBase], next_rows: list[TensorDictBase]) -> RewardBatch:
        truncated = [bool(entry_of(r, "truncated")) for r in next_rows]
        return make_reward_batch(rows, next_rows, map(action_ids, next_rows), truncated, self.trainer_state)

    def close(self) -> None:
        """Stop the workers of the executors."""
        self.runner.close()

    def get_extra_state(self) -> dict[str, dict[str, int]]:
        """Return the counters, for ``state_dict``."""
        return self.runner.state_dict()

    def set_extra_state(self, state: dict[str, dict[str, int]]) -> None:
        """Restore the counters, in place."""
        self.runner.load_state_dict(state)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Add the scores of each function."""
        shape = self.parent.batch_size
        reward_spec["rewards"] = Unbounded(shape=(*shape, len(self.functions)))
        return reward_spec


def make_reward_batch(
    rows: Sequence[TensorDictBase],
    ended: Sequence[TensorDictBase],
    ids: Iterable[torch.Tensor],
    truncated: Sequence[bool],
    trainer_state: TrainerState,
) -> RewardBatch:
    """Return finished trajectories as reward functions see them."""
    return RewardBatch(
        prompts=[non_tensor_value(row, keys.QUERY) for row in rows],
        completions=[non_tensor_value(row, keys.COMPLETION) for row in ended],
        completion_ids=[sampled.tolist() for sampled in ids],
        columns={
            name: [plain_value(non_tensor_value(row, name)) for row in rows]
            for name in rows[0].keys()
            if name not in keys.RESERVED
        },
        truncated=truncated,
        trainer_state=trainer_state,
    )


_NAME = keys.TOKEN_REWARDS[1]


def _add_token_rewards(row: TensorDictBase, weight: float, rewards: Sequence[float]) -> None:
    """Add a function's rewards of action tokens to the row's, which a TurnRewardTransform reads."""
    refuse_segments(row, "a reward of tokens")
    mask, known = row[keys.ACTION_MASK], row.get("call_rewards", None)
    earned = torch.zeros(len(mask))
    earned[mask] = weight * torch.tensor(rewards, dtype=torch.float32)
    row.set("call_rewards", earned if known is None else known + earned)


class TurnRewardTransform(CountingTransform):
    """Transform that keeps the reward of every turn in ``("next", "token_rewards", "full")``, for credit per turn.

    The entry is float32 ``[T]``, with a turn's reward at its last action token. All action tokens of a conversation
    that abstains have NaN, and the function is not called for its last turn. That reward is the environment's, plus
    the function's, plus for the last turn the :class:`RewardTransform`'s. An agent's ``call_rewards`` are at the ends
    of their calls, and weighted rewards of tokens that reward functions returned are at these tokens. The rest, which
    includes what a clip or shaping changed, is at the last. ``("next", "reward")`` ``[1, 1]`` of a step is the reward
    of that turn only. Collectors sum it over turns. ``MCAdvantage`` compares the sums by default, and
    the turns with ``credit="turn"``.

    Put it after feedback transforms and the :class:`RewardTransform`, and before a :class:`KLRewardTransform`.

    Args:
        function: ``f(conversation, row) -> float``, the reward of the conversation's last message, which is the
            policy's turn. ``row`` holds the dataset's columns, and ``row["turn_tokens"]`` is the number of tokens that
            were sampled in the turn. It must be sync and fast, since it blocks the other conversations. None adds
            nothing to the environment's rewards.

    Attributes:
        counts: ``"turn_reward/failed_turns"``, for which the function raised or returned no finite number; their
            conversations abstain.

    Raises:
        ValueError: if ``function`` is not a sync function. At a step, if it would score an answer to plain text, which
            has no turns, or the template has rewritten the past (``on_rewrite="split"``).

    Example:
        >>> def brief(conversation, row):
        ...     return -0.01 * max(0, row["turn_tokens"] - 50)
        >>> TurnRewardTransform(brief).counts["turn_reward/failed_turns"]
        0
    """

    def __init__(self, function: Callable[[Messages, TensorDictBase], float] | None = None):
        super().__init__()
        if function is not None and (not callable(function) or is_async(function)):
            raise ValueError(
                f"function={function!r} must be None or a function of a conversation and its row, not an async one"
            )
        self.function = function
        self.counts: Counter[str] = Counter()

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        env = self.parent
        mark_abstaining(env, next_tensordict.unbind(0))
        for row, next_row in zip(tensordict.unbind(0), next_tensordict.unbind(0), strict=True):
            refuse_segments(next_row, type(self).__name__)
            # Add the function's reward where the policy took a turn in this step
            abstains = is_abstaining(env, next_row)
            took_turn = int(next_row[keys.NUM_TURNS]) > int(row[keys.NUM_TURNS])
            if self.function is not None and took_turn and not abstains:
                next_row.set("reward", next_row["reward"] + self._score(row, next_row))
            # Extend the rewards of previous turns, and credit the last action token with this one
            mask, previous = next_row[keys.ACTION_MASK], row.get((_NAME, "full"), None)
            rewards = torch.zeros(len(mask))
            if previous is not None:
                rewards[: len(previous)] = previous
            if abstains:
                rewards[mask] = torch.nan
            elif mask.any():
                given = next_row.get("call_rewards", None)  # of an agent, or of tokens
                earlier = torch.zeros(len(mask)) if given is None else given
                rewards += earlier
                rewards[mask.nonzero()[-1]] += next_row["reward"].reshape(()) - earlier.sum()
            self._set(next_row, rewards)
        return next_tensordict

    def _score(self, row: TensorDictBase, next_row: TensorDictBase) -> float:
        """Return the reward of the turn just taken; NaN if the function failed."""
        if not is_conversation(row[keys.QUERY]):
            raise ValueError(f"rewards of turns require queries that are chat messages, got {row[keys.QUERY]!r:.100}")
        # Drop feedback on the turn: the function sees the conversation up to the turn
        conversation = join_conversation(row[keys.QUERY], next_row[keys.COMPLETION])
        while conversation[-1]["role"] != "assistant":
            conversation = conversation[:-1]
        # A failure makes the conversation abstain
        sampled = int(next_row[keys.ACTION_MASK][len(row[keys.PROMPT_TOKENS]) :].sum())
        try:
            value = float(self.function(conversation, copy_row(row).set("turn_tokens", sampled)))
        except Exception:
            _LOGGER.exception("the reward of a turn failed; its conversation abstains")
            value = float("nan")
        if value != value or value in (float("inf"), float("-inf")):
            self.counts["turn_reward/failed_turns"] += 1
            return float("nan")
        return value

    @staticmethod
    def _set(row: TensorDictBase, rewards: torch.Tensor) -> None:
        row.set(_NAME, TensorDict._new_unsafe({"full": rewards}, batch_size=torch.Size([])))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        for row in tensordict_reset.unbind(0):
            if not int(row[keys.NUM_TURNS]):  # the other rows continue
                self._set(row, torch.zeros(len(row[keys.PROMPT_TOKENS])))
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the rewards of the turns so far."""
        shape = self.parent.batch_size
        observation_spec[_NAME] = Composite(full=Unbounded(shape=(*shape, -1)), shape=shape)
        return observation_spec

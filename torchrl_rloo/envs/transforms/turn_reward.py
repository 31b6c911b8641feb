"""TurnRewardTransform: rewards of single turns, kept separate until the advantage."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, Unbounded

from torchrl_rloo.data import keys
from torchrl_rloo.data.segments import refuse_segments
from torchrl_rloo.data.templates import Messages, is_conversation, join_conversation
from torchrl_rloo.envs.abstaining import is_abstaining, mark_abstaining
from torchrl_rloo.envs.env_transform import EnvTransform
from torchrl_rloo.runtime.lookup import is_async

_LOGGER = logging.getLogger(__name__)
_NAME = keys.TOKEN_REWARDS[1]


class TurnRewardTransform(EnvTransform):
    """Transform that keeps the reward of every turn in ``("next", "token_rewards", "full")``, for credit per turn.

    The entry is float32 ``[T]``, with a turn's reward at its last action token. All action tokens of a conversation
    that abstains have NaN, and the function is not called for its last turn. That reward is the environment's, plus
    the function's, plus for the last turn the :class:`RewardTransform`'s. An agent's ``call_rewards`` are at the ends
    of their calls, and the rest of its reward is at the last. ``("next", "reward")`` ``[1, 1]`` of a step is the reward
    of that turn only. Collectors sum it over turns. ``MCAdvantage`` compares the sums by default, and
    the turns with ``credit="turn"``.

    Put it after feedback transforms and the :class:`RewardTransform`, and before a :class:`KLRewardTransform`.

    Args:
        function: ``f(conversation, row) -> float``, the reward of the conversation's last message, which is the
            policy's turn. ``row`` holds the dataset's columns. It must be sync and fast, since it blocks the other
            conversations. None adds nothing to the environment's rewards.

    Attributes:
        counts: ``"turn_reward/failed_turns"``, for which the function raised or returned no finite number; their
            conversations abstain.

    Raises:
        ValueError: if ``function`` is not a sync function. At a step, if it would score an answer to plain text, which
            has no turns, or the template has rewritten the past (``on_rewrite="split"``).

    Example:
        >>> def brief(conversation, row):
        ...     return -0.1 if len(conversation[-1]["content"]) > 100 else 0.0
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
                given = next_row.get("call_rewards", None)  # of an agent
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
        try:
            value = float(self.function(conversation, row))
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

    def get_extra_state(self) -> dict[str, int]:
        """Return the counters, for ``state_dict``."""
        return dict(self.counts)

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Restore the counters, in place."""
        self.counts.clear()
        self.counts.update(state)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the rewards of the turns so far."""
        shape = self.parent.batch_size
        observation_spec[_NAME] = Composite(full=Unbounded(shape=(*shape, -1)), shape=shape)
        return observation_spec

"""FeedbackTransform: answers a turn of the policy, and so makes an environment of several turns."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.templates import Messages
from torchrl_rloo.envs.chat import ChatEnv

_LOGGER = logging.getLogger(__name__)


class FeedbackTransform(Transform):
    """Gives feedback (a tool's result, a user's reply) on the turns that the policy ended, until there is none to give.

    Only the feedback is encoded; what the policy sampled is kept as it is. Feedback tokens are context: they carry no
    gradient, KL or log-prob.

    Args:
        respond: ``f(conversation, row) -> messages | None``: the messages that answer the last assistant message of the
            conversation, or None to end it there. ``row`` holds the dataset's columns.
        max_turns: the policy's turns at most. A conversation that would go on is truncated.

    Attributes:
        counts: ``"turn_limit"`` (conversations cut off at ``max_turns``) and ``"failed"`` (``respond`` raised: the
            conversation ends there as truncated, with the traceback in the log).

    Example:
        >>> def ask_again(conversation, row):
        ...     return [{"role": "user", "content": "Are you sure?"}] if len(conversation) < 4 else None
        >>> FeedbackTransform(ask_again, max_turns=2).max_turns
        2
    """

    def __init__(self, respond: Callable[[Messages, TensorDictBase], Messages | None], *, max_turns: int):
        super().__init__()
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns} must be at least 1")
        self.respond, self.max_turns = respond, max_turns
        self.counts: Counter[str] = Counter()

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        env = self._chat_env()
        for row, next_row in zip(tensordict.unbind(0), next_tensordict.unbind(0), strict=True):
            if not next_row["terminated"].any():
                continue
            try:
                messages = self.respond([*row[keys.QUERY], *next_row[keys.COMPLETION]], row)
            except Exception:
                _LOGGER.exception("feedback raised; the conversation ends there as truncated")
                self._truncate(next_row, "failed")
                continue
            if not messages:
                continue
            if int(next_row[keys.NUM_TURNS]) >= self.max_turns:
                self._truncate(next_row, "turn_limit")
            else:
                env.continue_row(next_row, messages)
        return next_tensordict

    def get_extra_state(self) -> dict[str, int]:
        """The counters, for ``state_dict``."""
        return dict(self.counts)

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Restores the counters, in place."""
        self.counts.clear()
        self.counts.update(state)

    def _truncate(self, row: TensorDictBase, why: str) -> None:
        self.counts[why] += 1
        row.set("terminated", torch.tensor([False])).set("truncated", torch.tensor([True]))

    def _chat_env(self) -> ChatEnv:
        env = self.parent
        while hasattr(env, "base_env"):
            env = env.base_env
        if not isinstance(env, ChatEnv):
            raise TypeError(f"FeedbackTransform belongs on a ChatEnv, not on a {type(env).__name__}")
        return env

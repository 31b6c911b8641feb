"""FeedbackTransform: answers a turn of the policy, and so makes an environment of several turns."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.templates import Messages, is_conversation, join_conversation
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
        counts: conversations that end as truncated: ``"turn_limit"`` at ``max_turns``, ``"token_limit"`` at the
            environment's ``max_tokens``, and ``"failed"`` if ``respond`` raised or its messages could not be rendered
            (the traceback is in the log).

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
            if not is_conversation(row[keys.QUERY]):
                raise ValueError(f"feedback needs queries that are chat messages, got {row[keys.QUERY]!r:.100}")
            try:
                self._answer(env, row, next_row)
            except Exception:
                _LOGGER.exception("feedback failed; the conversation ends there as truncated")
                self._truncate(next_row, "failed")
        return next_tensordict

    def _answer(self, env: ChatEnv, row: TensorDictBase, next_row: TensorDictBase) -> None:
        messages = self.respond(join_conversation(row[keys.QUERY], next_row[keys.COMPLETION]), row)
        if not messages:
            return
        if int(next_row[keys.NUM_TURNS]) >= self.max_turns:
            self._truncate(next_row, "turn_limit")
        elif not env.continue_row(next_row, messages):
            self.counts["token_limit"] += 1

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

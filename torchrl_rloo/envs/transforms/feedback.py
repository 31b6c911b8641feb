"""FeedbackTransform: answers the policy's turns, which makes an environment multi-turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.stop_reasons import end_row, stop_reason
from torchrl_rloo.data.templates import Messages
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.runtime import event_loop
from torchrl_rloo.runtime.lookup import is_async


class FeedbackTransform(TurnTransform):
    """Transform that answers each finished turn of the policy with feedback, such as a tool's result or a user's reply.

    Only the feedback is encoded; the ids that the policy sampled stay as they are. Feedback tokens are context: the
    action mask is False on them, so they carry no gradient, KL or log-prob. ``("next", "tokens", "prompt")`` grows by
    the feedback's ids, and ``("next", "done")`` becomes False.

    Args:
        respond: ``f(conversation, row) -> messages | None``. It returns the messages that answer the conversation's
            last assistant message, or None to end the conversation. ``row`` holds the dataset's columns. A sync
            function runs in a thread, an async one on an event loop.
        max_turns: maximum number of policy turns; a conversation that ``respond`` would continue after them is
            truncated. None leaves it to the environment.

    Attributes:
        counts: truncated conversations: ``"feedback/turn_limit"`` at a limit on turns, ``"feedback/token_limit"`` at
            the environment's limit of tokens, ``"feedback/time_limit"`` at its ``max_seconds``. ``"feedback/failed"``
            counts those for which ``respond`` raised or its messages could not be rendered; the traceback is logged.

    Example:
        >>> def ask_again(conversation, row):
        ...     return [{"role": "user", "content": "Are you sure?"}] if len(conversation) < 4 else None
        >>> FeedbackTransform(ask_again, max_turns=2).max_turns
        2
    """

    part = "feedback"

    def __init__(
        self,
        respond: Callable[[Messages, TensorDictBase], Messages | None | Awaitable[Messages | None]],
        *,
        max_turns: int | None = None,
    ):
        super().__init__()
        if max_turns is not None and max_turns < 1:
            raise ValueError(f"max_turns={max_turns} must be at least 1, or None for no limit")
        self.respond, self.max_turns = respond, max_turns

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        """Answer the turn if the policy ended it; see :meth:`TurnTransform.step_row`."""
        if next_row["terminated"].any():
            self._answer(next_row, await self._call_function(self.conversation(row, next_row), row))

    async def _call_function(self, conversation: Messages, row: TensorDictBase) -> Messages | None:
        return await event_loop.call(self.respond, conversation, row)

    def _answer(self, next_row: TensorDictBase, messages: Messages | None) -> None:
        if not messages:
            return
        if self.max_turns is not None and int(next_row[keys.NUM_TURNS]) >= self.max_turns:
            end_row(next_row, "turns")
        elif self.chat_env.continue_row(next_row, messages):
            return
        self.counts[_LIMITS[stop_reason(next_row)]] += 1

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if is_async(self.respond):
            return super()._step(tensordict, next_tensordict)
        self.check_parent()
        for row, next_row in zip(tensordict.unbind(0), next_tensordict.unbind(0), strict=True):
            with self.ending_on_error(row, next_row):
                if next_row["terminated"].any():
                    self._answer(next_row, self.respond(self.conversation(row, next_row), row))
        return next_tensordict


_LIMITS = {"turns": "feedback/turn_limit", "total_tokens": "feedback/token_limit", "time": "feedback/time_limit"}

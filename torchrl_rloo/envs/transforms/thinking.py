"""AddThinkingPrompt: asks the policy to think again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.data.templates import Messages
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.runtime import event_loop
from torchrl_rloo.runtime.torchrl_arguments import with_torchrl_arguments


class AddThinkingPrompt(TurnTransform):
    """Transform that answers a turn of the policy with a user message that asks it to think again.

    TorchRL's transform of the same name looks at the reward and edits the policy's answer. This one asks on a
    condition, and leaves the policy's tokens unchanged: ``("next", "tokens", "prompt")`` only grows.

    Args:
        prompt: the user message.
        condition: ``f(conversation, row) -> bool``, sync or async: whether to ask; None always asks. ``row`` holds
            the dataset's columns.
        max_times: maximum number of requests in one conversation.

    Attributes:
        counts: ``"thinking/asked_again"``, the number of requests made.

    Raises:
        ValueError: if ``prompt`` is empty or ``max_times`` is below 1.

    Example:
        >>> def has_no_box(conversation, row):
        ...     return "boxed" not in conversation[-1]["content"]
        >>> AddThinkingPrompt("Think again, and put your answer in a box.", has_no_box).max_times
        1
    """

    part = "thinking"

    @with_torchrl_arguments
    def __init__(
        self,
        prompt: str = "But wait, let me think about this more carefully.",
        condition: Callable[[Messages, TensorDictBase], bool | Awaitable[bool]] | None = None,
        *,
        max_times: int = 1,
    ):
        super().__init__()
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"prompt={prompt!r:.80} must be a text, and not empty")
        if max_times < 1:
            raise ValueError(f"max_times={max_times} must be at least 1")
        self.message, self.condition, self.max_times = {"role": "user", "content": prompt}, condition, max_times

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        """Answer a turn that nothing else answered; see :meth:`TurnTransform.step_row`."""
        asked = sum(message == self.message for message in next_row[keys.COMPLETION])
        if stop_reason(next_row) != "answered" or asked >= self.max_times:
            return
        if self.condition is not None:
            if not await event_loop.call(self.condition, self.conversation(row, next_row), row):
                return
        if self.chat_env.continue_row(next_row, [self.message]):
            self.counts["thinking/asked_again"] += 1

"""TextSession: a text environment's side of one conversation, opened once and stepped turn by turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchrl_rloo.data.templates import Messages, is_conversation


@dataclass(frozen=True)
class Outcome:
    """Result of a policy turn.

    Attributes:
        feedback: the environment's answer, as text (a user message) or messages; None ends the conversation. Feedback
            on the last turn is discarded.
        reward: reward of this turn.
        terminated: whether the environment has ended.
        truncated: whether one of the environment's limits has ended it.
        metrics: numbers, booleans and short strings about the conversation so far, for the log.
    """

    feedback: str | Messages | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)


class TextSession:
    """Text environment's side of one conversation.

    Its methods are called one at a time, on the users' loop. Make blocking calls through
    :func:`~torchrl_rloo.runtime.event_loop.call`.

    Example::

        class Echo(TextSession):
            async def reset(self, row):
                return "Say something."

            async def step(self, text):
                return Outcome(feedback=text, reward=1.0)
    """

    async def reset(self, row: dict[str, Any]) -> str | Messages | None:
        """Open the conversation.

        Args:
            row: the dataset's columns, including ``"query"``, and ``"env_seed"``. The members of a group have the same
                ``"env_seed"``, and their sessions must return the same prompt.

        Returns:
            The prompt, as text (a user message) or messages; None uses the row's query.
        """
        raise NotImplementedError

    async def step(self, text: str) -> Outcome:
        """Process a turn that the policy has ended.

        Args:
            text: the policy's text.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Release what the session holds; called once, whether or not the environment has ended."""


def as_messages(said: Any, what: str) -> Messages:
    """Convert text to a user message, and copy messages.

    Args:
        said: text or messages.
        what: name of the value, for the error.

    Raises:
        TypeError: if ``said`` is neither text nor messages.
    """
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    if is_conversation(said) and all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in said):
        return [dict(message) for message in said]
    raise TypeError(
        f"{what} must be text or a list of messages with 'role' and 'content', got {said!r:.200}; convert it to "
        "text (in styles with observe=, by that function)"
    )

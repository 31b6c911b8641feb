"""TextSession: a text environment's side of one conversation, opened once and stepped turn by turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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
        """Return the prompt as text (a user message) or messages; None uses the row's query.

        ``row`` has the dataset's columns, ``"query"`` included, and ``"env_seed"``. The members of a group have the
        same ``"env_seed"``, and their sessions must return the same prompt.
        """
        raise NotImplementedError

    async def step(self, text: str) -> Outcome:
        """Process the text of a turn that the policy has ended."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release what the session holds; called once, whether or not the environment has ended."""


def as_messages(said: Any, what: str) -> Messages:
    """Convert text to a user message, and copy messages."""
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    if is_conversation(said) and all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in said):
        return [dict(message) for message in said]
    raise TypeError(
        f"{what} must be text or a list of messages with 'role' and 'content', got {said!r:.200}; convert it to "
        "text (in styles with observe=, by that function)"
    )


Generate = Callable[[Messages | str], Awaitable[str]]


class RolloutSession(TextSession):
    """Session that runs ``async def rollout(row, generate) -> float | None`` concurrently with one conversation.

    ``await generate(messages)`` returns the policy's reply as text. The first call opens the conversation. Every later
    call must repeat the conversation so far, including the unchanged reply, and append new messages, the feedback. The
    function returns the reward of the last turn; None is 0. If a limit ends the conversation, the function is cancelled
    while it waits for a reply.
    """

    def __init__(self, function: Callable[[dict[str, Any], Generate], Awaitable[float | None]]):
        self.function = function
        self._conversation: Messages = []  # so far, replies included
        self._reply: asyncio.Future[str] | None = None  # the reply that the function waits for
        self._task: asyncio.Task | None = None
        self._events: asyncio.Queue[Outcome | BaseException] = asyncio.Queue()

    async def reset(self, row: dict[str, Any]) -> Messages:
        """Start the function, and wait for its first call of ``generate``."""
        self._task = asyncio.ensure_future(self._run(row))
        outcome = await self._next()
        if outcome.terminated:
            raise ValueError(
                "the rollout function returned without a call of generate; it must call generate at least once"
            )
        return outcome.feedback

    async def step(self, text: str) -> Outcome:
        """Pass the reply to the function, and wait until it calls ``generate`` again or returns."""
        self._conversation = [*self._conversation, {"role": "assistant", "content": text}]
        reply, self._reply = self._reply, None
        reply.set_result(text)
        return await self._next()

    async def close(self) -> None:
        """Cancel the function if it has not returned."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _next(self) -> Outcome:
        event = await self._events.get()
        if isinstance(event, BaseException):
            raise event
        return event

    async def _run(self, row: dict[str, Any]) -> None:
        try:
            value = await self.function(row, self._generate)
            self._events.put_nowait(Outcome(reward=0.0 if value is None else float(value), terminated=True))
        except Exception as error:
            self._events.put_nowait(error)
        except BaseException as error:  # an exit or a cancellation from within, which nothing else would report
            self._events.put_nowait(RuntimeError(f"the rollout function raised {error!r}"))

    async def _generate(self, messages: Messages | str) -> str:
        try:
            messages = as_messages(messages, "the argument of generate")
            feedback = self._extension(messages)
        except Exception as error:
            self._events.put_nowait(error)  # the conversation fails even if the function catches the error
            raise
        self._conversation = messages
        self._reply = asyncio.get_running_loop().create_future()
        self._events.put_nowait(Outcome(feedback=feedback))
        return await self._reply

    def _extension(self, messages: Messages) -> Messages:
        """Return the messages that extend the conversation so far."""
        if self._reply is not None:
            raise RuntimeError("generate was called while a reply is pending; await one reply at a time")
        for i, was in enumerate(self._conversation):
            now = messages[i] if i < len(messages) else None
            if now is None or any(now[name] != was[name] for name in ("role", "content")):
                raise ValueError(
                    f"generate got a changed conversation: message {i} was {was!r:.200}, now it is {now!r:.200}; "
                    "append the unchanged reply, then new messages"
                )
        if len(messages) == len(self._conversation):
            raise ValueError("generate got no new message after the last reply; append what the policy should answer")
        return messages[len(self._conversation) :]

"""RolloutSession: a rollout function, which calls the policy, as a session that is stepped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from torchrl_rloo.data.templates import Messages
from torchrl_rloo.envs.text.session import Outcome, TextSession, as_messages

Generate = Callable[[Messages | str], Awaitable[str]]


class RolloutSession(TextSession):
    """Session that runs ``async def rollout(row, generate) -> float | None`` concurrently with one conversation.

    ``await generate(messages)`` returns the policy's reply as text. The first call opens the conversation. Every later
    call must repeat the conversation so far, including the unchanged reply, and append new messages, the feedback. The
    function returns the reward of the last turn; None is 0. If a limit ends the conversation, the function is cancelled
    while it waits for a reply.

    Args:
        function: the rollout function.

    Example::

        async def rollout(row, generate):
            messages = [{"role": "user", "content": row["question"]}]
            reply = await generate(messages)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Are you sure?"}]
            return float(row["answer"] in await generate(messages))
    """

    def __init__(self, function: Callable[[dict[str, Any], Generate], Awaitable[float | None]]):
        self.function = function
        self._conversation: Messages = []  # so far, replies included
        self._reply: asyncio.Future[str] | None = None  # the reply that the function waits for
        self._task: asyncio.Task | None = None
        self._events: asyncio.Queue[Outcome | BaseException] = asyncio.Queue()

    async def reset(self, row: dict[str, Any]) -> Messages:
        """Start the function, and wait for its first call of ``generate``.

        Args:
            row: see :meth:`TextSession.reset`.

        Raises:
            ValueError: if the function returns without a call.
        """
        self._task = asyncio.ensure_future(self._run(row))
        outcome = await self._next()
        if outcome.terminated:
            raise ValueError(
                "the rollout function returned without a call of generate; it must call generate at least once"
            )
        return outcome.feedback

    async def step(self, text: str) -> Outcome:
        """Pass the reply to the function, and wait until it calls ``generate`` again or returns.

        Args:
            text: the policy's reply.
        """
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

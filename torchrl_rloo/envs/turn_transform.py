"""Bases of environment transforms; those that act after each turn, and may be slow, are TurnTransforms."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from tensordict import TensorDictBase
from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.stop_reasons import end_row
from torchrl_rloo.data.templates import Messages, is_conversation, join_conversation
from torchrl_rloo.envs.chat import ChatEnv
from torchrl_rloo.runtime import event_loop
from torchrl_rloo.runtime.lookup import snake_case


class EnvTransform(Transform):
    """Base of environment transforms, which act in ``reset`` and ``step``."""

    def forward(self, tensordict: TensorDictBase) -> NoReturn:
        """Raise: only a replay buffer calls it."""
        name = type(self).__name__
        raise TypeError(
            f"{name} acts in the steps of an environment and would do nothing in a replay buffer; pass it to "
            "DatasetChatEnv, or a function of collected rows as LLMCollector(postproc=...)"
        )

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Pass the policy's rows on; raise in a replay buffer, which calls it for ``append_transform(invert=True)``."""
        return self.forward(tensordict) if self.parent is None else super().inv(tensordict)


class CountingTransform(EnvTransform):
    """Base of transforms with counters of events, which are their state."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def get_extra_state(self) -> dict[str, Any]:
        """Return the counters, for ``state_dict``."""
        return dict(self.counts)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the counters, in place."""
        self.counts.clear()
        self.counts.update(state)


_LOGGER = logging.getLogger(__name__)


class TurnTransform(CountingTransform):
    """Transform of a :class:`~torchrl_rloo.envs.ChatEnv` that handles each conversation independently of the others.

    A subclass implements :meth:`step_row`. In ``env.step`` it runs on all rows concurrently. In an
    :class:`~torchrl_rloo.collectors.LLMCollector`, each conversation continues as soon as its own call returns. In
    both cases it runs on an event loop (:mod:`torchrl_rloo.runtime.event_loop`) and must not block. Make blocking calls
    through :func:`~torchrl_rloo.runtime.event_loop.call`.

    If :meth:`step_row` raises, the conversation ends as truncated with the stop reason ``"failed"``, and the traceback
    is logged.

    Attributes:
        part: first word of all counters; by default the name of the direct subclass, in lower case
            and without "Transform".
        counts: event counters: ``"<part>/failed"`` conversations, and those of the subclass.

    Example::

        class EncourageTransform(TurnTransform):
            async def step_row(self, row, next_row):
                if next_row["terminated"].any():
                    self.chat_env.continue_row(next_row, [{"role": "user", "content": "Go on."}])
    """

    part = "turn"

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if TurnTransform in cls.__bases__ and "part" not in vars(cls):
            cls.part = snake_case(cls.__name__.removesuffix("Transform"))

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        """Process a turn that the policy just took, in place.

        ``row`` has the policy's ids and the dataset's columns, ``next_row`` is the state after it. Its ``"done"`` is
        True if the policy ended its turn and nothing has answered it yet, or if a limit ended the conversation. Use
        :meth:`ChatEnv.continue_row` to answer the turn, and :func:`~torchrl_rloo.data.stop_reasons.end_row` to end the
        conversation.
        """
        raise NotImplementedError

    async def release(self, trajectory_id: int) -> None:
        """Release what is kept for a conversation that has ended or was cancelled; nothing is kept by default."""

    def reset_failure(self, trajectory_id: int) -> str | None:
        """Return the stop reason of a conversation that this transform could not open at its reset, or None."""
        return None

    async def process_turn(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        """Run :meth:`step_row`, and end the conversation if it raises."""
        with self.ending_on_error(row, next_row):
            await self.step_row(row, next_row)

    @contextmanager
    def ending_on_error(self, row: TensorDictBase, next_row: TensorDictBase) -> Iterator[None]:
        """End the conversation if the body of the ``with`` statement raises."""
        if not is_conversation(row[keys.QUERY]):
            raise ValueError(
                f"{type(self).__name__} requires queries that are chat messages, got {row[keys.QUERY]!r:.100}"
            )
        try:
            yield
        except Exception:
            _LOGGER.exception("%s failed; its conversation ends as truncated", type(self).__name__)
            self.counts[f"{self.part}/failed"] += 1
            end_row(next_row, "failed")

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self.check_parent()
        event_loop.run(self._take_turns(tensordict, next_tensordict))
        return next_tensordict

    async def _take_turns(self, rows: TensorDictBase, next_rows: TensorDictBase) -> None:
        await asyncio.gather(*map(self.process_turn, rows.unbind(0), next_rows.unbind(0)))

    @staticmethod
    def conversation(row: TensorDictBase, next_row: TensorDictBase) -> Messages:
        """Return the messages so far, including the turn just taken."""
        return join_conversation(row[keys.QUERY], next_row[keys.COMPLETION])

    def check_parent(self) -> None:
        """Raise TypeError if the base environment is not a :class:`ChatEnv`."""
        _ = self.chat_env

    @property
    def chat_env(self) -> ChatEnv:
        """Base environment."""
        env = self.parent
        while hasattr(env, "base_env"):
            env = env.base_env
        if not isinstance(env, ChatEnv):
            raise TypeError(f"{type(self).__name__} requires a ChatEnv as base environment, got {type(env).__name__}")
        return env

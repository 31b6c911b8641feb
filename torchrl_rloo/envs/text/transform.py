"""TextEnvTransform: the environment's side of conversations, one session for each."""

from __future__ import annotations

import asyncio
import logging
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.stop_reasons import end_row
from torchrl_rloo.data.templates import Messages
from torchrl_rloo.envs import event_loop
from torchrl_rloo.envs.prompt_ids import PromptIds
from torchrl_rloo.envs.text.adapters import ENV_SEED
from torchrl_rloo.envs.text.session import Outcome, TextSession, as_messages
from torchrl_rloo.envs.turn_transform import TurnTransform

_LOGGER = logging.getLogger(__name__)

UNOPENED: Messages = [{"role": "user", "content": "(unopened)"}]


@dataclass
class _Held:
    session: TextSession | None  # None: it could not be opened
    metrics: dict[str, Any] = field(default_factory=dict)


class TextEnvTransform(TurnTransform):
    """Lets an environment of text open each conversation, answer its turns, and reward them.

    At a reset every new row gets a session, whose opening becomes the row's query; all are opened at once. The members
    of a group have the same ``"env_seed"`` (that column, or one made of the row's columns), and must be opened the
    same. Each turn that the policy has ended, and no transform before has answered, goes to the session. What the
    session gives for it is added to the reward of that turn: the return of a trajectory is the sum over its turns. A
    turn that a limit of tokens cut off is not given to the session; the trajectory ends there.

    The stop reason is ``"ended"`` where the environment has ended and ``"turns"`` where it was truncated by a limit of
    its own. A session that raises, takes too long or gives no finite reward ends its conversation as ``"failed"``, with
    the reward NaN: it abstains, since the policy is not to blame. What environments tell for the log stands in
    ``("next", "log_extra")`` when the conversation ends.

    Args:
        make_session: makes the session of a conversation, see :func:`~torchrl_rloo.envs.text.wrap`.
        timeout: seconds that a session may take to open, and for each turn. A sync environment that takes longer is
            left behind on its thread.
        system_prompt: put before openings without a system message.
        max_consecutive_failures: this many failures in a row stop the run at its next reset, since it would learn
            nothing; None for no limit.

    Attributes:
        counts: conversations that ``"failed"`` at a turn, sessions with ``"failed_opens"`` and ``"failed_closes"``.

    Raises:
        ValueError: at a reset, if the members of a group are opened differently.
        RuntimeError: at a reset, if no session at all could be opened so far, or too many failed in a row.
    """

    def __init__(
        self,
        make_session: Callable[[], TextSession],
        *,
        timeout: float | None = 60.0,
        system_prompt: str | None = None,
        max_consecutive_failures: int | None = 100,
    ):
        super().__init__()
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds, or None for no limit")
        self.make_session, self.timeout, self.system_prompt = make_session, timeout, system_prompt
        self.max_consecutive_failures = max_consecutive_failures
        self._held: dict[int, _Held] = {}
        self._failures, self._ever_opened = 0, False

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if self.max_consecutive_failures is not None and self._failures >= self.max_consecutive_failures:
            raise RuntimeError(f"the environment failed {self._failures} times in a row; the log has the errors")
        fresh = [row for row in tensordict_reset.unbind(0) if not int(row[keys.NUM_TURNS])]
        rows = [row for row in fresh if int(row[keys.TRAJECTORY_ID]) not in self._held]
        if rows:
            event_loop.run(self._open_all(rows))
        return tensordict_reset

    async def _open_all(self, rows: Sequence[TensorDictBase]) -> None:
        openings = await asyncio.gather(*map(self._open, rows))
        failures = [opening for opening in openings if isinstance(opening, Exception)]
        if len(failures) == len(rows) and not self._ever_opened:
            await self._release(rows)
            raise RuntimeError(f"none of {len(rows)} sessions could be opened: {failures[0]!r}") from failures[0]
        self._ever_opened = True
        encoded, agreed = self.chat_env.prompt_ids(), {}
        for row, opening in zip(rows, openings, strict=True):
            if isinstance(opening, Exception):
                continue
            group = int(row.get(keys.GROUP_ID, row[keys.TRAJECTORY_ID]))
            if (first := agreed.setdefault(group, opening)) != opening:
                await self._release(rows)
                raise ValueError(
                    f"the members of a group were opened differently, {first!r:.300} and {opening!r:.300}: the same "
                    f"{ENV_SEED!r} ({self._columns(row)[ENV_SEED]} here) must give the same prompt"
                )
            try:
                self._show(row, first, encoded)
            except Exception:  # it has no room in the conversation, or the chat template refuses it
                await self._fail(row)

    async def _open(self, row: TensorDictBase) -> Messages | Exception:
        """The query of a row, by its session; or why there is none."""
        columns = self._columns(row)
        try:
            session = self.make_session()
            self._held[int(row[keys.TRAJECTORY_ID])] = _Held(session)
            said = await event_loop.call(session.reset, columns, timeout=self.timeout)
            opening = as_messages(columns[keys.QUERY] if said is None else said, "an environment's opening")
            if opening == UNOPENED:
                raise ValueError("the environment gives no prompt of its own: give a dataset of prompts")
        except Exception as error:
            await self._fail(row)
            return error
        if self.system_prompt is not None and not any(m["role"] == "system" for m in opening):
            opening = [{"role": "system", "content": self.system_prompt}, *opening]
        return opening

    async def _fail(self, row: TensorDictBase) -> None:
        """Gives up a conversation whose environment did not open, in the handling of what went wrong."""
        _LOGGER.exception("an environment could not be opened; its conversation ends after a turn")
        self.counts["failed_opens"] += 1
        self._failures += 1
        await self.release(int(row[keys.TRAJECTORY_ID]))
        self._held[int(row[keys.TRAJECTORY_ID])] = _Held(None)

    def _show(self, row: TensorDictBase, opening: Messages, encoded: PromptIds) -> None:
        """Makes an opening the row's prompt."""
        if row[keys.QUERY] != opening:
            opened = self.chat_env._open(row.copy().set(keys.QUERY, NonTensorData(opening)), encoded)
            row.update(opened.exclude(keys.TRAJECTORY_ID))  # other transforms know the row by its id

    @staticmethod
    def _columns(row: TensorDictBase) -> dict[str, Any]:
        """What a session sees of a row: the dataset's columns, and a seed that the same columns always give."""
        names = [name for name in row.keys() if name == keys.QUERY or name not in keys.RESERVED]
        columns = {name: v.tolist() if isinstance(v := row[name], torch.Tensor) else v for name in names}
        return {ENV_SEED: zlib.crc32(repr(sorted(columns.items())).encode())} | columns

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        """Gives the turn to the session; see :meth:`TurnTransform.step_row`."""
        if not next_row["done"].any():
            return  # a transform before has answered it
        held = self._held.get(int(row[keys.TRAJECTORY_ID]))
        if held is None:
            raise KeyError(f"trajectory {int(row[keys.TRAJECTORY_ID])} was not reset with this transform")
        if held.session is None:
            _abstain(next_row)
            end_row(next_row, "failed")
        elif next_row["terminated"].any():
            await self._step_session(held, row, next_row)
        if held.metrics and next_row["done"].any():
            next_row.set("log_extra", NonTensorData(dict(held.metrics)))

    async def _step_session(self, held: _Held, row: TensorDictBase, next_row: TensorDictBase) -> None:
        said = self.conversation(row, next_row)[-1]["content"]
        try:
            outcome = await event_loop.call(held.session.step, said, timeout=self.timeout)
            if not math.isfinite(outcome.reward):
                raise ValueError(f"the environment's reward {outcome.reward} is no finite number")
            held.metrics |= outcome.metrics
            next_row.set("reward", next_row["reward"] + outcome.reward)
            self._follow(next_row, outcome)
        except Exception:
            self._failures += 1
            _abstain(next_row)
            raise
        self._failures = 0

    def _follow(self, next_row: TensorDictBase, outcome: Outcome) -> None:
        if outcome.truncated and not outcome.terminated:
            end_row(next_row, "turns")
        elif outcome.terminated or outcome.feedback is None:
            end_row(next_row, "ended")
        else:
            self.chat_env.continue_row(next_row, as_messages(outcome.feedback, "an environment's feedback"))

    async def release(self, trajectory_id: int) -> None:
        """Closes the session of a conversation."""
        held = self._held.pop(trajectory_id, None)
        if held is None or held.session is None:
            return
        try:
            await event_loop.call(held.session.close, timeout=self.timeout)
        except Exception:
            _LOGGER.exception("an environment could not be closed")
            self.counts["failed_closes"] += 1

    async def _release(self, rows: Sequence[TensorDictBase]) -> None:
        await asyncio.gather(*(self.release(int(row[keys.TRAJECTORY_ID])) for row in rows))

    async def _release_all(self) -> None:
        await asyncio.gather(*map(self.release, list(self._held)))

    def close(self) -> None:
        """Closes the sessions that are open."""
        if self._held:
            event_loop.run(self._release_all())


def _abstain(next_row: TensorDictBase) -> None:
    next_row.set("reward", torch.full_like(next_row["reward"], torch.nan))

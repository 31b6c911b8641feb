"""TextEnvTransform: a text environment's side of conversations, with one session per conversation."""

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
from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.stop_reasons import end_row
from torchrl_rloo.data.templates import Messages
from torchrl_rloo.envs.chat import PromptIds, dataset_columns
from torchrl_rloo.envs.dataset import DatasetChatEnv
from torchrl_rloo.envs.text.adapters import ENV_SEED, wrap
from torchrl_rloo.envs.text.session import Outcome, TextSession, as_messages
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.runtime import event_loop

_LOGGER = logging.getLogger(__name__)

PLACEHOLDER_PROMPT: Messages = [{"role": "user", "content": "(unopened)"}]


@dataclass
class _Held:
    session: TextSession | None  # None if the conversation could not be opened
    metrics: dict[str, Any] = field(default_factory=dict)
    failure: str = "failed"  # stop reason of a conversation without a session


class TextEnvTransform(TurnTransform):
    """Transform by which a text environment opens each conversation, answers its turns and rewards them.

    At a reset, all new rows get a session concurrently, and its opening becomes the row's ``"query"``. The members of a
    group have the same ``"env_seed"``: that column, or a hash of the row's columns. Their sessions must give the same
    opening. Each turn that the policy has ended, and that no earlier transform answered, goes to the session. A turn
    that a token limit cut off does not; its trajectory ends there.

    A turn's reward is added to ``("next", "reward")`` ``[1, 1]``; the return of a trajectory is the sum over its turns.
    The session's feedback extends ``("next", "tokens", "prompt")``. Its metrics are in ``("next", "log_extra")`` when
    the conversation ends.

    The stop reason is ``"ended"`` if the environment has ended, and ``"turns"`` if one of its limits truncated it. If a
    session raises, times out or gives a reward that is not finite, its conversation ends as ``"failed"``. The reward is
    then NaN, so the trajectory abstains: the policy is not at fault. If the opening leaves the policy no token,
    the reason is ``"total_tokens"``, and the trajectory abstains as well.

    Args:
        make_session: factory of a conversation's session, see :func:`~torchrl_rloo.envs.text.adapters.wrap`.
        timeout: time limit of a session's opening, closing and each turn, in seconds; None disables it. A sync
            environment that takes longer is abandoned on its thread.
        system_prompt: system message of openings that have none; None adds that of the row's query, if any.
        max_consecutive_failures: number of consecutive failures after which the next reset stops the run, since it
            would learn nothing; None disables it.

    Attributes:
        counts: ``"text_env/failed"`` conversations, at a turn, and sessions with ``"text_env/failed_opens"`` and
            ``"text_env/failed_closes"``.

    Raises:
        ValueError: at a reset, if the members of a group are opened differently.
        RuntimeError: at a reset, if a whole batch of sessions failed to open and none has opened so far. Also if too
            many failed consecutively.

    Example:
        >>> from torchrl_rloo.envs.text.games import GuessNumber
        >>> TextEnvTransform(wrap(GuessNumber), timeout=5.0).counts["text_env/failed"]
        0
    """

    part = "text_env"

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
        if max_consecutive_failures is not None and max_consecutive_failures < 1:
            raise ValueError(
                f"max_consecutive_failures={max_consecutive_failures} must be at least 1, or None for no limit"
            )
        self.make_session, self.timeout, self.system_prompt = make_session, timeout, system_prompt
        self.max_consecutive_failures = max_consecutive_failures
        self._held: dict[int, _Held] = {}
        self._failures = 0
        # Openings in flight, failed ones, and whether one has succeeded
        self._opening, self._unopened, self._ever_opened = 0, 0, False

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if self.max_consecutive_failures is not None and self._failures >= self.max_consecutive_failures:
            raise RuntimeError(
                f"the environment failed {self._failures} times in a row, which reaches max_consecutive_failures="
                f"{self.max_consecutive_failures}; see the log for the errors"
            )
        fresh = [row for row in tensordict_reset.unbind(0) if not int(row[keys.NUM_TURNS])]
        rows = [row for row in fresh if int(row[keys.TRAJECTORY_ID]) not in self._held]
        if rows:
            event_loop.run(self._open_all(rows))
        return tensordict_reset

    async def _open_all(self, rows: Sequence[TensorDictBase]) -> None:
        # Open all sessions; one that fails costs only its conversation, unless a whole batch fails at the start
        self._opening += len(rows)
        try:
            openings = await asyncio.gather(*map(self._open, rows))
        finally:
            self._opening -= len(rows)
        failures = [opening for opening in openings if isinstance(opening, Exception)]
        self._unopened += len(failures)
        self._ever_opened = self._ever_opened or len(failures) < len(rows)
        if not (self._ever_opened or self._opening) and self._unopened >= self.chat_env.batch_size.numel():
            await self._release(rows)
            failed, self._unopened = self._unopened, 0
            raise RuntimeError(f"none of {failed} sessions could be opened: {failures[0]!r}") from failures[0]
        # Make openings the rows' prompts, after a check that the members of a group agree
        encoded, agreed = self.chat_env.prompt_ids(), {}
        for row, opening in zip(rows, openings, strict=True):
            if isinstance(opening, Exception):
                continue
            group = int(row.get(keys.GROUP_ID, row[keys.TRAJECTORY_ID]))
            if (first := agreed.setdefault(group, opening)) != opening:
                await self._release(rows)
                raise ValueError(
                    f"the members of a group were opened differently, {first!r:.300} and {opening!r:.300}; the same "
                    f"{ENV_SEED!r} (here {self._columns(row)[ENV_SEED]}) must give the same prompt"
                )
            try:
                fits = self._set_prompt(row, first, encoded)
            except Exception:  # the chat template rejects it
                await self._fail(row)
            else:
                if not fits:
                    await self._close(row, "total_tokens")

    async def _open(self, row: TensorDictBase) -> Messages | Exception:
        """Open a row's session and return its opening, or the error that prevented it."""
        columns = self._columns(row)
        try:
            session = self.make_session()
            self._held[int(row[keys.TRAJECTORY_ID])] = _Held(session)
            said = await event_loop.call(session.reset, columns, timeout=self.timeout)
            opening = as_messages(columns[keys.QUERY] if said is None else said, "an environment's opening")
            if opening == PLACEHOLDER_PROMPT:
                raise ValueError("the environment gives no prompt; pass a dataset of prompts")
        except Exception as error:
            await self._fail(row)
            return error
        if not any(m["role"] == "system" for m in opening):
            own = [m for m in as_messages(columns[keys.QUERY], "the query") if m["role"] == "system"]
            if self.system_prompt is not None:
                own = [{"role": "system", "content": self.system_prompt}]
            opening = [*own, *opening]
        return opening

    async def _fail(self, row: TensorDictBase) -> None:
        """Mark a conversation whose environment did not open as failed; to be called in an exception handler."""
        _LOGGER.exception("an environment could not be opened; its conversation ends after one turn")
        self.counts["text_env/failed_opens"] += 1
        self._failures += 1
        await self._close(row, "failed")

    async def _close(self, row: TensorDictBase, failure: str) -> None:
        """Close the session of a conversation that cannot begin, and keep its stop reason."""
        await self.release(int(row[keys.TRAJECTORY_ID]))
        self._held[int(row[keys.TRAJECTORY_ID])] = _Held(None, failure=failure)

    def reset_failure(self, trajectory_id: int) -> str | None:
        """Return the stop reason of a conversation that could not be opened; see :class:`TurnTransform`."""
        held = self._held.get(trajectory_id)
        return held.failure if held is not None and held.session is None else None

    def _set_prompt(self, row: TensorDictBase, opening: Messages, encoded: PromptIds) -> bool:
        """Set an opening as the row's prompt, unless it leaves the policy no token; return whether it fits."""
        if row[keys.QUERY] == opening:
            return True
        opened = self.chat_env.open_row(row.copy().set(keys.QUERY, NonTensorData(opening)), encoded)
        if opened["done"].any():
            return False
        row.update(opened.exclude(keys.TRAJECTORY_ID))  # other transforms know the row by its id
        return True

    @staticmethod
    def _columns(row: TensorDictBase) -> dict[str, Any]:
        """Return what a session sees of a row: the dataset's columns, and a seed that is a hash of them by default."""
        columns = dataset_columns(row)
        return {ENV_SEED: zlib.crc32(repr(sorted(columns.items())).encode())} | columns

    async def process_turn(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        """Process a turn; see :meth:`TurnTransform.process_turn`."""
        if (trajectory_id := int(row[keys.TRAJECTORY_ID])) not in self._held:
            raise KeyError(f"trajectory_id={trajectory_id} is unknown; reset its row with this transform")
        await super().process_turn(row, next_row)

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        """Pass the turn to the session; see :meth:`TurnTransform.step_row`."""
        if not next_row["done"].any():
            return  # an earlier transform has answered it
        held = self._held[int(row[keys.TRAJECTORY_ID])]
        if held.session is None:
            _abstain(next_row)
            end_row(next_row, held.failure)
        elif next_row["terminated"].any():
            await self._step_session(held, row, next_row)
        if next_row["done"].any():
            next_row.set("log_extra", NonTensorData(dict(held.metrics)))

    async def _step_session(self, held: _Held, row: TensorDictBase, next_row: TensorDictBase) -> None:
        said = self.conversation(row, next_row)[-1]["content"]
        try:
            outcome = await event_loop.call(held.session.step, said, timeout=self.timeout)
            if not math.isfinite(outcome.reward):
                raise ValueError(f"the environment's reward={outcome.reward} must be finite")
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
        """Close the session of a conversation."""
        held = self._held.pop(trajectory_id, None)
        if held is None or held.session is None:
            return
        try:
            await event_loop.call(held.session.close, timeout=self.timeout)
        except Exception:
            _LOGGER.exception("an environment could not be closed")
            self.counts["text_env/failed_closes"] += 1

    async def _release(self, rows: Sequence[TensorDictBase]) -> None:
        await asyncio.gather(*(self.release(int(row[keys.TRAJECTORY_ID])) for row in rows))

    async def _release_all(self) -> None:
        await asyncio.gather(*map(self.release, list(self._held)))

    def close(self) -> None:
        """Close all open sessions."""
        if self._held:
            event_loop.run(self._release_all())


def _abstain(next_row: TensorDictBase) -> None:
    next_row.set("reward", torch.full_like(next_row["reward"], torch.nan))


def seed_dataset(size: int) -> PromptDataset:
    """Return rows that have only an ``"env_seed"``, for an environment that makes its prompts itself."""
    return PromptDataset({keys.QUERY: PLACEHOLDER_PROMPT, ENV_SEED: seed} for seed in range(size))


def text_env(
    environment: Any,
    tokenizer: Any,
    *,
    prompts_per_batch: int,
    num_generations: int = 1,
    dataset: PromptDataset | None = None,
    num_seeds: int | None = None,
    system_prompt: str | None = None,
    timeout: float | None = 60.0,
    style: str | None = None,
    action: Callable[[str], Any] | None = None,
    observe: Callable[[Any], Any] | None = None,
    transforms: Sequence[Transform] = (),
    **kwargs: Any,
) -> DatasetChatEnv:
    """Build an environment for a collector from a text environment.

    Args:
        environment: a class of environments, a function without arguments that makes one, or an async rollout function.
            Of an environment, each conversation gets a deep copy.
        tokenizer: the policy's tokenizer.
        prompts_per_batch: games per reset.
        num_generations: conversations per game.
        dataset: rows whose columns are passed to the environment's ``reset``; None uses rows of seeds.
        num_seeds: number of distinct games. None is 10,000; cannot be combined with ``dataset``.
        system_prompt, timeout: see :class:`TextEnvTransform`.
        style: name in :data:`~torchrl_rloo.envs.text.adapters.STYLES`; None detects the style.
        action: function from the policy's text to what ``step`` takes, such as an OpenEnv action; None passes the text.
        observe: function from an observation to text or messages; None uses the observation itself.
        transforms: transforms that answer turns before the environment sees them, such as tools.
        **kwargs: further arguments of :class:`~torchrl_rloo.envs.DatasetChatEnv`, such as ``rewards``, ``max_turns``.

    Raises:
        ValueError: if ``num_seeds`` is below 1 or combined with ``dataset``, or :func:`wrap` rejects the environment.

    Example:
        >>> from torchrl_rloo.embedded import build_tokenizer
        >>> from torchrl_rloo.envs.text.games import GuessNumber
        >>> env = text_env(GuessNumber, build_tokenizer(), prompts_per_batch=2, num_generations=4)
        >>> env.reset()["query"][0]
        [{'role': 'user', 'content': 'Guess a number from 1 to 32.'}]
    """
    if num_seeds is not None and (num_seeds < 1 or dataset is not None):
        raise ValueError(f"num_seeds={num_seeds} must be at least 1, and cannot be combined with dataset; omit it")
    make_session = wrap(environment, style=style, action=action, observe=observe)
    played = TextEnvTransform(make_session, system_prompt=system_prompt, timeout=timeout)
    return DatasetChatEnv(
        seed_dataset(num_seeds or 10_000) if dataset is None else dataset,
        tokenizer,
        prompts_per_batch=prompts_per_batch,
        num_generations=num_generations,
        transforms=[*transforms, played],
        **kwargs,
    )

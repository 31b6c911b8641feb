"""Functions that step any number of a chat environment's rows together, and a stepper of single conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs import Compose, EnvBase, StepCounter, Transform, TransformedEnv

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import entry_of, set_entries, stack_rows
from torchrl_rloo.data.stop_reasons import end_row, is_done, name_end
from torchrl_rloo.envs.abstaining import mark_abstaining
from torchrl_rloo.envs.chat import ChatEnv
from torchrl_rloo.envs.transforms.data import DataLoadingPrimer
from torchrl_rloo.envs.turn_transform import TurnTransform


def step_rows(env: EnvBase, rows: TensorDictBase) -> TensorDictBase:
    """Step any number of a chat environment's rows.

    ``env.step`` requires the environment's whole batch even where ``batch_locked`` is False.
    """
    after = env._step(rows)
    mark_abstaining(env, after.unbind(0))
    return rows.set("next", after)


def transforms_of(env: EnvBase) -> list[Transform]:
    """Return the transforms of an environment in the order in which a step applies them."""
    layers: list[list[Transform]] = []
    while isinstance(env, TransformedEnv):
        layers.append(_flat(env.transform))
        env = env.base_env
    return [transform for layer in reversed(layers) for transform in layer]


def adapt_to_policy(env: EnvBase, policy: Any) -> None:
    """Let the base environment know its policy's context and end-of-turn ids (:meth:`ChatEnv.adapt_to`).

    Collectors call it. An environment of another class stays unchanged.
    """
    while isinstance(env, TransformedEnv):
        env = env.base_env
    if isinstance(env, ChatEnv) and not isinstance(policy, type):  # a factory may be a class, with other attributes
        env.adapt_to(policy)


def open_rows(env: EnvBase, rows: TensorDictBase) -> TensorDictBase:
    """Reset any number of conversations; ``env.reset`` requires the environment's whole batch.

    A conversation that cannot begin is done: its prompt leaves the policy no token (``"total_tokens"``), or a transform
    could not open it (:meth:`TurnTransform.reset_failure`). Such a row gets no turn of the policy. Pass it to
    :meth:`RowStepper.truncate` with its own stop reason, and then to :meth:`RowStepper.finish` with its group, where it
    abstains.
    """
    opened = _open_rows(env, rows)
    # End the rows that a transform could not open
    for transform in transforms_of(env):
        if isinstance(transform, TurnTransform):
            for row in opened.unbind(0):
                reason = transform.reset_failure(int(row[keys.TRAJECTORY_ID]))
                if reason is not None and not is_done(row):
                    end_row(row, reason)
    return opened


def _open_rows(env: EnvBase, rows: TensorDictBase) -> TensorDictBase:
    if not isinstance(env, TransformedEnv):
        return env.open_rows(rows)
    for transform in _flat(env.transform):
        if not isinstance(transform, DataLoadingPrimer):  # the rows are drawn already
            rows = transform._reset_env_preprocess(rows)
        if isinstance(transform, StepCounter):  # its own zeros have the environment's batch size
            rows = rows.set(transform.step_count_key, torch.zeros(len(rows), 1, dtype=torch.int64))
    return env.transform._reset(rows, _open_rows(env.base_env, rows))


class BrokenAgentError(RuntimeError):
    """Error of an agent that has failed on as many conversations as a batch has, and has never ended without one."""


class RowStepper:
    """Stepper that advances each conversation of a transformed :class:`ChatEnv` without waiting for the others.

    Stepping one row alone has the same effect as stepping it in a batch, except for outcome transforms: the first
    transform with a true ``scores_outcomes`` and all after it. These see an ended conversation only in :meth:`finish`,
    together with the rest of its group.

    Args:
        env: :class:`ChatEnv` with any transforms; those that are not a :class:`TurnTransform` must be fast.

    Attributes:
        turn_transforms: the transforms that act in :meth:`step`.
        outcome_transforms: the transforms that act in :meth:`finish`.
        opens_slowly: whether :func:`open_rows` may block, such as for the sessions of a :class:`TurnTransform`.
        keeps_state: whether conversations need a :meth:`release`.
        player: transform with a ``play(row, sample)`` that takes all turns of a conversation; None if there is none.

    Raises:
        ValueError: if a transform changes the environment's input, which is only defined for whole batches. Also if a
            :class:`TurnTransform` comes after the rewards, another transform would act on the turns of a ``player``, or
            its ``input_mode`` is not ``"tokens"``.

    Example::

        stepper = RowStepper(env)
        row = policy(row)                # [] row of env.reset(), with the policy's turn
        row = await stepper.step(row)    # sets row["next"]
        if row["next", "done"].any():
            stepper.finish([row])        # rewards, with the rest of its group
            await stepper.release(row)
    """

    def __init__(self, env: EnvBase):
        transforms = transforms_of(env)
        if bad := [type(t).__name__ for t in transforms if t.in_keys_inv]:
            raise ValueError(f"{bad} change the environment's input, so conversations cannot be stepped alone")
        self.env, self.base = env, env
        while isinstance(self.base, TransformedEnv):
            self.base = self.base.base_env
        # Transforms after a player act once it has ended
        ends = [
            getattr(t, "scores_outcomes", False) or (i > 0 and hasattr(transforms[i - 1], "play"))
            for i, t in enumerate(transforms)
        ]
        first = ends.index(True) if True in ends else len(transforms)
        self.turn_transforms = [t for t in transforms[:first] if _has_step(t)]
        self.outcome_transforms = [t for t in transforms[first:] if _has_step(t)]
        self._each_turn_transforms = [t for t in self.outcome_transforms if not getattr(t, "scores_outcomes", False)]
        later = [t for t in self.outcome_transforms if isinstance(t, TurnTransform)]
        self.player = _select_player([*self.turn_transforms, *later], self.base)
        scored = [getattr(t, "scores_outcomes", False) for t in self.outcome_transforms]
        if late := [type(t).__name__ for i, t in enumerate(self.outcome_transforms) if t in later and any(scored[:i])]:
            raise ValueError(f"{late} would answer turns after their rewards; pass DatasetChatEnv(transforms=...)")
        self._stateful = _select_stateful(transforms)
        self.keeps_state = bool(self._stateful)
        self.opens_slowly = not isinstance(self.base, ChatEnv) or any(map(_opens_slowly, transforms))
        self._batched = [transform for transform in transforms if hasattr(transform, "end_batch")]
        for transform in self._batched:
            transform.collected = True

    async def step(self, row: TensorDictBase) -> TensorDictBase:
        """Step one conversation; to be awaited on the conversations' loop.

        ``"next"`` is set before transforms work on it, so a conversation that is cancelled during the step can be
        :meth:`truncate`. A row that is done still has to go through :meth:`finish`.
        """
        set_entries(row, {"next": self.base.step_row(row)})
        await self._apply(self.turn_transforms, row)
        if not is_done(entry_of(row, "next")):
            await self._apply(self._each_turn_transforms, row)
        name_end(entry_of(row, "next"))
        return row

    @staticmethod
    async def _apply(transforms: Iterable[Transform], row: TensorDictBase) -> None:
        for transform in transforms:
            if isinstance(transform, TurnTransform):
                await transform.process_turn(row, row["next"])
            else:
                row.set("next", transform._step(stack_rows([row]), stack_rows([row["next"]]))[0])

    @staticmethod
    def truncate(row: TensorDictBase, reason: str) -> TensorDictBase:
        """End a conversation at its current state."""
        row = row.copy()
        if row.get("next", None) is None:
            row.set("next", row.copy().set("reward", torch.zeros(1, 1)))
        end_row(row["next"], reason)
        return row

    def finish(self, rows: list[TensorDictBase]) -> None:
        """Apply the outcome transforms (rewards and later ones) to ended conversations, in place; this may block.

        Conversations that failed abstain (:func:`~torchrl_rloo.envs.abstaining.mark_abstaining`): all their rewards are
        NaN.
        """
        batch, after = stack_rows(rows), stack_rows([entry_of(row, "next") for row in rows])
        for transform in self.outcome_transforms:
            after = transform._step(batch, after)
        ended = after.unbind(0)
        mark_abstaining(self.base, ended)
        for row, next_row in zip(rows, ended, strict=True):
            set_entries(row, {"next": next_row})

    def end_batch(self) -> None:
        """Tell transforms such as ``NormalizeRewards`` that all rows which :meth:`finish` has scored form a batch."""
        for transform in self._batched:
            transform.end_batch()

    async def release(self, row: TensorDictBase) -> None:
        """Release what transforms keep for a conversation that has ended or was cancelled."""
        if self._stateful:
            await _release(self._stateful, [int(row[keys.TRAJECTORY_ID])])


def _select_player(turn_transforms: list[Transform], base: EnvBase) -> TurnTransform | None:
    """Return the transform that takes all turns of a conversation, or None."""
    players = [t for t in turn_transforms if hasattr(t, "play")]
    if not players:
        return None
    name, others = type(players[0]).__name__, [type(t).__name__ for t in turn_transforms if t is not players[0]]
    if others:
        raise ValueError(f"{others} would act on turns, which {name} leaves to its agent; remove them")
    if base.input_mode != "tokens":
        raise ValueError(f"input_mode={base.input_mode!r} cannot be combined with {name}; use 'tokens'")
    return players[0]


def _has_step(transform: Transform) -> bool:
    """Return whether a step can have an effect through a transform."""
    cls = type(transform)
    return cls._step is not Transform._step or cls._call is not Transform._call or bool(transform.in_keys)


def _opens_slowly(transform: Transform) -> bool:
    """Return whether the reset of a transform may block."""
    hooks = ("_reset", "_reset_env_preprocess")
    own = any(getattr(type(transform), hook) is not getattr(TurnTransform, hook) for hook in hooks)
    return own and isinstance(transform, TurnTransform)


def _select_stateful(transforms: Iterable[Transform]) -> list[TurnTransform]:
    """Return the transforms that keep state for a conversation."""
    return [t for t in transforms if isinstance(t, TurnTransform) and type(t).release is not TurnTransform.release]


async def _release(stateful: Iterable[TurnTransform], trajectory_ids: Iterable[int]) -> None:
    await asyncio.gather(*(transform.release(i) for i in trajectory_ids for transform in stateful))


def _flat(transform: Transform) -> list[Transform]:
    if isinstance(transform, Compose):
        return [leaf for inner in transform.transforms for leaf in _flat(inner)]
    return [transform]

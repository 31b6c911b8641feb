"""Rows of conversations of several roles: one row, group and reward for each role of a conversation."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import make_non_tensor
from torchrl_rloo.data.segments import select_samples
from torchrl_rloo.data.stop_reasons import end_row


@dataclass(frozen=True)
class Role:
    """Role of a conversation, such as a player, a proposer or a judge.

    Args:
        name: letters, digits, ``-`` and ``_``.
        compare: rows with which those of the role are compared. ``"group"``: one row for each conversation, compared
            with the same role in the other conversations of the prompt. ``"conversation"``: one row for each sample,
            compared with the other samples of the role in its conversation, such as attempts at one proposal.
        frozen: whether the role is not trained, such as a judge; it then has no rows.

    Raises:
        ValueError: if an argument is none of these.

    Example:
        >>> Role("solver", compare="conversation").frozen
        False
    """

    name: str
    compare: Literal["group", "conversation"] = "group"
    frozen: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Za-z0-9_-]+", self.name):
            raise ValueError(f"name={self.name!r} of a role must consist of letters, digits, '-' and '_'; rename it")
        if self.compare not in ("group", "conversation"):
            raise ValueError(f"compare={self.compare!r} must be 'group' or 'conversation'")


def make_roles(roles: Sequence[str | Role]) -> tuple[Role, ...]:
    """Return roles; a name stands for ``Role(name)``.

    Raises:
        ValueError: if two roles have the same name, or all are frozen.
        TypeError: if ``roles`` is a single name.

    Example:
        >>> [role.name for role in make_roles(["white", Role("black")])]
        ['white', 'black']
    """
    if isinstance(roles, str):
        raise TypeError(f"roles={roles!r} must be a list of roles; use [{roles!r}]")
    made = tuple(role if isinstance(role, Role) else Role(role) for role in roles)
    names = [role.name for role in made]
    if len(set(names)) < len(names):
        raise ValueError(f"roles={names} must have different names")
    if made and all(role.frozen for role in made):
        raise ValueError(f"roles={names} are all frozen, which leaves none to train; set frozen=False for one")
    return made


def split_roles(rows: Sequence[TensorDictBase], roles: Sequence[Role]) -> list[TensorDictBase]:
    """Split finished conversations into rows of their roles, with separate groups and rewards.

    A row has the ordinary schema. ``"role"`` and ``"role_id"`` tell its role, and ``"conversation_group"`` has the
    conversation's ``"group_id"`` ``g``. With ``R`` roles and ``G`` conversations in the group, the row's own
    ``"group_id"`` is ``(g * R + role_id) * (G + 1)``. Roles compared within the ``m``-th conversation, from 1, add
    ``m``. ``"group_size"`` is ``G``, or the number of samples in the conversation. The reward of a role is added to
    that of the conversation. A role without a sample has a row without action tokens, which abstains.

    Args:
        rows: conversations in whole groups, with ``ROLE_RECORD`` unless they failed; not changed.
        roles: all roles of the conversations.

    Returns:
        Rows of all roles that are not frozen, in whole groups.

    Raises:
        ValueError: if a row has an entry with one value per token that only its last sample has.
    """
    groups: dict[int, list[TensorDictBase]] = {}
    for row in rows:
        groups.setdefault(int(row[keys.GROUP_ID]), []).append(row)
    found = []
    for group_id, members in groups.items():
        for i, role in enumerate(roles):
            if role.frozen:
                continue
            first = (group_id * len(roles) + i) * (len(members) + 1)
            for m, row in enumerate(members, 1):
                own = _rows_of_role(row, role)
                within = role.compare == "conversation"
                for each in own:
                    each.set(keys.ROLE, make_non_tensor(role.name))
                    each.set(keys.ROLE_ID, torch.tensor(i))
                    each.set(keys.CONVERSATION_GROUP, torch.tensor(group_id))
                    each.set(keys.GROUP_ID, torch.tensor(first + m if within else first))
                    each.set(keys.GROUP_SIZE, torch.tensor(len(own) if within else len(members)))
                found += own
    return found


def _rows_of_role(row: TensorDictBase, role: Role) -> list[TensorDictBase]:
    """Return the rows of a role in one conversation, at least one."""
    record = row[keys.ROLE_RECORD] if keys.ROLE_RECORD in row.keys(True) else None
    samples = record["samples"] if record else []
    own = [i for i, sample in enumerate(samples) if sample["role"] == role.name]
    if not own:
        return [_with_outcome(select_samples(row, []), math.nan, [])]
    reward = record["rewards"].get(role.name, 0.0)
    parts = [own] if role.compare == "group" else [[i] for i in own]
    return [_with_outcome(select_samples(row, part), reward, [samples[i] for i in part]) for part in parts]


def _with_outcome(row: TensorDictBase, reward: float, samples: Sequence[dict[str, Any]]) -> TensorDictBase:
    """Set reward, turns, completion and stop reason of a role's row, in place."""
    after = row["next"]
    after.pop(keys.ROLE_RECORD[1], None)
    after.set("reward", after["reward"] + reward + sum(sample["reward"] for sample in samples))
    row.set(keys.NUM_TURNS, torch.tensor(sum(sample["turns"] for sample in samples)))
    row.set(keys.COMPLETION, make_non_tensor(samples[-1]["completion"] if samples else []))
    if samples:
        end_row(after, samples[-1]["reason"])
        return row
    for key in (keys.REWARDS, keys.RAW_REWARDS):
        if (scores := row.get(key, None)) is not None:
            row.set(key, torch.full_like(scores, math.nan))
    return row

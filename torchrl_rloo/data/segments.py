"""Trajectories of several samples or roles, and their ids.

Several samples arise when the chat template rewrites the conversation. ``ChatEnv(on_rewrite="split")`` then continues
from the conversation as the template renders it again. Later turns then have
a different context from earlier ones. The trajectory stays one row with one reward in one group. ``TOKENS`` and all
other token entries belong to the last sample, and ``PREVIOUS_SEGMENTS`` concatenates those of the earlier samples.
Once the row has an advantage, :func:`split_segments` makes one row per sample for the loss::

    buffer.extend(tensor_rows(rows))  # MCAdvantage sees whole groups
    loss = loss_module(split_segments(buffer.sample()))

The weight of a trajectory of ``K`` samples depends on the loss's aggregation:

- ``"token_mean"``: each token still counts once.
- ``"sequence_sum"`` and ``"constant"``: the relative weights of trajectories stay the same. The loss is multiplied by
  the number of trajectories over the number of rows.
- ``"sequence_mean"``: the trajectory has ``K`` times the weight of a trajectory of one sample.

A sequence-level ratio is that of one sample, not the product over all samples.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import copy_row, entry_of, make_non_tensor, make_tensorclass_like, stack_rows, to_lazy_stack
from torchrl_rloo.data.stop_reasons import end_row

# Entries about samples, which a step copies from the row to its "next"
SAMPLE_KEYS = (keys.PREVIOUS_SEGMENTS, keys.ACTION_VERSIONS, keys.SUPPORT_IDS[0], keys.IMAGES)
_TOKEN_ENTRIES = {"tokens": keys.PROMPT_TOKENS, "mask": keys.ACTION_MASK, "log_probs": keys.LOG_PROBS}
_NO_IMAGES = torch.zeros(0, 32, dtype=torch.uint8)
_ACTION_ENTRIES = {
    "versions": keys.ACTION_VERSIONS,
    "support_sizes": keys.SUPPORT_SIZES,
    "support_ids": keys.SUPPORT_IDS,
}
# Entries of one value per token, which earlier samples do not have
LAST_SAMPLE_KEYS: tuple[NestedKey, ...] = (
    keys.TOKEN_REWARDS,
    keys.REF_LOG_PROBS,
    keys.PROXIMAL_LOG_PROBS,
    keys.PROXIMAL_ENTROPY,
    keys.STATE_VALUE,
    keys.VALUE_TARGET,
)


def stash_segment(row: TensorDictBase) -> None:
    """Append a row's current sample to its previous ones, in place; the caller then sets the next context.

    ``PREVIOUS_SEGMENTS`` concatenates over the previous samples: ``tokens``, ``mask`` and ``log_probs`` (``[E]``),
    ``sizes`` (int64, tokens of each sample) and, if the row has them, ``versions``, ``support_sizes`` (``[A]``) and
    ``support_ids`` (``[K]``). Rows with images also have ``images`` (``[n, 32]``) and their numbers ``image_counts``.
    """
    previous = row.get(keys.PREVIOUS_SEGMENTS, None)
    current = {name: row[key] for name, key in _TOKEN_ENTRIES.items()}
    current["sizes"] = torch.tensor([len(current["tokens"])])
    for name, key in _ACTION_ENTRIES.items():
        if (value := row.get(key, None)) is not None:
            current[name] = value
    images = row.get(keys.IMAGES, None)
    if images is not None or (previous is not None and "images" in previous.keys()):
        images = _NO_IMAGES if images is None else images
        current |= {"images": images, "image_counts": torch.tensor([len(images)])}
        if previous is not None and "images" not in previous.keys():  # earlier samples had none
            previous = previous.copy().update({"images": _NO_IMAGES, "image_counts": previous["sizes"] * 0})
    if previous is not None:
        current = {name: torch.cat([previous[name], value]) for name, value in current.items()}
    drop_samples(row).set(keys.PREVIOUS_SEGMENTS, TensorDict(current, batch_size=[]))


def drop_samples(row: TensorDictBase) -> TensorDictBase:
    """Drop a row's previous samples and the per-action entries of the current one, in place."""
    row.pop(keys.PREVIOUS_SEGMENTS, None)
    if keys.ACTION_VERSIONS in row.keys():
        row.set(keys.ACTION_VERSIONS, row[keys.ACTION_VERSIONS][:0])
    if keys.SUPPORT_IDS[0] in row.keys():
        row.set(keys.SUPPORT_IDS[0], row[keys.SUPPORT_IDS[0]].apply(lambda value: value[:0]))
    return row


def split_segments(rows: TensorDictBase) -> TensorDictBase:
    """Split trajectories into one row per sample, in order, each with the advantage of its trajectory.

    Samples without action tokens are dropped, unless a trajectory has no others. The module docstring describes the
    weights of the samples.

    Args:
        rows: batch of size ``[B]`` with advantages; not changed.

    Returns:
        At least ``B`` rows without ``PREVIOUS_SEGMENTS``, or ``rows`` itself if no row has it. ``POLICY_VERSION`` is
        the oldest version of the sample's action tokens if these are known. All other entries that are not per token
        are those of the trajectory.

    Raises:
        ValueError: if a row of several samples has an entry with one value per token, which earlier samples lack.
    """
    if not any(keys.PREVIOUS_SEGMENTS in row.keys() for row in rows.unbind(0)):
        return rows
    return stack_rows([sample for row in rows.unbind(0) for sample in _samples(row)])


def select_samples(row: TensorDictBase, indices: Sequence[int]) -> TensorDictBase:
    """Return a copy of a finished row with only some of its samples."""
    _refuse_last_sample_keys(row)
    parts = [*_previous_parts(row), _last_part(row)]
    chosen = copy_row(row)
    chosen.pop(keys.PREVIOUS_SEGMENTS, None)
    if not indices:
        # Keep the prompt, or a whole sample with images, whose tokens must be those of its images
        first, images = parts[0], {name: value for name, value in parts[0].items() if name == "images" and len(value)}
        kept = slice(0, None if images else first_action(first["mask"]))
        empty = {name: first[name][kept] if name == "tokens" else first[name][kept] * False for name in _TOKEN_ENTRIES}
        return drop_samples(_sample(chosen, empty | images))
    *earlier, last = [parts[i] for i in indices]
    if earlier:
        joined = {name: torch.cat([part[name] for part in earlier]) for name in last if name != "images"}
        joined["sizes"] = torch.tensor([len(part["tokens"]) for part in earlier])
        images = [part.get("images", _NO_IMAGES) for part in earlier]
        if any(map(len, images)):
            joined |= {"images": torch.cat(images), "image_counts": torch.tensor(list(map(len, images)))}
        chosen.set(keys.PREVIOUS_SEGMENTS, TensorDict(joined, batch_size=[]))
    return _sample(chosen, last)


def sampled_versions(row: TensorDictBase) -> torch.Tensor | None:
    """Return the policy versions of all action tokens of a trajectory, over all its samples.

    Shapes: result ``[A]`` int64.
    """
    versions, previous = entry_of(row, keys.ACTION_VERSIONS), entry_of(row, keys.PREVIOUS_SEGMENTS)
    return versions if versions is None or previous is None else torch.cat([previous["versions"], versions])


def action_ids(row: TensorDictBase) -> torch.Tensor:
    """Return the action tokens of a trajectory, over all its samples.

    Shapes: result ``[A]`` int64.
    """
    ids, mask = entry_of(row, keys.PROMPT_TOKENS), entry_of(row, keys.ACTION_MASK)
    ids, previous = ids[mask], entry_of(row, keys.PREVIOUS_SEGMENTS)
    return ids if previous is None else torch.cat([previous["tokens"][previous["mask"]], ids])


def refuse_segments(row: TensorDictBase, caller: str) -> None:
    """Raise if a row has several samples, for callers that read the tokens of whole trajectories."""
    if keys.PREVIOUS_SEGMENTS in row.keys():
        raise ValueError(
            f"{caller} requires all tokens of a trajectory in one sample, but this row has "
            f"{len(row[keys.PREVIOUS_SEGMENTS]['sizes'])} more samples under {keys.PREVIOUS_SEGMENTS!r}; "
            f"use ChatEnv(on_rewrite='keep'), or remove {caller}"
        )


def refuse_images(rows: TensorDictBase, caller: str) -> None:
    """Raise if a row has images, for callers that see ids only."""
    if any((images := entry_of(row, keys.IMAGES)) is not None and len(images) for row in to_lazy_stack(rows).unbind(0)):
        raise ValueError(f"{caller} reads text only, but the rows have images under {keys.IMAGES!r}; use rows of text")


def _samples(row: TensorDictBase) -> Iterator[TensorDictBase]:
    if keys.PREVIOUS_SEGMENTS not in row.keys():
        yield row
        return
    _refuse_last_sample_keys(row)
    if (advantage := row.get(keys.ADVANTAGE, None)) is not None and advantage.numel() != 1:
        raise ValueError("a row of several samples has one advantage per token; use credit='trajectory'")

    # Yield samples with action tokens; the last one has none if the trajectory was cancelled before its turn
    rest = row.exclude(keys.PREVIOUS_SEGMENTS)
    sampled = [part for part in _previous_parts(row) if part["mask"].any()]
    for part in sampled:
        yield _sample(rest.copy(), part)
    if rest[keys.ACTION_MASK].any() or not sampled:
        yield _with_version(rest)


def _refuse_last_sample_keys(row: TensorDictBase) -> None:
    for key in LAST_SAMPLE_KEYS:
        if row.get(key, None) is not None:
            raise ValueError(f"a row of several samples has {key!r} of its last sample only; write it after the split")


def _previous_parts(row: TensorDictBase) -> list[dict[str, torch.Tensor]]:
    """Cut the concatenated entries of the previous samples back into samples."""
    if (previous := row.get(keys.PREVIOUS_SEGMENTS, None)) is None:
        return []
    sizes = previous["sizes"].tolist()
    parts = {name: previous[name].split(sizes) for name in _TOKEN_ENTRIES}
    actions = [int(mask.sum()) for mask in parts["mask"]]
    for name in ("versions", "support_sizes"):
        if name in previous.keys():
            parts[name] = previous[name].split(actions)
    if "support_ids" in previous.keys():
        parts["support_ids"] = previous["support_ids"].split([int(n.sum()) for n in parts["support_sizes"]])
    if "images" in previous.keys():
        parts["images"] = previous["images"].split(previous["image_counts"].tolist())
    return [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))]


def _last_part(row: TensorDictBase) -> dict[str, torch.Tensor]:
    """Return the entries of a finished row's last sample."""
    named = _TOKEN_ENTRIES | {"tokens": keys.TOKENS, "images": keys.IMAGES} | _ACTION_ENTRIES
    return {name: value for name, key in named.items() if (value := row.get(key, None)) is not None}


def first_action(mask: torch.Tensor) -> int:
    """Return the position of the first action token in a mask ``[T]``, or ``T`` without one."""
    return int(mask.view(torch.uint8).argmax()) if mask.any() else len(mask)


def _sample(row: TensorDictBase, part: dict[str, torch.Tensor]) -> TensorDictBase:
    """Set the token entries of a sample on a row, in place."""
    tokens, mask = part["tokens"], part["mask"]
    entries = {
        "tokens": {"full": tokens, "prompt": tokens[: first_action(mask)]},
        "masks": {"all_attention_mask": torch.ones_like(mask), "all_assistant_mask": mask},
        "log_probs": {"full": part["log_probs"]},
    }
    for name, tensors in entries.items():
        row.set(name, make_tensorclass_like(row.get(name), **tensors))
    row.pop(keys.IMAGES, None)
    if "images" in part:
        row.set(keys.IMAGES, part["images"])
    if "versions" in part:
        row.set(keys.ACTION_VERSIONS, part["versions"])
    if "support_ids" in part:
        support = {"ids": part["support_ids"], "sizes": part["support_sizes"]}
        row.set(keys.SUPPORT_IDS[0], TensorDict(support, batch_size=[]))
    return _with_version(row)


def _with_version(row: TensorDictBase) -> TensorDictBase:
    versions = sampled_versions(row)
    return row if versions is None or not len(versions) else row.set(keys.POLICY_VERSION, versions.min())


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
    """Return roles; a name stands for ``Role(name)``."""
    if isinstance(roles, str):
        raise TypeError(f"roles={roles!r} must be a list of roles; use [{roles!r}]")
    declared = tuple(role if isinstance(role, Role) else Role(role) for role in roles)
    names = [role.name for role in declared]
    if len(set(names)) < len(names):
        raise ValueError(f"roles={names} must have different names")
    if declared and all(role.frozen for role in declared):
        raise ValueError(f"roles={names} are all frozen, which leaves none to train; set frozen=False for one")
    return declared


def split_roles(rows: Sequence[TensorDictBase], roles: Sequence[Role]) -> list[TensorDictBase]:
    """Split finished conversations into rows of their roles, with separate groups and rewards.

    A row has the ordinary schema. ``"role"`` and ``"role_id"`` tell its role, and ``"conversation_group"`` has the
    conversation's ``"group_id"`` ``g``. With ``R`` roles and ``G`` conversations in the group, the row's own
    ``"group_id"`` is ``(g * R + role_id) * (G + 1)``. Roles compared within the ``m``-th conversation, from 1, add
    ``m``. ``"group_size"`` is ``G``, or the number of samples in the conversation. The reward of a role is added to
    that of the conversation. A role without a sample has a row without action tokens, which abstains.
    """
    groups: dict[int, list[TensorDictBase]] = {}
    for row in rows:
        groups.setdefault(int(row[keys.GROUP_ID]), []).append(row)
    parts = []
    for group_id, members in groups.items():
        for i, role in enumerate(roles):
            if role.frozen:
                continue
            first = (group_id * len(roles) + i) * (len(members) + 1)
            for m, row in enumerate(members, 1):
                role_rows = _rows_of_role(row, role)
                within = role.compare == "conversation"
                for role_row in role_rows:
                    role_row.set(keys.ROLE, make_non_tensor(role.name))
                    role_row.set(keys.ROLE_ID, torch.tensor(i))
                    role_row.set(keys.CONVERSATION_GROUP, torch.tensor(group_id))
                    role_row.set(keys.GROUP_ID, torch.tensor(first + m if within else first))
                    role_row.set(keys.GROUP_SIZE, torch.tensor(len(role_rows) if within else len(members)))
                parts += role_rows
    return parts


def _rows_of_role(row: TensorDictBase, role: Role) -> list[TensorDictBase]:
    """Return the rows of a role in one conversation, at least one."""
    record = row[keys.ROLE_RECORD] if keys.ROLE_RECORD in row.keys(True) else None
    samples = record["samples"] if record else []
    of_role = [i for i, sample in enumerate(samples) if sample["role"] == role.name]
    if not of_role:
        return [_with_outcome(select_samples(row, []), math.nan, [])]
    reward = record["rewards"].get(role.name, 0.0)
    parts = [of_role] if role.compare == "group" else [[i] for i in of_role]
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


_MAX_GROUPS = 4096  # groups whose members are counted; their conversations begin at about the same time


def trajectory_id(group_id: int, member: int) -> int:
    """Return the id of a group's member: a hash of both numbers, from 0 to ``2**63 - 1``."""
    digest = hashlib.blake2b(repr((int(group_id), int(member))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class TrajectoryIds:
    """Ids of conversations in the order in which an environment opens them, so that the same run has the same ids.

    The members of a group are numbered. A conversation without a group gets a random id.
    """

    def __init__(self):
        self._members: OrderedDict[int, int] = OrderedDict()

    def next(self, group_id: int | None) -> int:
        """Return the id of the next conversation of a group, or of one without a group."""
        if group_id is None:
            return secrets.randbits(63)
        member = self._members.get(group_id, 0)
        self._members[group_id] = member + 1
        if len(self._members) > _MAX_GROUPS:
            self._members.popitem(last=False)
        return trajectory_id(group_id, member)

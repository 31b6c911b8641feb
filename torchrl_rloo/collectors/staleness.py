"""Bounded staleness: which groups may wait, and what happens to tokens that waited too long.

The staleness of a token is the policy version at delivery minus the version that sampled it. With ``max_staleness=s``
and batches of ``b`` groups, a group at position ``p`` of the queue is delivered about ``p // b`` versions from now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from tensordict import TensorDictBase

from torchrl_rloo.collectors.ledger import Group, GroupLedger, GroupState
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import make_tensorclass_like
from torchrl_rloo.data.segments import sampled_versions

OnStale = Literal["mask", "baseline", "requeue", "wait"]
_COUNTED = (GroupState.COMPLETE, GroupState.LEASED)
_NEWEST = 1 << 62  # above every version
ON_STALE: tuple[str, ...] = get_args(OnStale)


def token_staleness(rows: TensorDictBase, version: int) -> torch.Tensor:
    """Return the staleness of every action token of a batch, over all samples of its rows.

    Args:
        rows: ``[B]`` finished rows.
        version: current policy version.

    Returns:
        ``[A]`` int64, ``A`` being the number of action tokens of all rows.
    """
    return torch.cat([version - _versions(row) for row in rows.unbind(0)])


def _versions(row: TensorDictBase) -> torch.Tensor:
    """Return the version of each action token ``[A]``; that of the row if the policy reports none per token."""
    versions = sampled_versions(row)
    if versions is not None:
        return versions
    actions, previous = int(row[keys.ACTION_MASK].sum()), row.get(keys.PREVIOUS_SEGMENTS, None)
    actions += 0 if previous is None else int(previous["mask"].sum())
    return row[keys.POLICY_VERSION].expand(actions)


def _versions_or_metadata(row: TensorDictBase) -> torch.Tensor:
    return row[keys.VERSION_COUNTS][:, 0] if keys.VERSION_COUNTS in row.keys() else _versions(row)


def oldest_sampled(rows: Sequence[TensorDictBase]) -> int | None:
    """Return the oldest version that sampled a token of finished rows or of their metadata; None without a token."""
    return min((int(v.min()) for row in rows if len(v := _versions_or_metadata(row))), default=None)


def oldest_version(group: Group, version: int) -> int:
    """Return the oldest version that sampled, or may have sampled, a token of a group.

    Args:
        group: record of the ledger. Before its first conversation it cannot be older than ``version``.
        version: current policy version.
    """
    if group.rows is not None:
        return version if group.oldest is None else group.oldest
    return version if group.version is None else group.version


def _in_time(ages: Counter[int], per_batch: int, max_staleness: int) -> bool:
    """Return whether groups of these ages can be delivered in time, oldest first.

    Each batch follows one weight update. Groups beyond the bound are ignored, since waiting does not help them.
    """
    position = 0
    for age in sorted((age for age, number in ages.items() if number and age <= max_staleness), reverse=True):
        position += ages[age]
        if age + 1 + (position - 1) // per_batch > max_staleness:  # the last group of this age
            return False
    return True


def _order_of_delivery(
    ready: Counter[int], late: Counter[int], needed: int, per_batch: int, max_staleness: int
) -> Callable[[int], int] | None:
    """Return the key of an age by which :meth:`AgeTable.choose` sorts, largest first; None to wait.

    Groups beyond the bound come first, then the oldest, unless that would make others late.

    Args:
        ready: number of complete groups by age.
        late: number of running groups by age.
        needed: number of groups to deliver.
        per_batch: number of groups in a later batch.
        max_staleness: bound on the staleness.
    """

    def urgency(age: int) -> int:
        """Return the urgency of an age; groups beyond the bound, which cannot be late any more, are not urgent."""
        return age if age <= max_staleness else -1

    for key in (lambda age: age, urgency):
        taken, left = Counter(), needed
        for age in sorted(ready, key=key, reverse=True):
            taken[age] = min(left, ready[age])
            left -= taken[age]
        if _in_time(ready - taken + late, per_batch, max_staleness):
            break
    else:
        # Some group will be late; wait only if a running group could take the place of a less urgent one
        least = min(urgency(age) for age, number in taken.items() if number)
        if any(urgency(age) > least for age in late):
            return None
    return key


class AgeTable:
    """Numbers of complete and running groups by version, kept up to date with the changes of a ledger.

    It looks only at groups that changed since the last call, so a choice at each completion costs the same for any
    number of groups.

    Args:
        ledger: ledger whose changes this table alone takes.
    """

    def __init__(self, ledger: GroupLedger):
        self.ledger = ledger
        self._numbers: dict[GroupState, Counter[int | None]] = {state: Counter() for state in _COUNTED}
        self._known: dict[int, tuple[GroupState, int | None]] = {}

    def choose(self, needed: int, per_batch: int, version: int, max_staleness: int) -> list[Group] | None:
        """Choose the groups to deliver, so that those left behind can be delivered in time if any choice allows it.

        Args:
            needed: number of groups to deliver; at least as many are complete.
            per_batch: number of groups in a later batch.
            version: current policy version.
            max_staleness: bound on the staleness.

        Returns:
            The groups, or None to wait for a running one that is more urgent than a complete one.
        """
        self._refresh()
        ready, running = (self._ages(state, version) for state in _COUNTED)
        key = _order_of_delivery(ready, running, needed, per_batch, max_staleness)
        if key is None:
            return None
        complete = self.ledger.of(GroupState.COMPLETE)
        return sorted(complete, key=lambda group: -key(version - oldest_version(group, version)))[:needed]

    def _refresh(self) -> None:
        """Count the groups that changed."""
        for group_id in self.ledger.take_changed():
            if (known := self._known.pop(group_id, None)) is not None:
                state, version = known
                self._numbers[state][version] -= 1
                if not self._numbers[state][version]:
                    del self._numbers[state][version]
            group = self.ledger.groups.get(group_id)
            if group is not None and group.state in _COUNTED:
                # A group without a sampled token has the current version
                oldest = oldest_version(group, _NEWEST)
                version = None if oldest == _NEWEST else oldest
                self._known[group_id] = group.state, version
                self._numbers[group.state][version] += 1

    def _ages(self, state: GroupState, version: int) -> Counter[int]:
        ages: Counter[int] = Counter()
        for oldest, number in self._numbers[state].items():
            ages[0 if oldest is None else version - oldest] += number
        return ages


def limit_staleness(
    rows: list[TensorDictBase], version: int, max_staleness: int, on_stale: OnStale, counts: Counter[str]
) -> list[TensorDictBase]:
    """Take tokens beyond the bound out of the loss.

    Args:
        rows: finished rows.
        version: current policy version.
        max_staleness: bound on the staleness.
        on_stale: ``"baseline"`` removes all tokens of a row with a stale one from the action mask; any other value
            removes only stale tokens. The row's reward stays in its group's baseline.
        counts: counters to which ``"staleness/masked_tokens"`` and ``"staleness/masked_rows"`` are added.

    Returns:
        The rows; changed ones are copies.
    """
    limited = []
    for row in rows:
        stale = version - _versions(row) > max_staleness
        if stale.any():
            stale = torch.ones_like(stale) if on_stale == "baseline" else stale
            counts["staleness/masked_tokens"] += int(stale.sum())
            counts["staleness/masked_rows"] += 1
            row = _mask_actions(row.copy(), stale)
        limited.append(row)
    return limited


def _mask_actions(row: TensorDictBase, stale: torch.Tensor) -> TensorDictBase:
    """Remove actions from a row's masks, in place.

    Args:
        row: finished row.
        stale: ``[A]`` bool, over all samples of the row.
    """
    previous, split = row.get(keys.PREVIOUS_SEGMENTS, None), 0
    # Earlier samples come first; their entries are concatenated
    if previous is not None:
        split = int(previous["mask"].sum())
        previous = previous.copy()
        for name, value in _without(previous["mask"], previous["log_probs"], stale[:split]).items():
            previous.set(name, value)
        if "support_ids" in previous.keys():
            sizes = previous["support_sizes"].long()
            previous.set("support_ids", previous["support_ids"][(~stale[:split]).repeat_interleave(sizes)])
        for name in {"versions", "support_sizes"} & set(previous.keys()):
            previous.set(name, previous[name][~stale[:split]])
        row.set(keys.PREVIOUS_SEGMENTS, previous)
    # Then the last sample, whose entries are those of the row
    last = stale[split:]
    kept = _without(row[keys.ACTION_MASK], row[keys.LOG_PROBS], last)
    if keys.TOKEN_REWARDS in row.keys(True) and keys.SAMPLED_MASK not in row.keys():
        row.set(keys.SAMPLED_MASK, row[keys.ACTION_MASK])  # its rewards stay in the returns and baselines of turns
    masks = {"all_attention_mask": row[keys.ATTENTION_MASK], "all_assistant_mask": kept["mask"]}
    row.set("masks", make_tensorclass_like(row.get("masks"), **masks))
    row.set("log_probs", make_tensorclass_like(row.get("log_probs"), full=kept["log_probs"]))
    if keys.ACTION_VERSIONS in row.keys():
        row.set(keys.ACTION_VERSIONS, row[keys.ACTION_VERSIONS][~last])
        if len(left := sampled_versions(row)):
            row.set(keys.POLICY_VERSION, left.min())
    if keys.SUPPORT_IDS[0] in row.keys():
        ids, sizes = row[keys.SUPPORT_IDS], row[keys.SUPPORT_SIZES]
        support = row[keys.SUPPORT_IDS[0]].copy()
        support.set("ids", ids[(~last).repeat_interleave(sizes.long())])
        row.set(keys.SUPPORT_IDS[0], support.set("sizes", sizes[~last]))
    return row


def _without(mask: torch.Tensor, log_probs: torch.Tensor, stale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return mask and log-probs ``[T]`` without the stale ones of the masked tokens."""
    positions = mask.nonzero()[:, 0][stale]
    mask, log_probs = mask.clone(), log_probs.clone()
    mask[positions], log_probs[positions] = False, 0.0
    return {"mask": mask, "log_probs": log_probs}

"""Source of stored rollouts, in place of a collector."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, SupportsFloat, get_args

import torch
from tensordict import TensorDictBase

from torchrl_rloo.collectors.llm import Totals
from torchrl_rloo.collectors.staleness import limit_staleness
from torchrl_rloo.collectors.weights import PolicyWeights
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ragged, stack_rows
from torchrl_rloo.envs.transforms.data import DatasetExhaustedError
from torchrl_rloo.envs.transforms.kl import add_reference_kl
from torchrl_rloo.modules.reference import Scorer
from torchrl_rloo.replay.rollouts import RolloutFile, RolloutFiles, StoredGroup
from torchrl_rloo.weight_update import WeightUpdater

_POLL_S = 0.2

OnStored = Literal["mask", "baseline", "drop"]


class StoredRollouts:
    """Source of stored groups with the interface of :class:`LLMCollector`, for training later or elsewhere.

    Groups are delivered in the order in which they were stored, each once. Files that writers add later are read
    as they appear. The source holds one file in memory.

    The trainer's version starts at ``policy_version`` and grows by one with each :meth:`update_policy_weights_`. This
    sends nothing without a ``weight_updater``. A group's staleness is that version minus the version that sampled its
    tokens. Rows of another policy than the trained one need an importance correction in the loss.

    Args:
        files: the folder.
        groups_per_batch: number of groups to deliver at a time. The last batch may have fewer.
        policy_version: version of the training model's weights at the start, counted as the sampler counted.
        max_staleness: largest version of the trainer minus that of any trained token. None sets no bound.
        on_stale: treatment of older groups: ``"mask"`` takes their stale tokens out of the loss, and ``"baseline"``
            their rows with stale tokens. ``"drop"`` skips groups with any stale token, without reading them.
        patience_s: seconds to wait for files that writers have yet to add, before the end is reported.
        auto_acknowledge: whether the next :meth:`collect` and :meth:`state_dict` acknowledge a returned batch. With
            False, :meth:`acknowledge` must be called, and a state delivers all other groups again.
        weight_updater: sender of new weights to a policy that evaluates. None sends nothing.

    Attributes:
        policy_version: version of the training model's weights.
        batches: number of delivered batches.
        dialog_turns: number of turns in delivered rows.
        num_tokens: number of tokens in delivered rows.
        counts: ``"stored/groups"`` delivered, ``"stored/stale_groups"`` skipped, ``"staleness/masked_tokens"`` and
            ``"staleness/masked_rows"``.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        ::

            files = RolloutFiles("rollouts", model="Qwen/Qwen3-0.6B", tokenizer=tokenizer)
            source = StoredRollouts(files, groups_per_batch=16)
            for rows in source:
                buffer.extend(tensor_rows(rows))
    """

    env = None  # stored rows need none

    def __init__(
        self,
        files: RolloutFiles,
        *,
        groups_per_batch: int,
        policy_version: int = 0,
        max_staleness: int | None = None,
        on_stale: OnStored = "mask",
        patience_s: float = 0.0,
        auto_acknowledge: bool = True,
        weight_updater: WeightUpdater | None = None,
    ):
        for name, value, minimum in (
            ("groups_per_batch", groups_per_batch, 1),
            ("max_staleness", 0 if max_staleness is None else max_staleness, 0),
            ("patience_s", patience_s, 0),
        ):
            if value < minimum:
                raise ValueError(f"{name}={value} must be at least {minimum}")
        if on_stale not in get_args(OnStored):
            raise ValueError(f"on_stale={on_stale!r} must be one of {get_args(OnStored)}")
        self.files, self.groups_per_batch, self.policy_version = files, groups_per_batch, policy_version
        self.max_staleness, self.on_stale = max_staleness, on_stale
        self.patience_s, self.auto_acknowledge = patience_s, auto_acknowledge
        self.weights = None if weight_updater is None else PolicyWeights(weight_updater, nullcontext, 1)
        self.counts: Counter[str] = Counter()
        self._totals = Totals()
        self._taken: set[int] = set()  # groups that were delivered or skipped
        self._returned: list[int] = []  # delivered groups that no step has acknowledged
        self._finished: set[str] = set()  # files without a group to deliver
        self._current: tuple[str, dict[int, TensorDictBase]] = ("", {})  # name and groups of the last file read

    batches = property(lambda self: self._totals.batches)
    dialog_turns = property(lambda self: self._totals.dialog_turns)
    num_tokens = property(lambda self: self._totals.num_tokens)

    def collect(self) -> TensorDictBase:
        """Return the next groups as one batch ``[B]``.

        Raises:
            DatasetExhaustedError: if no group is left, after ``patience_s``.
            RolloutFileError: if a file is damaged. Its groups stay undelivered; remove it to go on.
        """
        if self.auto_acknowledge:
            self._returned.clear()
        deadline = time.monotonic() + self.patience_s
        while len(chosen := self._choose()) < self.groups_per_batch and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not chosen:
            raise DatasetExhaustedError(f"all {len(self._taken)} groups of {self.files.folder} are delivered")
        # Read, then count in one assignment each, so that an error leaves all groups undelivered
        parts, stale = [], Counter()
        for file, group in chosen:
            parts += self._read(file, group)
        if self.max_staleness is not None:
            parts = limit_staleness(parts, self.policy_version, self.max_staleness, self.on_stale, stale)
        rows, before = stack_rows(parts), self._totals
        turns = sum(int(row.get(keys.NUM_TURNS, 1)) for row in parts)
        tokens = sum(map(len, ragged(rows, keys.TOKENS)))
        delivered = [group.group_id for _, group in chosen]
        self._taken.update(delivered)
        self._returned += delivered
        self.counts.update({"stored/groups": len(delivered), **stale})
        self._totals = Totals(before.batches + 1, before.dialog_turns + turns, before.num_tokens + tokens)
        return rows

    def _choose(self) -> list[tuple[RolloutFile, StoredGroup]]:
        """Return the next groups to deliver, oldest file first."""
        chosen: list[tuple[RolloutFile, StoredGroup]] = []
        ids: set[int] = set()
        for file in self.files.files():
            if file.path.name in self._finished:
                continue
            left = [group for group in file.groups if group.group_id not in self._taken and group.group_id not in ids]
            for group in left:
                if self.on_stale == "drop" and self._is_stale(group):
                    self._taken.add(group.group_id)
                    self.counts["stored/stale_groups"] += 1
                    continue
                chosen.append((file, group))
                ids.add(group.group_id)
                if len(chosen) == self.groups_per_batch:
                    return chosen
            if not left:
                self._finished.add(file.path.name)
        return chosen

    def _is_stale(self, group: StoredGroup) -> bool:
        return self.max_staleness is not None and self.policy_version - group.oldest > self.max_staleness

    def _read(self, file: RolloutFile, group: StoredGroup) -> list[TensorDictBase]:
        """Return the rows of a group; groups of one file follow each other."""
        if self._current[0] != file.path.name:
            self._current = (file.path.name, self.files.read(file))
        return list(self._current[1][group.group_id].unbind(0))

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches until all groups are delivered."""
        while True:
            try:
                rows = self.collect()
            except DatasetExhaustedError:
                return
            yield rows

    __iter__ = iterator

    def acknowledge(self, group_ids: Iterable[int] | None = None) -> int:
        """Note that a training step took returned groups, so that no state delivers them again.

        Args:
            group_ids: groups to acknowledge; None takes all returned groups.

        Returns:
            Number of groups that were acknowledged.

        Raises:
            KeyError: if a group was not returned, or was acknowledged before.
        """
        chosen = set(self._returned) if group_ids is None else set(map(int, group_ids))
        if unknown := chosen - set(self._returned):
            raise KeyError(f"groups {sorted(unknown)} were not returned, or were acknowledged before")
        self._returned = [group_id for group_id in self._returned if group_id not in chosen]
        return len(chosen)

    def initialize_policy_(self) -> None:
        """Give a policy that evaluates the current weights, if there is a ``weight_updater``."""
        if self.weights is not None:
            self.weights.initialize()

    def update_policy_weights_(self) -> None:
        """Count a new version of the training model's weights, and send them if there is a ``weight_updater``.

        Raises:
            WeightSyncError: if the weights did not arrive.
        """
        if self.weights is not None:
            self.weights.update()
        self.policy_version += 1

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Drop the rows in memory. The arguments are those of :meth:`LLMCollector.shutdown`, and are ignored."""
        self._current = ("", {})

    def state_dict(self) -> dict[str, Any]:
        """Return version, counters and the acknowledged groups; all others are delivered again."""
        if self.auto_acknowledge:
            self._returned.clear()
        return {
            "policy_version": self.policy_version,
            "totals": list(self._totals[:3]),
            "counts": dict(self.counts),
            "taken": torch.tensor(sorted(self._taken.difference(self._returned)), dtype=torch.int64),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.policy_version, self._totals = state_dict["policy_version"], Totals(*state_dict["totals"])
        if self.weights is not None:
            self.weights.resume_from(self.policy_version, self.policy_version)
        self._taken, self._returned = set(state_dict["taken"].tolist()), []
        self._finished, self._current = set(), ("", {})
        self.counts.clear()
        self.counts.update(state_dict["counts"])


def check_stored_groups(
    files: RolloutFiles, *, rewards: Sequence[str], num_generations: int, prompts_per_step: int, steps: int | None
) -> None:
    """Check that stored groups fit a run, from the indices of their files.

    Args:
        files: the stored rollouts.
        rewards: names of the run's reward functions, which rows of known functions must have.
        num_generations: members of a group.
        prompts_per_step: groups of a step.
        steps: steps of the run. None for a run that may need more or fewer groups.

    Raises:
        ValueError: if the rows have other rewards, a group has another size, or there are too few groups.
    """
    found, where = files.files(), f"folder={files.folder}"
    for file in found:
        stored = file.notes.get("rewards", list(rewards))
        if stored != list(rewards):
            raise ValueError(
                f"{where} has rewards of {stored}, but the run has {list(rewards)}; set reward.functions to these, or "
                "write the rows with the new rewards: torchrl-rloo rescore FOLDER --rewards ... --output NEW"
            )
    sizes = {group.group_id: group.rows for file in found for group in file.groups}
    if other := [(group, rows) for group, rows in sizes.items() if rows != num_generations]:
        raise ValueError(
            f"{where}: group {other[0][0]} has {other[0][1]} rows, but plan.num_generations={num_generations}; set it "
            "to the size of the stored groups"
        )
    if steps is not None and len(sizes) < (needed := steps * prompts_per_step):
        raise ValueError(
            f"{where} has {len(sizes)} groups, but plan.steps={steps} with plan.prompts_per_step={prompts_per_step} "
            f"takes {needed}; set plan.steps={len(sizes) // prompts_per_step}"
        )


def add_missing_kl(rows: TensorDictBase, ref: Scorer, kl_to_ref_coeff: SupportsFloat, **arguments: Any) -> None:
    """Add the KL to stored rows that lack it, as rows of several ranks do, which score after they collect.

    Args:
        rows: ``[B]`` rows, written in place.
        ref: see :func:`~torchrl_rloo.envs.transforms.add_reference_kl`.
        kl_to_ref_coeff: see there.
        **arguments: its other arguments.
    """
    missing = [row for row in rows.unbind(0) if keys.REF_LOG_PROBS not in row.keys(True)]
    if missing:
        add_reference_kl(stack_rows(missing), ref, kl_to_ref_coeff, **arguments)

"""GroupLedger: the one record of groups, from their draw to the step that trained on them."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from tensordict import TensorDictBase

from torchrl_rloo.engines.occupancy import Occupancy
from torchrl_rloo.envs.transforms.data import DataLoadingPrimer
from torchrl_rloo.runtime.files import append, make_folder

_LOGGER = logging.getLogger(__name__)


class GroupState(str, Enum):
    """State of a group in the ledger. An acknowledged group leaves the ledger.

    - ``drawn``: its prompt was chosen, and no conversation runs.
    - ``leased``: its conversations run, under its current attempt.
    - ``complete``: its rows wait for delivery.
    - ``delivered``: its rows are part of a batch, which was not acknowledged yet.
    - ``acknowledged``: a training step took its rows. It is never drawn again in this run.
    """

    DRAWN = "drawn"
    LEASED = "leased"
    COMPLETE = "complete"
    DELIVERED = "delivered"
    ACKNOWLEDGED = "acknowledged"


# States from which a group may enter each state; None is a group that the ledger does not have
_ALLOWED: dict[str, frozenset[str | None]] = {
    "drawn": frozenset({None, "leased", "complete"}),
    "leased": frozenset({"drawn"}),
    "complete": frozenset({"leased", "delivered"}),
    "delivered": frozenset({"complete"}),
    "acknowledged": frozenset({"delivered"}),
    "dropped": frozenset({"drawn", "leased", "complete"}),
}


class Lease(NamedTuple):
    """Permission to run one attempt of a group.

    Attributes:
        group_id: id of the group.
        attempt: number of the attempt, from 0. A result of an earlier attempt is dropped.
        rows: ``[G]`` drawn rows.
    """

    group_id: int
    attempt: int
    rows: TensorDictBase


@dataclass(eq=False)
class Group:
    """Record of one group that is not acknowledged.

    Attributes:
        group_id: id of the draw.
        prompt_id: index of the prompt in the dataset.
        attempt: number of the current attempt, from 0.
        state: state of the group.
        version: policy version at which its first conversation began; None before.
        rows: ``G`` finished rows of a complete group.
        oldest: oldest version that sampled a token of ``rows``; None if nothing needs it, or no token was sampled.
        taken: True once :meth:`GroupLedger.settle` confirmed that a caller has the delivered rows.
    """

    group_id: int
    prompt_id: int
    attempt: int = 0
    state: GroupState = GroupState.DRAWN
    version: int | None = None
    rows: list[TensorDictBase] | None = None
    oldest: int | None = None
    taken: bool = False


class GroupLedger:
    """Record of all groups that are drawn and not acknowledged, in the order of their draws.

    A result counts once per ``(group_id, attempt)``: those of earlier attempts are dropped and counted. The state of a
    ledger, with that of its primer, is a checkpoint: groups that were not acknowledged are drawn again under their ids.

    A ledger is not thread-safe. :class:`LLMCollector` calls it from its event loop only, so an interrupt of the main
    thread never finds it between two states.

    No change of state fails because of the audit. Lines that cannot be written wait, in their order, for the next
    change or :meth:`flush`, which raises the error.

    Args:
        primer: source of the draws.
        audit: file that every change of state is appended to, as one JSON object per line; None writes none.

    Attributes:
        groups: records by ``group_id``.
        counts: ``"ledger/drawn"``, ``"ledger/acknowledged"``, ``"ledger/requeued"`` groups and ``"ledger/late"``
            results of earlier attempts.
        finished: number of complete groups that wait for their delivery, and its integrals.

    Example:
        >>> from torchrl_rloo.data import load_prompts
        >>> ledger = GroupLedger(DataLoadingPrimer(load_prompts([{"prompt": "1+1?"}, {"prompt": "2+2?"}])))
        >>> lease, = ledger.lease(1)
        >>> ledger.complete(lease.group_id, lease.attempt, list(lease.rows.unbind(0)))
        True
        >>> rows = ledger.deliver([lease.group_id])
        >>> ledger.settle([lease.group_id]), ledger.acknowledge()
        (1, 1)
    """

    def __init__(self, primer: DataLoadingPrimer, *, audit: str | PathLike | None = None):
        self.primer = primer
        self.groups: dict[int, Group] = {}
        self.counts: Counter[str] = Counter()
        self._attempts: dict[int, int] = {}  # next attempt of groups that a checkpoint put back
        self._sizes: Counter[GroupState] = Counter()  # number of groups by state
        self.finished = Occupancy()
        self._changed: set[int] | None = None  # since the last take_changed; None before the first
        self._audit = None if audit is None else Path(audit)
        self._unwritten: deque[bytes] = deque()  # lines of the audit
        if self._audit is not None:
            make_folder(self._audit.parent)
            self._write_position("started")
            self.flush()

    def lease(self, count: int) -> list[Lease]:
        """Give out groups to run: those re-queued first, then new draws.

        Args:
            count: number of groups.

        Returns:
            The leases. A new draw raises before any group is leased.

        Raises:
            DatasetExhaustedError: if fewer draws are left.
        """
        waiting = self.of(GroupState.DRAWN)[:count] if self.count(GroupState.DRAWN) else []
        if (new := count - len(waiting)) > 0:
            with self.primer.requeue_on_error():
                drawn = self.primer.draw_ids(new)
            for prompt_id, group_id in drawn:
                group = Group(group_id, prompt_id, self._attempts.pop(group_id, 0))
                self.groups[group_id] = group
                self._sizes[GroupState.DRAWN] += 1
                self.counts["ledger/drawn"] += 1
                self._write_state(group, "drawn")
                waiting.append(group)
        # Make all rows before the first lease, since a dataset may fail
        leases = [Lease(g.group_id, g.attempt, self.primer.make_group(g.prompt_id, g.group_id)) for g in waiting]
        for group in waiting:
            self._move(group, GroupState.LEASED)
        return leases

    def begin(self, group_id: int, attempt: int, version: int) -> None:
        """Note the policy version at which a conversation of a leased group begins."""
        group = self.groups.get(group_id)
        if group is not None and group.attempt == attempt:
            group.version = version if group.version is None else min(group.version, version)
            self._note_change(group_id)

    def complete(self, group_id: int, attempt: int, rows: list[TensorDictBase], oldest: int | None = None) -> bool:
        """Record the rows of a leased group, and the oldest version that sampled a token of them.

        Returns:
            False if the result is late: the group was re-queued, cancelled or completed before.
        """
        group = self.groups.get(group_id)
        if group is None or group.attempt != attempt or group.state != GroupState.LEASED:
            self.counts["ledger/late"] += 1
            return False
        group.rows, group.oldest = rows, oldest
        self._move(group, GroupState.COMPLETE)
        return True

    def requeue(self, group_ids: Iterable[int]) -> None:
        """Return leased or complete groups to the drawn ones, under their next attempt."""
        for group_id in group_ids:
            group = self.groups[group_id]
            self._check_move(group, "drawn")
            group.attempt, group.version, group.rows, group.oldest = group.attempt + 1, None, None, None
            self.counts["ledger/requeued"] += 1
            self._move(group, GroupState.DRAWN)

    def drop(self, group_ids: Iterable[int]) -> None:
        """Remove groups for good, as after a cancellation by the user."""
        for group_id in group_ids:
            self._move(self.groups[group_id], "dropped")
            self._remove(group_id)

    def deliver(self, group_ids: Iterable[int]) -> list[TensorDictBase]:
        """Move complete groups into a batch and return their rows."""
        rows = []
        for group_id in group_ids:
            group = self.groups[group_id]
            self._move(group, GroupState.DELIVERED)
            rows += group.rows
        return rows

    def settle(self, taken: Iterable[int], *, reclaim: bool = True) -> int:
        """Confirm delivered groups whose rows the caller has.

        Args:
            taken: groups to confirm.
            reclaim: whether the other delivered groups become complete again. False while a batch is being delivered.

        Returns:
            Number of groups that were not confirmed before.
        """
        taken, confirmed = set(taken), 0
        for group in self.of(GroupState.DELIVERED):
            if group.taken:
                continue
            if group.group_id in taken:
                group.taken, group.rows, confirmed = True, None, confirmed + 1
            elif reclaim:
                self._move(group, GroupState.COMPLETE)
        return confirmed

    def unsettle(self, group_ids: Iterable[int]) -> None:
        """Take back that the caller has the rows of delivered groups, since they are lost."""
        for group_id in group_ids:
            self.groups[group_id].taken = False

    def acknowledge(self, group_ids: Iterable[int] | None = None) -> int:
        """Remove delivered groups that were trained on, and return their number.

        Args:
            group_ids: groups to acknowledge; None takes all that :meth:`settle` confirmed.

        Raises:
            KeyError: if a group is not delivered.
        """
        if group_ids is None:
            group_ids = [group.group_id for group in self.of(GroupState.DELIVERED) if group.taken]
        group_ids = list(dict.fromkeys(group_ids))
        for group_id in group_ids:
            if group_id not in self.groups or not self.groups[group_id].taken:
                raise KeyError(f"group_id={group_id} is not delivered, so it cannot be acknowledged")
        for group_id in group_ids:
            self._move(self.groups[group_id], GroupState.ACKNOWLEDGED)
            self._remove(group_id)
            self.counts["ledger/acknowledged"] += 1
        return len(group_ids)

    def of(self, *states: GroupState) -> list[Group]:
        """Return the groups in any of the states, oldest draw first."""
        return [group for group in self.groups.values() if group.state in states]

    def count(self, *states: GroupState) -> int:
        """Return the number of groups in any of the states, without a pass over all groups."""
        return sum(self._sizes[state] for state in states)

    def state_dict(self, save_env: Callable[[], Any]) -> dict[str, Any]:
        """Return the counters, the attempts, and the environment's state with all open groups re-queued.

        Args:
            save_env: function that returns the state of the environment, which contains the primer.

        Raises:
            OSError: if the audit cannot be written. It would lack groups that the state counts as acknowledged.
        """
        self.flush()
        draws = [(group.prompt_id, group.group_id) for group in self.groups.values()]
        attempts = {group.group_id: group.attempt + 1 for group in self.groups.values()} | self._attempts
        with self.primer.with_requeued(draws):
            return {"env": save_env(), "attempts": attempts, "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any], load_env: Callable[[Any], None]) -> None:
        """Restore :meth:`state_dict`; all current groups are forgotten."""
        load_env(state["env"])
        if self._changed is not None:
            self._changed.update(self.groups)
        self.groups.clear()
        self._sizes.clear()
        self.finished.set(0)
        self.counts.clear()
        self.counts.update(state["counts"])
        self._attempts = dict(state["attempts"])
        self._write_position("restored")

    def flush(self) -> None:
        """Write the lines of the audit that could not be written before.

        Raises:
            OSError: if they still cannot be written.
        """
        while self._unwritten:
            append(self._audit, self._unwritten[0])
            self._unwritten.popleft()

    def close(self) -> None:
        """Write the last lines of the audit, or log that they are lost."""
        try:
            self.flush()
        except OSError as error:
            _LOGGER.error("the last %d lines of the audit are lost: %s", len(self._unwritten), error)

    def _write_position(self, name: str) -> None:
        numbers = {"first_group": self.primer.first_group_id, "next_group": self.primer.next_group_id}
        self._write({"state": name, **numbers, "requeued": sorted(self._attempts)})

    def _check_move(self, group: Group, name: str) -> None:
        if group.state.value not in _ALLOWED[name]:
            raise ValueError(
                f"group_id={group.group_id} is {group.state.value}, so it cannot become {name}; it must be one of "
                f"{sorted(_ALLOWED[name] - {None})}"
            )

    def _move(self, group: Group, state: GroupState | str) -> None:
        name = state.value if isinstance(state, GroupState) else state
        self._check_move(group, name)
        if isinstance(state, GroupState):
            self._sizes[group.state] -= 1
            self._sizes[state] += 1
            group.state = state
            self.finished.set(self._sizes[GroupState.COMPLETE])
            self._note_change(group.group_id)
        self._write_state(group, name)

    def _remove(self, group_id: int) -> None:
        self._sizes[self.groups.pop(group_id).state] -= 1
        self.finished.set(self._sizes[GroupState.COMPLETE])
        self._note_change(group_id)

    def take_changed(self) -> set[int]:
        """Return the ids of groups whose state or version changed since the last call; all groups at the first."""
        changed, self._changed = set(self.groups) if self._changed is None else self._changed, set()
        return changed

    def _note_change(self, group_id: int) -> None:
        if self._changed is not None:
            self._changed.add(group_id)

    def _write_state(self, group: Group, name: str) -> None:
        self._write({"state": name, "group": group.group_id, "attempt": group.attempt, "version": group.version})

    def _write(self, record: dict[str, Any]) -> None:
        if self._audit is not None:
            self._unwritten.append((json.dumps({"time": time.time()} | record) + "\n").encode())
            with suppress(OSError):  # callers are between two states; flush() raises it
                self.flush()


class Audit(NamedTuple):
    """Result of :func:`check_audit`.

    Attributes:
        acknowledged: groups acknowledged in the final timeline.
        open: groups drawn and neither acknowledged nor dropped at the end, including those that wait after a restore.
        attempts: leases in total, over all processes.
        restores: number of times that a checkpoint was restored.
    """

    acknowledged: set[int]
    open: set[int]
    attempts: int
    restores: int


def check_audit(path: str | PathLike) -> Audit:
    """Replay an audit file, and check that no group was lost or counted twice.

    A restore returns to the groups acknowledged at its checkpoint, since the steps after it run again. A gap in the ids
    of draws is a lost group. An incomplete line, which a killed process or a full disk left, does not count.

    Args:
        path: file that :class:`GroupLedger` wrote, over any number of processes.

    Returns:
        The groups at the end of the file.

    Raises:
        ValueError: with the line number, if a change of state is not allowed or a result is late. Also if a group was
            acknowledged twice, or if a draw or a restored checkpoint lost one.
    """
    states: dict[int, str] = {}
    attempts: dict[int, int] = {}
    waiting: set[int] = set()  # groups of the restored checkpoint that were not drawn again
    acknowledged: set[int] = set()
    ever: set[int] = set()
    last: int | None = None  # newest draw
    leases = restores = 0
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.endswith("}"):
            continue
        record = json.loads(line)
        state = record["state"]
        # A start or a restore forgets what came after its checkpoint, but must account for every group before
        if state in ("started", "restored"):
            known, waiting = set(range(record["first_group"], record["next_group"])), set(record["requeued"])
            if lost := known - waiting - ever:
                raise ValueError(f"line {number}: the checkpoint lost groups {sorted(lost)[:5]}")
            restores += state == "restored"
            acknowledged, states, last = known - waiting, {}, record["next_group"] - 1
            continue
        # Check the change, then the draw and the attempt that it belongs to
        group, attempt = record["group"], record["attempt"]
        before = states.get(group)
        if group in acknowledged:
            raise ValueError(f"line {number}: group {group} is {state} again after it was acknowledged")
        if before not in _ALLOWED[state]:
            raise ValueError(f"line {number}: group {group} is {state} after {before}")
        if state == "drawn":
            if before is None and group not in waiting:
                if last is not None and group != last + 1:
                    raise ValueError(f"line {number}: group {group} is drawn after group {last}")
                last = group
            elif before is not None and attempt <= attempts[group]:
                raise ValueError(f"line {number}: group {group} is drawn again under attempt {attempt}")
            waiting.discard(group)
            attempts[group] = attempt
        elif attempt != attempts[group]:
            raise ValueError(f"line {number}: attempt {attempt} of group {group} is {state}, but was not drawn")
        leases += state == "leased"
        states[group] = state
        if state in ("acknowledged", "dropped"):
            del states[group]
            acknowledged.add(group)
            ever.add(group)
    return Audit(acknowledged, set(states) | waiting, leases, restores)

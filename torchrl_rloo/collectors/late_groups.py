"""LateGroups: groups with enough ended members, whose last ones may be cut."""

from __future__ import annotations

from heapq import heappop, heappush

from torchrl_rloo.collectors.conversation import GroupRunner
from torchrl_rloo.collectors.ledger import GroupLedger, GroupState


class LateGroups:
    """Running groups with enough ended members, oldest first. Each call costs the logarithm of their number.

    Args:
        ledger: record of the groups.
        runner: runner of their conversations.
    """

    def __init__(self, ledger: GroupLedger, runner: GroupRunner):
        self.ledger, self.runner = ledger, runner
        self._waiting: list[tuple[int, int]] = []  # heap of (group_id, attempt), with some that have ended
        self._known: set[tuple[int, int]] = set()
        self._cut: set[tuple[int, int]] = set()

    def add(self, group_id: int) -> None:
        """Note that enough members of a running group have ended."""
        group = self.ledger.groups.get(group_id)
        if group is None or group.state != GroupState.LEASED or (key := (group_id, group.attempt)) in self._known:
            return
        self._known.add(key)
        heappush(self._waiting, key)

    def remove(self, group_id: int, attempt: int) -> None:
        """Forget an attempt of a group, which has ended."""
        self._known.discard((group_id, attempt))
        self._cut.discard((group_id, attempt))

    def cut(self, number: int) -> None:
        """Cut the stragglers of the oldest groups, so that at most ``number`` groups have been cut and still run."""
        while len(self._cut) < number and self._waiting:
            key = heappop(self._waiting)
            group = self.ledger.groups.get(key[0])
            if key in self._known and group is not None and (group.state, group.attempt) == (GroupState.LEASED, key[1]):
                self._cut.add(key)
                self.runner.cut_stragglers(key[0])

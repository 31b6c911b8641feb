"""Ids of conversations that are unique over processes."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict

_MAX_GROUPS = 4096  # groups whose members are counted; their conversations begin at about the same time


def trajectory_id(group_id: int, member: int) -> int:
    """Return the id of a group's member: a hash of both numbers, from 0 to ``2**63 - 1``.

    Example:
        >>> trajectory_id(0, 0) == trajectory_id(0, 0) != trajectory_id(0, 1)
        True
    """
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

"""Routers, which choose the member of an EnginePool for each request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter

from torchrl_rloo.engines.base import Request
from torchrl_rloo.engines.member import Member

_outstanding = attrgetter("outstanding")


class Router(ABC):
    """Base of routers. A pool calls its router with a lock held, so :meth:`choose` must be fast."""

    @abstractmethod
    def choose(self, request: Request, ready: Sequence[Member], members: Sequence[Member]) -> Member:
        """Return one of the ready members.

        Args:
            request: request to sample.
            ready: members that can take it, at least one, in the order of their numbers.
            members: all members of the pool.
        """


class LeastLoaded(Router):
    """Router to the member with the fewest outstanding tokens: prompt and limit of every request inside."""

    def choose(self, request: Request, ready: Sequence[Member], members: Sequence[Member]) -> Member:
        return min(ready, key=_outstanding)


class Sticky(Router):
    """Router that keeps a conversation on one member, whose prefix cache has its earlier turns.

    The home of a conversation is the member with the largest hash of ``request.session`` and number. Only speed
    depends on it. A request goes to the least loaded member instead if its home is not ready, is behind another ready
    member in version, or is overloaded. So does a request without a session.

    Args:
        overload: multiple of the ready members' mean of outstanding tokens, above which a home is overloaded. This
            request counts in both.

    Raises:
        ValueError: if ``overload`` is below 1.
    """

    def __init__(self, overload: float = 1.5):
        if overload < 1:
            raise ValueError(f"overload={overload} must be at least 1")
        self.overload = overload

    def choose(self, request: Request, ready: Sequence[Member], members: Sequence[Member]) -> Member:
        if request.session:
            home = members[_home(request.session, len(members))]
            if home in ready and home.version >= max(member.version for member in ready):
                mean = sum(map(_outstanding, ready)) / len(ready)
                cost = len(request.prompt) + request.limit
                if home.outstanding + cost <= self.overload * (mean + cost):
                    return home
        return min(ready, key=_outstanding)


@lru_cache(maxsize=1 << 16)
def _home(session: tuple[int, ...], n: int) -> int:
    """Return the number of a session's home among ``n`` members, by rendezvous hashing."""
    return max(range(n), key=lambda number: hash((session, number)))

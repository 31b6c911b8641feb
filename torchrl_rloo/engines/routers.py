"""Routers, which choose the member of an EnginePool for each request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter

from torchrl_rloo.engines.base import Request
from torchrl_rloo.engines.member import Member

_outstanding, _number = attrgetter("outstanding"), attrgetter("number")


class Router(ABC):
    """Base of routers. A pool calls its router with a lock held, so :meth:`choose` must be fast."""

    @abstractmethod
    def choose(self, request: Request, ready: Sequence[Member], members: Sequence[Member]) -> Member:
        """Return one of the ``ready`` members; both lists have the order of their numbers."""


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
            number = _home(request.session, tuple(map(_number, members)))
            home = next(member for member in members if member.number == number)
            if home in ready and home.version >= max(member.version for member in ready):
                if not _is_overloaded(home, request, ready, self.overload):
                    return home
        return min(ready, key=_outstanding)


class NearestFirst(Router):
    """Router that prefers members with ``is_near``: on the caller's machine, whose memory requests and answers stay in.

    Args:
        inner: router that chooses among the near members, and among all if its choice is overloaded.
        overload: multiple of the ready members' mean of outstanding tokens, above which a near member is overloaded.
            This request counts in both.

    Raises:
        ValueError: if ``overload`` is below 1.
    """

    def __init__(self, inner: Router | None = None, overload: float = 1.5):
        if overload < 1:
            raise ValueError(f"overload={overload} must be at least 1")
        self.inner, self.overload = inner or LeastLoaded(), overload

    def choose(self, request: Request, ready: Sequence[Member], members: Sequence[Member]) -> Member:
        near = [member for member in ready if member.target.is_near]
        if near:
            chosen = self.inner.choose(request, near, members)
            if len(near) == len(ready) or not _is_overloaded(chosen, request, ready, self.overload):
                return chosen
        return self.inner.choose(request, ready, members)


def _is_overloaded(member: Member, request: Request, ready: Sequence[Member], overload: float) -> bool:
    """Return whether a member would have more than ``overload`` times the mean of outstanding tokens."""
    mean = sum(map(_outstanding, ready)) / len(ready)
    cost = len(request.prompt) + request.limit
    return member.outstanding + cost > overload * (mean + cost)


@lru_cache(maxsize=1 << 16)
def _home(session: tuple[int, ...], numbers: tuple[int, ...]) -> int:
    """Return the number of a session's home among members, by rendezvous hashing."""
    return max(numbers, key=lambda number: hash((session, number)))

"""States and weights of the members of an EnginePool."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from threading import RLock
from typing import NamedTuple

from torchrl_rloo.engines.base import AsyncEngine, Engine, EngineDeadError, EngineError
from torchrl_rloo.engines.member import Member, MemberState, Ticket
from torchrl_rloo.engines.supervisor import Supervisor
from torchrl_rloo.weight_update.target import TargetGroup, WeightTarget

_LOGGER = logging.getLogger(__name__)
_MAX_EVENTS = 1000


class PoolEvent(NamedTuple):
    """Change of a member's state.

    Attributes:
        time: seconds since the epoch.
        member: number of the member.
        from_state: state before.
        to_state: state after.
        cause: reason, as text; empty if there is none.
    """

    time: float
    member: int
    from_state: MemberState
    to_state: MemberState
    cause: str


class PoolMembers(AsyncEngine, TargetGroup):
    """Base of EnginePool that keeps the states of its members.

    Args:
        engines: engines of one model.
        supervisor: watcher of the members.

    Raises:
        ValueError: if there are no engines, or one appears twice.
    """

    def __init__(self, engines: Sequence[Engine], supervisor: Supervisor):
        if not engines:
            raise ValueError("engines=[] must have at least one engine")
        if len({id(engine) for engine in engines}) < len(engines):
            raise ValueError("an engine appears twice in engines; pass each one once")
        self.members = tuple(Member(engine, number) for number, engine in enumerate(engines))
        self._next_number = len(self.members)
        self._has_followers = False  # whether the pool was pickled
        super().__init__(max(member.engine.request_timeout for member in self.members))
        self.supervisor = supervisor
        self.counts: Counter[str] = Counter()
        self.events: deque[PoolEvent] = deque(maxlen=_MAX_EVENTS)
        self._lock = RLock()  # reentrant, since the garbage collector may end futures while it is held
        self._ready: tuple[Member, ...] = self.members
        self._fill_function: Callable[[WeightTarget], None] | None = None

    @abstractmethod
    def _move(self, member: Member, tickets: Sequence[Ticket], error: BaseException) -> None:
        """Send requests of a lost member elsewhere."""

    @abstractmethod
    def _route_waiting(self) -> None:
        """Send waiting requests to ready members."""

    @abstractmethod
    def _fail_waiting(self, error: EngineError) -> None:
        """Fail all waiting requests."""

    def attach(self, fill: Callable[[WeightTarget], None]) -> None:
        with self._lock:
            if self._fill_function is not None:
                raise ValueError("a publisher is attached to this EnginePool; a pool has one")
            self._fill_function = fill
            for member in self.members:
                member.filled = False
                if member.state == "ready":
                    self._set_state(member, "empty")

    def targets(self) -> list[WeightTarget]:
        with self._lock:
            return [member.target for member in self.members if member.state in ("empty", "ready")]

    def mark_filled(self, engine: WeightTarget, version: int) -> None:
        """Let an engine sample, unless it died or was restarted since it got the weights of ``version``."""
        member = self._member_of(engine)
        with self._lock:
            if member.state not in ("empty", "ready", "suspect") or self._noticed_restart(member):
                return
            if engine.version != version:
                return
            member.filled, member.needs_fill, member.misses = True, False, 0
            if member.state != "ready":
                self._set_state(member, "ready")
        self._route_waiting()

    def _noticed_restart(self, member: Member) -> bool:
        """Return whether a caller restarted an engine, which lost its weights. Call it with the lock."""
        if member.target.start_count == member.start_count:
            return False
        member.start_count = member.target.start_count
        if self._fill_function is not None:
            member.filled, member.needs_fill = False, True
            self._set_state(member, "empty", EngineError("a caller restarted the engine"))
            self.supervisor.wake()
        return True

    def mark_failed(self, engine: WeightTarget, error: Exception) -> None:
        member = self._member_of(engine)
        with self._lock:
            if member.state not in ("empty", "ready", "suspect"):
                return
            member.filled, member.needs_fill, member.probe_at = False, True, 0.0
            self.counts["pool/suspected"] += 1
            self._set_state(member, "suspect", error)
        _LOGGER.warning("%s missed weights: %s", member.name, error)
        self.supervisor.wake()

    def _living(self) -> list[Member]:
        with self._lock:
            return [member for member in self.members if member.state in ("ready", "empty", "suspect", "draining")]

    def _numbered(self, number: int) -> Member | None:
        return next((member for member in self.members if member.number == number), None)

    def _member_of(self, engine: WeightTarget) -> Member:
        for member in self.members:
            if engine is member.target or engine is member.engine:
                return member
        raise ValueError(f"this {type(engine).__name__} is no engine of the pool")

    def _wants_fill(self, member: Member) -> bool:
        return member.state == "empty" and member.needs_fill and not self.asleep

    def _fill(self, engine: WeightTarget) -> None:
        self._fill_function(engine)

    def _set_state(self, member: Member, state: MemberState, cause: BaseException | None = None) -> None:
        """Change a member's state. Call it with the lock."""
        text = f"{type(cause).__name__}: {cause}" if cause is not None else ""
        self.events.append(PoolEvent(time.time(), member.number, member.state, state, text))
        member.state = state
        member.changes += 1
        if state == "ready":
            member.cause = None
        elif cause is not None:
            member.cause = cause
        self._ready = tuple(member for member in self.members if member.state == "ready")

    def _suspect(self, member: Member, error: BaseException) -> None:
        with self._lock:
            if member.state not in ("ready", "empty"):
                return
            self.counts["pool/suspected"] += 1
            self._set_state(member, "suspect", error)
        _LOGGER.warning("%s is suspect: %s", member.name, error)

    def _confirm(self, member: Member) -> None:
        """End the suspicion of a member that answered."""
        with self._lock:
            if member.state != "suspect":
                return
            self._set_state(member, "ready" if member.filled else "empty")
        self._route_waiting()

    def _lose(self, member: Member, error: BaseException, state: MemberState = "dead") -> None:
        """Note the death of a member, and send its requests elsewhere."""
        with self._lock:
            if member.state == "draining":
                state = "closed"  # it would not be restarted
            if member.state in (state, "closed"):
                return
            self.counts["pool/deaths"] += state == "dead" and member.state != "starting"
            self._set_state(member, state, error)
            tickets = list(member.inside)
        if not self.closed:
            _LOGGER.warning("%s is %s, with %d requests inside: %s", member.name, state, len(tickets), error)
        self._move(member, tickets, error)
        self.supervisor.wake()

    def _abandon(self, member: Member, reason: str) -> None:
        """Leave a member dead for good."""
        with self._lock:
            member.exhausted = True
            self.counts["pool/abandoned"] += 1
            error = EngineDeadError(f"{reason}; the last failure was {type(member.cause).__name__}: {member.cause}")
            if member.state != "dead":
                self._set_state(member, "dead", error)
            member.cause = error
            hopeless = self._no_member()
        _LOGGER.error("%s stays dead: %s", member.name, error)
        if hopeless is not None:
            self._fail_waiting(hopeless)

    def _begin_restart(self, member: Member) -> bool:
        with self._lock:
            if self.closed or member.state != "dead":
                return False
            self._set_state(member, "starting")
            self.counts["pool/restarts"] += 1
        return True

    def _begin_service(self, member: Member) -> None:
        """Bring a started engine into the pool's pause and sleep, and let it wait for weights."""
        if self.paused:
            member.engine.pause("abort")
        if self.asleep:
            member.engine.sleep()
        if self.closed:
            member.engine.close()
        with self._lock:
            if member.state != "starting":
                return
            member.start_count = member.target.start_count
            member.filled = self._fill_function is None
            member.needs_fill = not member.filled
            self._set_state(member, "ready" if member.filled else "empty")
        self._route_waiting()

    def _no_member(self) -> EngineError | None:
        """Return the error of requests that no member will ever take; None if they may wait."""
        if self.closed:
            return self._refusal(ready=False)
        if all(member.exhausted or member.state == "closed" for member in self.members):
            return EngineDeadError(f"all members of this {type(self).__name__} are dead for good: {self._states()}")
        return None

    def _states(self) -> str:
        def text(member: Member) -> str:
            cause = f" ({type(member.cause).__name__}: {member.cause})" if member.cause is not None else ""
            return f"{member.name} is {member.state}{cause}"

        return "; ".join(text(member) for member in self.members if member.state != "ready")

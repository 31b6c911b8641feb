"""EnginePool: several engines that act as one, and outlive the death of each."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from math import ceil, inf
from threading import RLock
from time import monotonic
from typing import Any, get_args

from torchrl_rloo.engines.base import (
    AsyncEngine,
    Engine,
    EngineDeadError,
    EngineError,
    EngineLoad,
    EngineTimeoutError,
    InFlight,
    Request,
    Sample,
    WeightStep,
    check_in_flight,
    is_dead,
)
from torchrl_rloo.engines.member import Member, MemberReport, MemberState, MemberStatus, PoolEvent, Ticket, call_each
from torchrl_rloo.engines.occupancy import Reading
from torchrl_rloo.engines.routers import LeastLoaded, Router
from torchrl_rloo.engines.supervisor import Supervisor
from torchrl_rloo.weight_update.protocol import TargetGroup, WeightTarget

_LOGGER = logging.getLogger(__name__)
_SHARE_S = 1.0  # time for which waiting requests wait for further members after one is ready
_LOG_PERIOD_S = 30.0  # time between two messages about requests that wait for a ready member
_LIVING, _ANY = ("ready", "empty", "suspect"), get_args(MemberState)


class EnginePool(AsyncEngine, TargetGroup):
    """Engine that spreads requests over several engines and outlives the death of each.

    A router sends each request to a ready member. If the member dies, hangs or is restarted, the request goes to
    another one with the same seed. Without a ready member it waits. A supervisor restarts dead members. With an
    attached publisher, a member is ready only once it was filled with weights. :class:`Member` lists the states.

    A pool of engines in other processes can be pickled. It then follows the driver's pool, which updates, pauses,
    restarts and fills the members: it only samples, and reports members that died here.

    Args:
        engines: engines of one model. One that is no :class:`AsyncEngine` gets a thread that batches its requests.
            States of the driver's members make a pool that follows.
        router: strategy that chooses a member; None takes :class:`~torchrl_rloo.engines.routers.LeastLoaded`.
        supervisor: watcher of the members; None takes one with the defaults of its class.
        patience: seconds that a request may wait for a ready member.
        max_attempts: number of members that may get a request. After the last one the request fails, and only it.

    Attributes:
        members: current members, in the order of their numbers.
        follows: whether another process supervises the members.
        counts: numbers of events, such as ``pool/deaths``, ``pool/restarts`` and ``pool/resubmitted``.
        events: the last changes of states.

    Raises:
        ValueError: if there are no engines, one appears twice, or an argument is out of range.

    Example:
        >>> from torchrl_rloo.engines import Request, ScriptedEngine, ScriptedTurn
        >>> engines = [ScriptedEngine(lambda request, index, n=n: ScriptedTurn([n])) for n in range(2)]
        >>> with EnginePool(engines) as pool:
        ...     engines[0].kill()
        ...     pool.generate([Request([1], limit=4, seed=0)])[0].tokens
        [1]
    """

    def __init__(
        self,
        engines: Sequence[Engine] | Sequence[MemberStatus],
        *,
        router: Router | None = None,
        supervisor: Supervisor | None = None,
        patience: float = 600.0,
        max_attempts: int = 3,
    ):
        if not engines:
            raise ValueError("engines=[] must have at least one engine")
        if len({id(engine) for engine in engines}) < len(engines):
            raise ValueError("an engine appears twice in engines; pass each one once")
        if not patience > 0:
            raise ValueError(f"patience={patience} must be above 0 seconds")
        if max_attempts < 1:
            raise ValueError(f"max_attempts={max_attempts} must be at least 1")
        self.follows = isinstance(engines[0], MemberStatus)
        members = map(_start_following, engines) if self.follows else map(Member, engines, range(len(engines)))
        self.members = tuple(members)
        super().__init__(max(member.engine.request_timeout for member in self.members))
        self.vocab_size, self.stop_ids = self.members[0].target.vocab_size, self.members[0].target.stop_ids
        self.router, self.patience, self.max_attempts = router or LeastLoaded(), patience, max_attempts
        self.supervisor = supervisor or Supervisor()
        self.counts: Counter[str] = Counter()
        self.events: deque[PoolEvent] = deque(maxlen=1000)
        self.lock = RLock()  # reentrant, since the garbage collector may end futures while it is held
        self._ready = tuple(self._in_state("ready"))
        self.fill: Callable[[WeightTarget], None] | None = None
        self._next_number = len(self.members)
        # A request is at one place at a time: inside one member, or in this queue. Its future resolves once
        self._waiting: OrderedDict[Ticket, None] = OrderedDict()
        self._logged_at = self._share_until = -inf
        self._version = 0
        if self.follows:
            self.follow(engines)
        self.supervisor.watch(self)

    # The pool as one engine

    image_settings = property(lambda self: self.members[0].target.image_settings)

    @property
    def version(self) -> int:
        """Highest version of a ready member, or the last one while none is ready."""
        self._version = max((member.version for member in self._ready), default=self._version)
        return self._version

    @property
    def context_length(self) -> int | None:
        """Smallest context length that a member reports."""
        return min(filter(None, (member.target.context_length for member in self.members)), default=None)

    def load(self) -> EngineLoad:
        """Return the sums over living members, with requests that wait in the pool, and the largest ``kv_usage``."""
        loads = []
        for member in self._in_state(*_LIVING):
            with suppress(EngineDeadError):  # it died a moment ago
                loads.append(member.engine.load())
        load = EngineLoad(*(sum(values) for values in zip(*loads, strict=True)))
        kv_usage = max((one.kv_usage for one in loads), default=0.0)
        return load._replace(waiting=load.waiting + len(self._waiting), kv_usage=kv_usage)

    def metrics(self) -> dict[str, float]:
        """Return numbers of members and requests, the spread of ready members' versions, and outstanding tokens."""
        versions = [member.version for member in self._ready] or [0]
        return {
            "pool/members": len(self.members),
            "pool/ready": len(self._ready),
            "pool/version_spread": max(versions) - min(versions),
            "pool/outstanding": sum(member.outstanding for member in self.members),
            "pool/waiting": len(self._waiting),
        }

    def occupancies(self) -> dict[int, Reading]:
        """Return the occupancy of each member by its number."""
        return {member.number: member.read_occupancy() for member in self.members}

    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        """Pause all living members; if one that answers does not pause, raise its error after resuming the others."""
        check_in_flight(in_flight)
        self._check_leads("pause()")
        self.paused = True
        if refusals := self._call_living(lambda engine: engine.pause(in_flight, timeout=timeout)):
            self.resume()
            raise refusals[0]

    def resume(self) -> None:
        self._check_leads("resume()")
        self.paused = False
        self._call_living(lambda engine: engine.resume())

    def sleep(self) -> None:
        """Put all living members to sleep; if one that answers does not, raise its error after waking the others."""
        self._check_leads("sleep()")
        self.asleep = True
        if refusals := self._call_living(lambda engine: engine.sleep()):
            self.wake()
            raise refusals[0]

    def wake(self) -> None:
        self._check_leads("wake()")
        self._call_living(lambda engine: engine.wake())
        self.asleep = False
        self.supervisor.wake()

    def check_health(self, timeout: float = 10.0) -> None:
        """Raise an ``EngineDeadError`` if no member will be restarted. The supervisor calls the members."""
        self._check()
        if (error := self._lasting_error()) is not None:
            raise error

    def restart(self) -> None:
        """Restart all members, also those whose budget is spent. It returns before they are ready."""
        self._check_leads("restart()")
        for member in self._in_state(*_LIVING, "dead"):
            member.exhausted = False
            member.failures.clear()
            self.lose(member, EngineDeadError("restart() of the pool was called"))
        self.supervisor.wake()

    def close(self) -> None:
        """End the supervisor, close all members, and fail all requests. Engines of another process run on."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
        self.supervisor.stop()
        error = self._refusal(ready=False)
        self._fail_waiting(error)
        for member in self.members:
            self.lose(member, error, "closed")
        call_each(self.members, lambda engine: engine.close())

    def _check_leads(self, call: str) -> None:
        """Raise an error if the pool is closed, or if the call belongs to the pool that this one follows."""
        if self.follows:
            raise EngineError(f"{call} of a pool belongs to the driver; call it on the EnginePool there")
        self._check()

    def _in_state(self, *states: MemberState) -> list[Member]:
        return [m for m in self.members if m.state in states]

    def _call_living(self, call: Callable[[AsyncEngine], Any]) -> list[Exception]:
        """Call all living members at the same time, and return the errors of those that still live.

        Those that fail become suspect. Dead ones, also if restarted since, follow the pool later.
        """
        failures = call_each(self._in_state(*_LIVING), call)
        for member, error in failures:
            self.suspect(member, error)
        limit = self.supervisor.probe_timeout
        failures = [(member, error) for member, error in failures if not isinstance(error, EngineDeadError)]
        return [error for member, error in failures if not is_dead(member.engine, limit)]

    # Members that join and leave

    def add(self, engine: Engine) -> int:
        """Add an engine while the pool runs, and return its number. With a publisher, it samples once it was filled."""
        self._check_leads("add()")
        with self.lock:
            if any(engine in (member.target, member.engine) for member in self.members):
                raise ValueError(f"this {type(engine).__name__} is a member of the pool already; pass another engine")
            member = Member(engine, self._next_number)
            self._next_number += 1
            self.members = (*self.members, member)
            self.request_timeout = max(self.request_timeout, member.engine.request_timeout)
            self.change(member, "starting")
        try:
            self.supervisor.admit(self, member)
        except EngineError as error:
            self.lose(member, error)
        self.supervisor.wake()
        return member.number

    def remove(self, number: int, *, timeout: float = 600.0) -> None:
        """Close a member's engine. Its requests start again in other members, with the same seeds."""
        self._check_leads("remove()")
        with self.lock:
            member = {member.number: member for member in self.members}.get(number)
            if member is None or len(self.members) == 1:
                numbers = [member.number for member in self.members]
                raise ValueError(f"number={number} must be one of {numbers}, and not the last member of the pool")
            self.members = tuple(other for other in self.members if other is not member)
        self.lose(member, EngineError(f"{member.name} was removed from the pool"), "closed")
        member.drain(timeout)
        member.engine.close()

    # The driver's pool and those that follow it

    def __reduce__(self) -> tuple:
        self._check_leads("pickling")
        settings = {"router": self.router, "patience": self.patience, "max_attempts": self.max_attempts}
        return partial(EnginePool, **settings), (self.member_states(),)

    def member_states(self) -> list[MemberStatus]:
        """Return the states of the members for :meth:`follow` in other processes, which must be able to use them."""
        with self.lock:
            return [member.status() for member in self.members if member.state != "closed"]

    def note_reports(self, reports: Sequence[MemberReport]) -> None:
        """Call the members that pools of other processes suspect, see :meth:`reports`."""
        members = {member.number: member for member in self.members}
        for report in reports:
            member = members.get(report.number)
            if member is not None and report.changes == member.changes:
                self.suspect(member, EngineDeadError(f"another process reports: {report.error}"))

    def follow(self, states: Sequence[MemberStatus]) -> None:
        """Take the states of the driver's members, some of which may have joined, left, or been restarted."""
        # Add new members, and drop those that left
        with self.lock:
            before = {member.number: member for member in self.members}
            known = {status.number: before.pop(status.number, None) or _start_following(status) for status in states}
            left = list(before.values())
            self.members = tuple(known[number] for number in sorted(known))
        for member in left:
            self.lose(member, EngineError(f"{member.name} left the pool"), "closed")
            member.engine.close()
        # Bring the others into the driver's states
        for status in states:
            self._follow_member(known[status.number], status)
        self.route_waiting()
        self.fail_hopeless()

    def _follow_member(self, member: Member, status: MemberStatus) -> None:
        """Bring a member into the driver's state, unless the state is older than what is known here."""
        member.target.follow(status.handle)
        with self.lock:
            report = member.report
            if status.changes < member.seen or (report is not None and status.changes <= report.changes):
                return
            is_new = status.changes != member.seen or member.state != status.state
            member.report, member.seen = None, status.changes
            member.start_count, member.exhausted = status.start_count, status.exhausted
            if is_new and status.state != "dead":
                self.change(member, status.state)
        if is_new and status.state == "dead":
            self.lose(member, EngineDeadError(f"the driver lost {member.name}"))

    def reports(self) -> list[MemberReport]:
        """Return the members that died here and that the driver has not looked at since, for :meth:`note_reports`."""
        with self.lock:
            return [member.report for member in self.members if member.report is not None]

    # Weights

    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        """Refuse the step, since a publisher addresses the members."""
        self._check_leads("update_weights()")
        raise EngineError(f"{step!r} must go to the members of the EnginePool; pass the pool to WeightPublisher")

    def attach(self, fill: Callable[[WeightTarget], None]) -> None:
        self._check_leads("attach()")
        with self.lock:
            if self.fill is not None:
                raise ValueError("a publisher is attached to this EnginePool; a pool has one")
            self.fill = fill
            for member in self.members:
                member.filled = False
                if member.state == "ready":
                    self.change(member, "empty")

    def targets(self) -> list[WeightTarget]:
        return [member.target for member in self._in_state("empty", "ready")]

    def mark_filled(self, engine: WeightTarget, version: int) -> None:
        """Let an engine sample, unless it died or was restarted since it got the weights of ``version``."""
        member = self._member_of(engine)
        with self.lock:
            if member.state not in _LIVING or self._noticed_restart(member) or engine.version != version:
                return
            member.filled, member.needs_fill, member.misses = True, False, 0
            if member.state != "ready":
                self.change(member, "ready")
        self.route_waiting()

    def mark_failed(self, engine: WeightTarget, error: Exception) -> None:
        self.suspect(self._member_of(engine), error, lacks_weights=True)

    def _member_of(self, engine: WeightTarget) -> Member:
        for member in self.members:
            if engine is member.target or engine is member.engine:
                return member
        raise ValueError(f"this {type(engine).__name__} is no engine of the pool")

    def _noticed_restart(self, member: Member) -> bool:
        """Return whether a caller restarted an engine, which lost its weights. Call it with the lock."""
        if (starts := member.target.start_count) == member.start_count:
            return False
        member.start_count = starts
        if self.fill is not None:
            member.filled, member.needs_fill = False, True
            self.change(member, "empty", EngineError("a caller restarted the engine"))
            self.supervisor.wake()
        return True

    # States, which the supervisor changes as well

    def change(
        self, member: Member, state: MemberState, cause: BaseException | None = None, sources: Sequence[str] = _ANY
    ) -> bool:
        """Change the state of a member that is in one of ``sources``, and return whether it was."""
        with self.lock:
            if member.state not in sources:
                return False
            text = f"{type(cause).__name__}: {cause}" if cause is not None else ""
            self.events.append(PoolEvent(time.time(), member.number, member.state, state, text))
            member.state = state
            member.changes += 1
            if state == "ready" or cause is not None:
                member.cause = cause
            self._ready = tuple(self._in_state("ready"))
        return True

    def suspect(self, member: Member, error: BaseException, *, lacks_weights: bool = False) -> None:
        """Send a member no further requests until it answers a call, and until it was filled if it lacks weights."""
        with self.lock:
            if member.state not in _LIVING or (member.state == "suspect" and not lacks_weights):
                return
            if lacks_weights:
                member.filled, member.needs_fill = False, True
            self.counts["pool/suspected"] += 1
            member.probe_at = 0.0
            self.change(member, "suspect", error)
        _LOGGER.warning("%s is suspect: %s", member.name, error)
        self.supervisor.wake()

    def lose(self, member: Member, error: BaseException, state: MemberState = "dead", *, is_news: bool = False) -> None:
        """Note the death of a member, which the driver does not know of if ``is_news``. Send its requests elsewhere."""
        with self.lock:
            if member.state in (state, "closed"):
                return
            self.counts["pool/deaths"] += state == "dead" and member.state != "starting"
            self.change(member, state, error)
            if is_news and self.follows:
                member.report = MemberReport(member.number, member.seen, f"{type(error).__name__}: {error}")
            moved = [(ticket, ticket.leave()) for ticket in list(member.inside)]
        if not self.closed:
            _LOGGER.warning("%s is %s, with %d requests inside: %s", member.name, state, len(moved), error)
        for ticket, inner in moved:
            if inner is not None:
                inner.cancel()
            self._resubmit(ticket, error)
        self.supervisor.wake()

    def _lasting_error(self) -> EngineError | None:
        """Return the error of requests that no member will ever take; None if they may wait."""
        if self.closed:
            return self._refusal(ready=False)
        if all(member.exhausted or member.state == "closed" for member in self.members):
            return EngineDeadError(f"all members of this {type(self).__name__} are dead for good: {self._states()}")
        return None

    def _states(self) -> str:
        return "; ".join(member.describe() for member in self.members if member.state != "ready")

    # Requests, which follow ready members

    def submit(self, request: Request) -> Future[Sample]:
        self._check(ready=True)
        ticket = Ticket(request, self._drop)
        self._route(ticket)
        return ticket

    def _route(self, ticket: Ticket) -> None:
        """Send a request to a ready member, or let it wait for one."""
        # Choose a member
        with self.lock:
            if ticket.done():  # cancelled
                return
            member = None if self.closed else self._choose(ticket)
            if member is None:
                error = self._lasting_error()
                if error is None:
                    ticket.waiting_since = monotonic()
                    self._waiting[ticket] = None
            else:
                attempt = ticket.enter(member)
        if member is None:
            if error is not None:
                ticket.fail(error)
            elif len(self._waiting) == 1:
                self.supervisor.wake()
            return
        # Submit without the lock. The member may lose the request at any time
        try:
            inner = member.engine.submit(ticket.request)
        except Exception as error:
            inner = Future()
            inner.set_exception(error)
        with self.lock:
            is_current = ticket.attempt == attempt
            if is_current:
                ticket.inner = inner
                if inner.done() and isinstance(inner.exception(), EngineDeadError):
                    ticket.tries -= 1  # the member was dead before it got the request
        if is_current:
            inner.add_done_callback(partial(self._answer, ticket, attempt))
        else:
            inner.cancel()

    def _choose(self, ticket: Ticket) -> Member | None:
        while ready := self._ready:
            if ticket.avoid is not None and len(ready) > 1:
                ready = [member for member in ready if member is not ticket.avoid]
            member = self.router.choose(ticket.request, ready, self.members)
            if not self._noticed_restart(member):
                return member
        return None

    def _answer(self, ticket: Ticket, attempt: int, inner: Future[Sample]) -> None:
        """Take a member's answer to a request: deliver it, or send the request elsewhere."""
        with self.lock:
            if ticket.attempt != attempt:
                self.counts["pool/late_answers"] += not inner.cancelled() and inner.exception() is None
                return
            member = ticket.member
            ticket.leave()
        error = EngineError(f"{member.name} cancelled the request") if inner.cancelled() else inner.exception()
        if error is None:
            member.finished += 1
            if ticket.set_running_or_notify_cancel():
                ticket.set_result(inner.result())
        elif self._is_fault(member, error):
            self._resubmit(ticket, error)
        else:
            ticket.fail(error)

    def _is_fault(self, member: Member, error: BaseException) -> bool:
        """Return whether an error is the member's fault rather than the request's, and note it."""
        if isinstance(error, EngineDeadError):
            self.lose(member, error, is_news=True)
        elif isinstance(error, EngineTimeoutError):
            self.counts["pool/timeouts"] += 1
            member.probe_at = 0.0
            self.supervisor.wake()
        elif member.target.closed:
            self.lose(member, error, "closed")
        elif member.target.failed_version is None or member.engine.paused:  # a paused one may be within an update
            return False
        elif self.follows:  # the driver refills it
            self.lose(member, error, is_news=True)
        elif self.fill is not None:
            self.mark_failed(member.target, error)
        else:
            return False
        return True

    def _resubmit(self, ticket: Ticket, error: BaseException) -> None:
        if ticket.tries >= self.max_attempts:
            if isinstance(error, EngineDeadError):  # the request may be the cause, and the pool outlives it
                died = EngineError(f"{ticket.tries} members died or restarted with this request inside: {error}")
                died.__cause__ = error
                error = died
            ticket.fail(error)
            return
        self.counts["pool/resubmitted"] += 1
        self._route(ticket)

    def _drop(self, ticket: Ticket) -> None:
        with self.lock:
            self._waiting.pop(ticket, None)
            inner = ticket.leave()
        if inner is not None:
            inner.cancel()

    # Requests that wait for a ready member

    def route_waiting(self, share: bool = True) -> None:
        """Send waiting requests to ready members, except, with ``share``, the share of members that start."""
        with self.lock:
            if not self._ready:
                return
            coming = sum(member.state in ("starting", "empty") for member in self.members)
            n = ceil(len(self._waiting) / (1 + coming)) if share else len(self._waiting)
            tickets = [self._waiting.popitem(last=False)[0] for _ in range(n)]
            self._share_until = monotonic() + _SHARE_S
        for ticket in tickets:
            self._route(ticket)
        if self._waiting:
            self.supervisor.wake()

    def _fail_waiting(self, error: EngineError, longer_than: float = 0.0) -> None:
        """Fail the requests that have waited longer than some seconds."""
        now = monotonic()
        with self.lock:
            late = [ticket for ticket in self._waiting if now - ticket.waiting_since >= longer_than]
            for ticket in late:
                del self._waiting[ticket]
        for ticket in late:
            ticket.fail(error)

    def fail_hopeless(self) -> None:
        """Fail waiting requests if no member will ever take them."""
        if (error := self._lasting_error()) is not None:
            self._fail_waiting(error)

    def check_waiting(self, now: float) -> float:
        """Log waiting requests and fail impatient ones. Return the seconds until the next check."""
        with self.lock:
            if not self._waiting:
                return inf
            waited = now - next(iter(self._waiting)).waiting_since
            n = len(self._waiting)
        if self._ready:
            if now < self._share_until:
                return self._share_until - now
            self.route_waiting(share=False)
            return self.check_waiting(now)
        if waited >= self.patience:
            error = EngineDeadError(f"no member was ready for patience={self.patience:g} s: {self._states()}")
            self._fail_waiting(error, self.patience)
            return self.check_waiting(now)
        if now - self._logged_at >= _LOG_PERIOD_S:
            self._logged_at = now
            _LOGGER.warning("%d requests wait for a ready member, for up to %.0f s: %s", n, waited, self._states())
        return min(_LOG_PERIOD_S, self.patience - waited)


def _start_following(status: MemberStatus) -> Member:
    return Member(status.handle.connect(), status.number, "starting")

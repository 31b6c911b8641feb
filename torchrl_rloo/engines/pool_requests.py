"""Requests of an EnginePool, which follow ready members."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from math import ceil, inf
from time import monotonic

from torchrl_rloo.engines.base import (
    Engine,
    EngineDeadError,
    EngineError,
    EngineLoad,
    EngineTimeoutError,
    Request,
    Sample,
)
from torchrl_rloo.engines.member import Member, Ticket
from torchrl_rloo.engines.occupancy import Reading
from torchrl_rloo.engines.pool_members import PoolMembers
from torchrl_rloo.engines.routers import Router
from torchrl_rloo.engines.supervisor import Supervisor

_LOGGER = logging.getLogger(__name__)
_SHARE_S = 1.0  # time for which waiting requests wait for further members after one is ready
_LOG_PERIOD_S = 30.0  # time between two messages about requests that wait for a ready member


class PoolRequests(PoolMembers):
    """Base of EnginePool and FollowerPool that routes their requests.

    A request is at one place at a time: inside one member, or in the queue of the pool. Its future resolves once.

    Args:
        engines: engines of one model.
        supervisor: watcher of the members.
        router: strategy that chooses a member.
        patience: seconds that a request may wait for a ready member.
        max_attempts: number of members that may get a request.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self, engines: Sequence[Engine], supervisor: Supervisor, router: Router, patience: float, max_attempts: int
    ):
        super().__init__(engines, supervisor)
        if not patience > 0:
            raise ValueError(f"patience={patience} must be above 0 seconds")
        if max_attempts < 1:
            raise ValueError(f"max_attempts={max_attempts} must be at least 1")
        self.router, self.patience, self.max_attempts = router, patience, max_attempts
        self._waiting: OrderedDict[Ticket, None] = OrderedDict()
        self._logged_at = self._share_until = -inf
        self._highest_version = 0

    @property
    def version(self) -> int:
        """Highest version of a ready member, or the last such version while no member is ready."""
        versions = [member.version for member in self._ready]
        if versions:
            self._highest_version = max(versions)
        return self._highest_version

    @property
    def start_count(self) -> int:
        """Number of restarts of all members."""
        return sum(member.target.start_count for member in self.members)

    @property
    def context_length(self) -> int | None:
        """Smallest context length that a member reports."""
        lengths = [member.target.context_length for member in self.members]
        return min((length for length in lengths if length is not None), default=None)

    @property
    def vocab_size(self) -> int | None:
        """Number of ids according to the first member's model."""
        return self.members[0].target.vocab_size

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn according to the first member's model."""
        return self.members[0].target.stop_ids

    def load(self) -> EngineLoad:
        """Return the sums over living members, with requests that wait in the pool, and the largest ``kv_usage``."""
        loads = []
        for member in self._living():
            with suppress(EngineDeadError):  # it died a moment ago
                loads.append(member.engine.load())
        sums = [sum(values) for values in zip(*loads, strict=True)] or [0] * len(EngineLoad._fields)
        load = EngineLoad(*sums)
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

    def submit(self, request: Request) -> Future[Sample]:
        self._check(ready=True)
        ticket = Ticket(request, self._drop)
        self._route(ticket)
        return ticket

    def _route(self, ticket: Ticket) -> None:
        """Send a request to a ready member, or let it wait for one."""
        # Choose a member
        with self._lock:
            if ticket.done():  # cancelled
                return
            member = None if self.closed else self._choose(ticket)
            if member is None:
                error = self._no_member()
                if error is None:
                    ticket.waiting_since = monotonic()
                    self._waiting[ticket] = None
            else:
                ticket.attempt += 1
                ticket.tries += 1
                ticket.member, ticket.inner, attempt = member, None, ticket.attempt
                member.inside[ticket] = None
                member.outstanding += ticket.cost
                member.occupancy.add(1)
        if member is None:
            if error is not None:
                _fail(ticket, error)
            elif len(self._waiting) == 1:
                self.supervisor.wake()
            return
        # Submit without the lock. The member may lose the request at any time
        try:
            inner = member.engine.submit(ticket.request)
        except Exception as error:
            inner = Future()
            inner.set_exception(error)
        with self._lock:
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
        with self._lock:
            if ticket.attempt != attempt:
                self.counts["pool/late_answers"] += not inner.cancelled() and inner.exception() is None
                return
            member = ticket.member
            self._detach(ticket)
        error = EngineError(f"{member.name} cancelled the request") if inner.cancelled() else inner.exception()
        if error is None:
            member.finished += 1
            if ticket.set_running_or_notify_cancel():
                ticket.set_result(inner.result())
        elif self._is_fault(member, error):
            self._resubmit(ticket, error)
        else:
            _fail(ticket, error)

    def _is_fault(self, member: Member, error: BaseException) -> bool:
        """Return whether an error is the member's fault rather than the request's, and note it."""
        if isinstance(error, EngineDeadError):
            self._lose(member, error)
            return True
        if isinstance(error, EngineTimeoutError):
            self.counts["pool/timeouts"] += 1
            member.probe_at = 0.0
            self.supervisor.wake()
            return True
        if member.target.closed:
            self._lose(member, error, "closed")
            return True
        if self._has_failed_update(member) and self._fill_function is not None:
            self.mark_failed(member.target, error)
            return True
        return False

    def _has_failed_update(self, member: Member) -> bool:
        """Return whether an update has failed in a member; one that is paused may be within an update."""
        return member.target.failed_version is not None and not member.engine.paused

    def _resubmit(self, ticket: Ticket, error: BaseException) -> None:
        if ticket.tries >= self.max_attempts:
            if isinstance(error, EngineDeadError):  # the request may be the cause, and the pool outlives it
                died = EngineError(f"{ticket.tries} members died or restarted with this request inside: {error}")
                died.__cause__ = error
                error = died
            _fail(ticket, error)
            return
        self.counts["pool/resubmitted"] += 1
        self._route(ticket)

    def _move(self, member: Member, tickets: Sequence[Ticket], error: BaseException) -> None:
        with self._lock:
            moved = [(ticket, self._detach(ticket)) for ticket in tickets if ticket.member is member]
        for ticket, inner in moved:
            if inner is not None:
                inner.cancel()
            self._resubmit(ticket, error)

    def _detach(self, ticket: Ticket) -> Future[Sample] | None:
        """Take a request from its member, whose answer will be late from now on. Call it with the lock."""
        ticket.attempt += 1
        member, inner, ticket.member, ticket.inner = ticket.member, ticket.inner, None, None
        if member is not None:
            del member.inside[ticket]
            member.outstanding -= ticket.cost
            member.occupancy.add(-1)
            ticket.avoid = member
        return inner

    def _drop(self, ticket: Ticket) -> None:
        with self._lock:
            self._waiting.pop(ticket, None)
            inner = self._detach(ticket)
        if inner is not None:
            inner.cancel()

    def _route_waiting(self, share: bool = True) -> None:
        """Send waiting requests to ready members, except, with ``share``, the share of members that start."""
        with self._lock:
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
        with self._lock:
            late = [ticket for ticket in self._waiting if now - ticket.waiting_since >= longer_than]
            for ticket in late:
                del self._waiting[ticket]
        for ticket in late:
            _fail(ticket, error)

    def _end(self) -> bool:
        """End the supervisor and fail all requests; return False if the pool ended before."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
        self.supervisor.stop()
        error = self._refusal(ready=False)
        self._fail_waiting(error)
        for member in self.members:
            self._lose(member, error, "closed")
        return True

    def _check_waiting(self, now: float) -> float:
        """Log waiting requests and fail impatient ones. Return the seconds until the next check."""
        with self._lock:
            if not self._waiting:
                return inf
            waited = now - next(iter(self._waiting)).waiting_since
            n = len(self._waiting)
        if self._ready:
            if now < self._share_until:
                return self._share_until - now
            self._route_waiting(share=False)
            return self._check_waiting(now)
        if waited >= self.patience:
            error = EngineDeadError(f"no member was ready for patience={self.patience:g} s: {self._states()}")
            self._fail_waiting(error, self.patience)
            return self._check_waiting(now)
        if now - self._logged_at >= _LOG_PERIOD_S:
            self._logged_at = now
            _LOGGER.warning("%d requests wait for a ready member, for up to %.0f s: %s", n, waited, self._states())
        return min(_LOG_PERIOD_S, self.patience - waited)


def _fail(ticket: Ticket, error: BaseException) -> None:
    if ticket.set_running_or_notify_cancel():
        ticket.set_exception(error)

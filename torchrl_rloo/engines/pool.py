"""EnginePool: several engines that act as one, and outlive the death of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from time import monotonic, sleep
from typing import Any

from torchrl_rloo.engines.base import (
    AsyncEngine,
    Engine,
    EngineDeadError,
    EngineError,
    InFlight,
    SharedEngine,
    WeightStep,
    check_in_flight,
)
from torchrl_rloo.engines.member import Member
from torchrl_rloo.engines.pool_requests import PoolRequests
from torchrl_rloo.engines.routers import LeastLoaded, Router
from torchrl_rloo.engines.supervisor import Supervisor
from torchrl_rloo.runtime.lookup import import_object
from torchrl_rloo.weight_update.target import is_dead

_FOLLOW_S = 1.0  # time for other processes to learn that a member leaves
_POLL_S = 0.02  # time between two looks at a member that leaves


class EnginePool(PoolRequests):
    """Engine that spreads requests over several engines and outlives the death of each.

    Members may join and leave at any time, see :meth:`add` and :meth:`remove`. A pool of ``RayEngine`` that is pickled
    to another process becomes a pool that follows this one.

    A router sends each request to a ready member. If the member dies, hangs or is restarted, the request goes to
    another one with the same seed. Without a ready member it waits. A supervisor restarts dead members. With an
    attached publisher, a member is ready only once it was filled with weights. The members' states are those of
    :class:`~torchrl_rloo.engines.member.Member`.

    Args:
        engines: engines of one model. One that is no :class:`AsyncEngine` gets a thread that batches its requests.
        router: strategy that chooses a member; None takes :class:`~torchrl_rloo.engines.routers.LeastLoaded`.
        supervisor: watcher of the members; None takes a :class:`~torchrl_rloo.engines.supervisor.Supervisor` with its
            defaults.
        patience: seconds that a request may wait for a ready member.
        max_attempts: number of members that may get a request. After the last one the request fails, and only it.

    Attributes:
        members: current members, in the order of their numbers.
        counts: numbers of ``pool/deaths``, ``pool/suspected``, ``pool/restarts``, ``pool/failed_restarts``,
            ``pool/failed_fills``, ``pool/abandoned``, ``pool/resubmitted``, ``pool/timeouts`` and
            ``pool/late_answers``.
        events: the last changes of states, as :class:`~torchrl_rloo.engines.pool_members.PoolEvent`.

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
        engines: Sequence[Engine],
        *,
        router: Router | None = None,
        supervisor: Supervisor | None = None,
        patience: float = 600.0,
        max_attempts: int = 3,
    ):
        super().__init__(engines, supervisor or Supervisor(), router or LeastLoaded(), patience, max_attempts)
        self.supervisor.watch(self)

    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        """Refuse the step, since a publisher addresses the members."""
        raise EngineError(f"{step!r} must go to the members of the EnginePool; pass the pool to WeightPublisher")

    def __reduce__(self) -> tuple:
        self._has_followers = True
        follower = import_object("torchrl_rloo.ray.pool.FollowerPool", "a pool of shared engines")
        return follower, (self.member_states(), self.router, self.patience, self.max_attempts)

    def add(self, engine: Engine) -> int:
        """Add an engine while the pool runs. With an attached publisher, it samples once it was filled.

        Returns:
            Number of the new member.

        Raises:
            ValueError: if the engine is a member.
        """
        self._check()
        with self._lock:
            if any(engine in (member.target, member.engine) for member in self.members):
                raise ValueError(f"this {type(engine).__name__} is a member of the pool already; pass another engine")
            member = Member(engine, self._next_number)
            self._next_number += 1
            self.members = (*self.members, member)
            self.request_timeout = max(self.request_timeout, member.engine.request_timeout)
            self._set_state(member, "starting")
        try:
            self._begin_service(member)
        except EngineError as error:
            self._lose(member, error)
        self.supervisor.wake()
        return member.number

    def remove(self, number: int, *, timeout: float = 600.0) -> None:
        """Let a member finish its requests, move those that take longer, and close the engine.

        Args:
            number: number of the member.
            timeout: seconds to wait for its requests; 0 moves them at once.

        Raises:
            ValueError: if there is no such member, or it is the last one.
        """
        # Send it no further requests
        with self._lock:
            member = self._numbered(number)
            if member is None or len(self.members) == 1:
                numbers = [member.number for member in self.members]
                raise ValueError(f"number={number} must be one of {numbers}, and not the last member of the pool")
            if member.state in ("ready", "empty", "suspect"):
                self._set_state(member, "draining")
        # Wait for those inside, also from other processes, which learn of it a moment later
        deadline = monotonic() + timeout
        idle_since = monotonic()
        while member.state == "draining" and monotonic() < deadline:
            if member.inside or (self._has_followers and _is_busy(member)):
                idle_since = monotonic()
            elif not self._has_followers or monotonic() - idle_since > _FOLLOW_S:
                break
            sleep(_POLL_S)
        # Move the others, and close it
        self._lose(member, EngineError(f"{member.name} was removed from the pool"), "closed")
        with self._lock:
            self.members = tuple(other for other in self.members if other is not member)
        member.engine.close()

    def member_states(self) -> list[dict[str, Any]]:
        """Return the states of the members for ``follow`` of that pool, as plain values and Ray handles.

        Raises:
            EngineError: if a member is no ``RayEngine``.
        """
        with self._lock:
            return [_member_state(member) for member in self.members if member.state != "closed"]

    def note_reports(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Call members that the followers of this pool suspect."""
        for report in reports:
            with self._lock:
                member = self._numbered(report["number"])
                is_news = member is not None and report["changes"] == member.changes
            if is_news:
                self._suspect(member, EngineDeadError(f"another process reports: {report['error']}"))
                member.probe_at = 0.0
        self.supervisor.wake()

    @property
    def in_process(self) -> bool:
        """True if all members are in this process."""
        return all(member.target.in_process for member in self.members)

    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        """Pause all living members. Members that are dead or hang become suspect.

        Raises:
            EngineError: if a member that answers does not pause. The others are then resumed.
        """
        check_in_flight(in_flight)
        self._check()
        self.paused = True
        alive = self._refusals(self._call_living(lambda engine: engine.pause(in_flight, timeout=timeout)))
        if alive:
            self.resume()
            raise alive[0]

    def resume(self) -> None:
        """Resume all living members."""
        self._check()
        self.paused = False
        self._call_living(lambda engine: engine.resume())

    def sleep(self) -> None:
        """Put all living members to sleep.

        Raises:
            EngineError: if a member that answers does not sleep. The others are then woken.
        """
        self._check()
        self.asleep = True
        alive = self._refusals(self._call_living(lambda engine: engine.sleep()))
        if alive:
            self.wake()
            raise alive[0]

    def wake(self) -> None:
        """Wake all living members."""
        self._check()
        self._call_living(lambda engine: engine.wake())
        self.asleep = False
        self.supervisor.wake()

    def check_health(self, timeout: float = 10.0) -> None:
        """Raise an error if all members are dead for good. The supervisor calls the members.

        Raises:
            EngineDeadError: if no member will be restarted.
        """
        self._check()
        if (error := self._no_member()) is not None:
            raise error

    def restart(self) -> None:
        """Restart all members, also those whose budget is spent. It returns before they are ready."""
        self._check()
        for member in self.members:
            if member.state not in ("starting", "closed"):
                member.exhausted = False
                member.failures.clear()
                self._lose(member, EngineDeadError("restart() of the pool was called"))
        self.supervisor.wake()

    def close(self) -> None:
        """End the supervisor, close all members, and fail all requests."""
        if self._end():
            _call_each([member.engine for member in self.members], lambda engine: engine.close())

    def _refusals(self, failures: Sequence[tuple[Member, Exception]]) -> list[Exception]:
        """Return the errors of members that live. Dead ones, also if restarted since, follow the pool later."""
        limit = self.supervisor.probe_timeout
        errors = [(member, error) for member, error in failures if not isinstance(error, EngineDeadError)]
        return [error for member, error in errors if not is_dead(member.engine, limit)]

    def _call_living(self, call: Callable[[AsyncEngine], Any]) -> list[tuple[Member, Exception]]:
        """Call all living members at the same time. Those that fail become suspect, and are returned."""
        members = self._living()
        errors = _call_each([member.engine for member in members], call)
        failures = [(member, error) for member, error in zip(members, errors, strict=True) if error is not None]
        for member, error in failures:
            self._suspect(member, error)
            member.probe_at = 0.0
        if failures:
            self.supervisor.wake()
        return failures


def _member_state(member: Member) -> dict[str, Any]:
    engine = member.target
    if not isinstance(engine, SharedEngine):
        raise EngineError(f"{member.name} cannot be used from other processes; put it in a RayEngine")
    # An engine that a caller restarted waits for weights, though the pool has not noticed
    is_current = engine.start_count == member.start_count
    return {
        "number": member.number,
        "state": member.state if is_current or member.state != "ready" else "empty",
        "version": engine.version,
        "start_count": engine.start_count,
        "changes": member.changes,
        "exhausted": member.exhausted,
        "handle": engine.current_handle(),
    }


def _is_busy(member: Member) -> bool:
    """Return whether a member has requests of any process, as last reported."""
    try:
        load = member.engine.load()
    except EngineError:
        return False
    return load.running + load.waiting > 0


def _call_each(engines: Sequence[AsyncEngine], call: Callable[[AsyncEngine], Any]) -> list[Exception | None]:
    """Call all engines at the same time, and return their errors."""
    errors: list[Exception | None] = [None] * len(engines)

    def run(number: int, engine: AsyncEngine) -> None:
        try:
            call(engine)
        except Exception as error:
            errors[number] = error

    threads = [Thread(target=run, args=pair, daemon=True) for pair in enumerate(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors

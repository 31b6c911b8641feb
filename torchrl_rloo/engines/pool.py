"""EnginePool: several engines that act as one, and outlive the death of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

from torchrl_rloo.engines.base import (
    AsyncEngine,
    Engine,
    EngineDeadError,
    EngineError,
    EngineLoad,
    InFlight,
    WeightStep,
    check_in_flight,
)
from torchrl_rloo.engines.member import Member
from torchrl_rloo.engines.pool_requests import PoolRequests
from torchrl_rloo.engines.routers import LeastLoaded, Router
from torchrl_rloo.engines.supervisor import Supervisor
from torchrl_rloo.weight_update.target import is_dead


class EnginePool(PoolRequests):
    """Engine that spreads requests over several engines and outlives the death of each.

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
        members: members, in the order of ``engines``.
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
        self._highest_version = 0
        self.supervisor.watch(self)

    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        """Refuse the step, since a publisher addresses the members."""
        raise EngineError(f"{step!r} must go to the members of the EnginePool; pass the pool to WeightPublisher")

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
    def in_process(self) -> bool:
        """True if all members are in this process."""
        return all(member.target.in_process for member in self.members)

    @property
    def context_length(self) -> int | None:
        """Smallest context length that a member reports."""
        lengths = [member.target.context_length for member in self.members]
        return min((length for length in lengths if length is not None), default=None)

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
        with self._lock:
            if self.closed:
                return
            self.closed = True
        self.supervisor.stop()
        error = self._refusal(ready=False)
        self._fail_waiting(error)
        for member in self.members:
            self._lose(member, error, "closed")
        _call_each([member.engine for member in self.members], lambda engine: engine.close())

    def _living(self) -> list[Member]:
        with self._lock:
            return [member for member in self.members if member.state in ("ready", "empty", "suspect")]

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

"""FollowerPool: an EnginePool of RayEngines in another process, which samples and follows the driver's pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from torchrl_rloo.engines.base import EngineDeadError, EngineError, InFlight, WeightStep
from torchrl_rloo.engines.member import Member, MemberState
from torchrl_rloo.engines.pool_members import PoolMembers
from torchrl_rloo.engines.pool_requests import PoolRequests
from torchrl_rloo.engines.routers import Router
from torchrl_rloo.engines.supervisor import Supervisor
from torchrl_rloo.ray.engine_client import RayEngineClient
from torchrl_rloo.weight_update.target import WeightTarget


class FollowerPool(PoolRequests):
    """Pool that samples with the engines of the driver's ``EnginePool``, which restarts and fills them.

    A pickled :class:`~torchrl_rloo.engines.pool.EnginePool` becomes one. It routes and resubmits requests as the
    driver's pool does. The process that holds it exchanges messages with the driver regularly: :meth:`follow` takes the
    states of the members, and :meth:`reports` returns those that died here. A member that died here gets no request
    until the driver has looked at it.

    Its router counts the requests of this process only. With many conversations in each process, their shares of every
    engine are nearly equal. An engine that serves other processes as well may still be the busier one.

    Args:
        states: result of ``EnginePool.member_states()``.
        router: strategy that chooses a member.
        patience: seconds that a request may wait for a ready member.
        max_attempts: number of members that may get a request.

    Raises:
        EngineError: at calls that belong to the driver: updates, pauses, restarts, sleep.
    """

    def __init__(self, states: Sequence[Mapping[str, Any]], router: Router, patience: float, max_attempts: int):
        clients = [RayEngineClient(state["handle"]) for state in states]
        super().__init__(clients, _PatienceWatcher(), router, patience, max_attempts)
        self._seen: dict[int, int] = {}  # changes of the driver's member at its last state here
        self._doubted: dict[int, dict[str, Any]] = {}  # reports that the driver has not answered
        self.members = tuple(Member(c, state["number"]) for c, state in zip(clients, states, strict=True))
        self.follow(states)
        self.supervisor.watch(self)

    def __reduce__(self) -> tuple:
        raise EngineError("a FollowerPool cannot be pickled; pickle the EnginePool of the driver")

    def follow(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take the states of the driver's members. Members may have joined, left, or been restarted.

        Args:
            states: result of ``EnginePool.member_states()``.
        """
        # Add new members, and drop those that left
        with self._lock:
            known = {member.number: member for member in self.members}
            for state in states:
                if state["number"] not in known:
                    member = Member(RayEngineClient(state["handle"]), state["number"])
                    member.state = "starting"
                    known[member.number] = member
            numbers = {state["number"] for state in states}
            left = [known.pop(number) for number in list(known) if number not in numbers]
            self.members = tuple(known[number] for number in sorted(known))
        for member in left:
            self._lose(member, EngineError(f"{member.name} left the pool"), "closed")
            member.engine.close()
        # Bring the others into the driver's states
        for state in states:
            self._bring(known[state["number"]], state)
        self._route_waiting()
        if (hopeless := self._no_member()) is not None:
            self._fail_waiting(hopeless)

    def reports(self) -> list[dict[str, Any]]:
        """Return the members that died here and that the driver has not looked at since, for ``note_reports``."""
        with self._lock:
            return list(self._doubted.values())

    def _bring(self, member: Member, state: Mapping[str, Any]) -> None:
        """Bring a member into the driver's state, unless the state is older than what is known here."""
        number, changes = member.number, state["changes"]
        member.target.follow(state["handle"])
        with self._lock:
            doubt = self._doubted.get(number)
            if changes < self._seen.get(number, 0) or (doubt is not None and changes <= doubt["changes"]):
                return
            self._doubted.pop(number, None)
            is_new = self._seen.get(number) != changes or member.state != state["state"]
            self._seen[number] = changes
            member.start_count, member.exhausted = state["start_count"], state["exhausted"]
            if is_new and state["state"] != "dead":
                self._set_state(member, state["state"])
        if is_new and state["state"] == "dead":
            super()._lose(member, EngineDeadError(f"the driver lost {member.name}"))

    def _lose(self, member: Member, error: BaseException, state: MemberState = "dead") -> None:
        with self._lock:
            if state == "dead" and member.state in ("ready", "suspect", "empty"):
                self._doubted[member.number] = {
                    "number": member.number,
                    "start_count": member.start_count,
                    "changes": self._seen.get(member.number, 0),
                    "error": f"{type(error).__name__}: {error}",
                }
        super()._lose(member, error, state)

    def _is_fault(self, member: Member, error: BaseException) -> bool:
        if super()._is_fault(member, error):
            return True
        if self._has_failed_update(member):  # the driver refills it
            self._lose(member, error)
            return True
        return False

    def close(self) -> None:
        """Fail all requests of this process. The engines run on."""
        if self._end():
            for member in self.members:
                member.engine.close()

    def check_health(self, timeout: float = 10.0) -> None:
        """Raise an error if all members are dead for good.

        Raises:
            EngineDeadError: if no member will be restarted.
        """
        self._check()
        if (error := self._no_member()) is not None:
            raise error

    def attach(self, fill: Callable[[WeightTarget], None]) -> None:
        """Refuse the call, since the driver's pool has the publisher."""
        raise _not_here("attach()")

    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        """Refuse the step, since the driver updates the weights."""
        raise _not_here("update_weights()")

    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        """Refuse the call, since the driver pauses the engines."""
        raise _not_here("pause()")

    def resume(self) -> None:
        """Refuse the call, since the driver resumes the engines."""
        raise _not_here("resume()")

    def restart(self) -> None:
        """Refuse the call, since the driver restarts the engines."""
        raise _not_here("restart()")

    def sleep(self) -> None:
        """Refuse the call, since the driver puts the engines to sleep."""
        raise _not_here("sleep()")

    def wake(self) -> None:
        """Refuse the call, since the driver wakes the engines."""
        raise _not_here("wake()")


class _PatienceWatcher(Supervisor):
    """Thread that looks after waiting requests only; the driver's supervisor looks after the members."""

    def _look(self, pool: PoolMembers) -> float:
        return max(min(self.probe_every, pool._check_waiting(monotonic())), 0.0)


def _not_here(call: str) -> EngineError:
    return EngineError(f"{call} of a pool belongs to the driver; call it on the EnginePool there")

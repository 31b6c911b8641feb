"""Members of an EnginePool, the requests inside them, and what pools of several processes tell each other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from time import monotonic
from typing import Any, Literal, NamedTuple

from torchrl_rloo.engines.base import (
    AsyncEngine,
    BatchedEngine,
    Engine,
    EngineError,
    EngineHandle,
    Request,
    Sample,
    SharedEngine,
)
from torchrl_rloo.engines.occupancy import Occupancy, Reading

_FOLLOW_S = 1.0  # time for other processes to learn that a member leaves
_POLL_S = 0.02  # time between two looks at a member that leaves

MemberState = Literal["starting", "empty", "ready", "suspect", "dead", "closed"]


class PoolEvent(NamedTuple):
    """Change of a member's state: seconds since the epoch, number, states, and the reason, which may be empty."""

    time: float
    member: int
    from_state: MemberState
    to_state: MemberState
    cause: str


class MemberStatus(NamedTuple):
    """State of a member in the driver's pool, for pools of other processes; ``changes`` tells which one is newer."""

    number: int
    state: MemberState
    version: int
    start_count: int
    changes: int
    exhausted: bool
    handle: EngineHandle


class MemberReport(NamedTuple):
    """Death of a member as another process saw it, after some number of changes of the driver's member."""

    number: int
    changes: int
    error: str


class Member:
    """Engine of a pool.

    Its state changes as follows:

    - ``"starting"``: the engine restarts. Then it is empty if a publisher is attached, otherwise ready.
    - ``"empty"``: it runs, but waits for weights. It is ready once it was filled.
    - ``"ready"``: it takes requests. Only ready members do.
    - ``"suspect"``: it did not answer a call, or a push failed in it. A call that it answers makes it ready, or empty
      after a failed push. A second call without an answer makes it dead.
    - ``"dead"``: it died or hangs. The supervisor restarts it, unless its budget of restarts is spent.
    - ``"closed"``: it was closed, for good.

    Attributes:
        engine: engine that takes the requests.
        target: engine as passed, which takes the weights.
        changes: number of changes of the state.
        cause: reason for the last state that is not ready; None if there is none.
        outstanding: sum of prompt tokens and limits of the requests inside.
        finished: number of requests that it finished.
        exhausted: True once it will not be restarted any more.
    """

    def __init__(self, engine: Engine, number: int, state: MemberState = "ready"):
        self.target = engine
        self.engine = engine if isinstance(engine, AsyncEngine) else BatchedEngine(engine)
        self.number, self.name = number, f"member {number} ({type(engine).__name__})"
        self.state, self.changes = state, 0
        self.cause: BaseException | None = None
        self.inside: dict[Ticket, None] = {}  # in the order of arrival
        self.outstanding = self.finished = 0
        self.occupancy = Occupancy()
        self.start_count = engine.start_count  # of the start that the pool knows of
        # State of weights: filled, or to be filled by the supervisor
        self.filled, self.needs_fill = True, False
        # Notes of a pool that follows the driver's
        self.seen = -1  # changes of the driver's member at its last state here
        self.report: MemberReport | None = None  # a death that the driver has not looked at
        # Notes of the supervisor
        self.exhausted = False
        self.failures: deque[float] = deque()  # times of restarts and failed fills in the last hour
        self.misses, self.probe_at, self.fill_at = 0, 0.0, 0.0
        self.progress, self.progress_at = (0, 0), monotonic()
        self.job: Thread | None = None

    @property
    def version(self) -> int:
        """Policy version of the engine's weights."""
        return self.target.version

    def read_occupancy(self) -> Reading:
        """Return the occupancy of all processes if the engine reports it, otherwise that of this pool's requests."""
        return self.target.occupancy if isinstance(self.target, SharedEngine) else self.occupancy.read()

    def status(self) -> MemberStatus:
        """Return the state for other processes. Call it with the pool's lock."""
        if not isinstance(self.target, SharedEngine):
            raise EngineError(f"{self.name} cannot be used from other processes; put it in a RayEngine")
        # An engine that a caller restarted waits for weights, though the pool has not noticed
        count = self.target.start_count
        state = "empty" if self.state == "ready" and count != self.start_count else self.state
        handle = self.target.current_handle()
        return MemberStatus(self.number, state, self.version, count, self.changes, self.exhausted, handle)

    def drain(self, timeout: float) -> None:
        """Wait until pools of other processes have left the engine, whose requests would fail when it is closed."""
        idle_since, deadline = monotonic(), monotonic() + timeout
        while isinstance(self.target, SharedEngine) and monotonic() < min(idle_since + _FOLLOW_S, deadline):
            time.sleep(_POLL_S)
            with suppress(EngineError):  # it died
                load = self.engine.load()
                if load.running + load.waiting:
                    idle_since = monotonic()

    def describe(self) -> str:
        """Return the state and its reason for a message."""
        cause = f" ({type(self.cause).__name__}: {self.cause})" if self.cause is not None else ""
        return f"{self.name} is {self.state}{cause}"

    def __repr__(self) -> str:
        return f"<{self.name}: {self.state}>"


class Ticket(Future[Sample]):
    """Future of a request to a pool, which follows the request from member to member."""

    def __init__(self, request: Request, on_cancel: Callable[[Ticket], None]):
        super().__init__()
        self.request, self.cost = request, len(request.prompt) + request.limit
        self._on_cancel = on_cancel
        self.attempt = 0  # changes whenever a member gets or loses the request, so that late answers are recognized
        self.tries = 0  # number of members that got it
        self.member: Member | None = None
        self.avoid: Member | None = None  # member that failed last
        self.inner: Future[Sample] | None = None
        self.waiting_since = 0.0

    def cancel(self) -> bool:
        """Cancel the request, also inside its member."""
        cancelled = super().cancel()
        if cancelled:
            self._on_cancel(self)
        return cancelled

    def enter(self, member: Member) -> int:
        """Put the request inside a member, and return the number of the attempt. Call it with the pool's lock."""
        self.attempt += 1
        self.tries += 1
        self.member, self.inner = member, None
        member.inside[self] = None
        member.outstanding += self.cost
        member.occupancy.add(1)
        return self.attempt

    def leave(self) -> Future[Sample] | None:
        """Take the request from its member, whose answer will be late from now on. Call it with the pool's lock."""
        self.attempt += 1
        member, inner, self.member, self.inner = self.member, self.inner, None, None
        if member is not None:
            del member.inside[self]
            member.outstanding -= self.cost
            member.occupancy.add(-1)
            self.avoid = member
        return inner

    def fail(self, error: BaseException) -> None:
        """Raise an error in the future, unless it was cancelled."""
        if self.set_running_or_notify_cancel():
            self.set_exception(error)


def call_each(members: Sequence[Member], call: Callable[[AsyncEngine], Any]) -> list[tuple[Member, Exception]]:
    """Call the engines of all members at the same time, and return the members that fail, with their errors."""
    outcomes: list[Future] = [Future() for _ in members]

    def run(member: Member, outcome: Future) -> None:
        try:
            outcome.set_result(call(member.engine))
        except BaseException as error:
            outcome.set_exception(error)

    for pair in zip(members, outcomes, strict=True):
        Thread(target=run, args=pair, daemon=True).start()
    errors = [outcome.exception() for outcome in outcomes]
    return [(member, error) for member, error in zip(members, errors, strict=True) if error is not None]

"""Members of an EnginePool and the requests inside them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from time import monotonic
from typing import Literal

from torchrl_rloo.engines.base import AsyncEngine, Engine, Request, Sample
from torchrl_rloo.engines.batched import BatchedEngine
from torchrl_rloo.engines.occupancy import Occupancy, Reading

MemberState = Literal["starting", "empty", "ready", "suspect", "draining", "dead", "closed"]


class Member:
    """Engine of a pool.

    Its state changes as follows:

    - ``"starting"``: the engine restarts. Then it is empty if a publisher is attached, otherwise ready.
    - ``"empty"``: it runs, but waits for weights. It is ready once it was filled.
    - ``"ready"``: it takes requests. Only ready members do.
    - ``"suspect"``: it did not answer a call, or a push failed in it. A call that it answers makes it ready, or empty
      after a failed push. A second call without an answer makes it dead.
    - ``"draining"``: it leaves the pool and finishes its requests. Then it is closed, also if it dies before.
    - ``"dead"``: it died or hangs. The supervisor restarts it, unless its budget of restarts is spent.
    - ``"closed"``: it was closed, for good.

    Args:
        engine: engine of any kind. One that is no :class:`AsyncEngine` gets a thread that batches its requests.
        number: number in the pool, which no later member gets again.

    Attributes:
        engine: engine that takes the requests.
        target: engine as passed, which takes the weights.
        name: number and class, for messages.
        state: current state.
        changes: number of changes of the state.
        cause: reason for the last state that is not ready; None if there is none.
        outstanding: sum of prompt tokens and limits of the requests inside.
        finished: number of requests that it finished.
        occupancy: number of requests inside, and its integrals.
        exhausted: True once it will not be restarted any more.
    """

    def __init__(self, engine: Engine, number: int):
        self.target = engine
        self.engine = engine if isinstance(engine, AsyncEngine) else BatchedEngine(engine)
        self.number, self.name = number, f"member {number} ({type(engine).__name__})"
        self.state: MemberState = "ready"
        self.changes = 0
        self.cause: BaseException | None = None
        self.inside: dict[Ticket, None] = {}  # in the order of arrival
        self.outstanding = self.finished = 0
        self.occupancy = Occupancy()
        self.start_count = engine.start_count  # of the start that the pool knows of
        # State of weights: filled, or to be filled by the supervisor
        self.filled, self.needs_fill = True, False
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
        reported = getattr(self.target, "occupancy", None)
        return self.occupancy.read() if reported is None else reported

    def __repr__(self) -> str:
        return f"<{self.name}: {self.state}>"


class Ticket(Future[Sample]):
    """Future of a request to a pool, which follows the request from member to member.

    Args:
        request: request to sample.
        on_cancel: function called with the ticket once it was cancelled.
    """

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

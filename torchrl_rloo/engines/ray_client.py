"""RayEngineClient: a RayEngine in another process, which samples and leaves the engine's life to the driver."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from torchrl_rloo.engines.base import (
    EngineDeadError,
    EngineError,
    EngineLoad,
    EngineTimeoutError,
    InFlight,
    Request,
    Sample,
    SharedEngine,
    WeightStep,
)
from torchrl_rloo.engines.occupancy import Reading
from torchrl_rloo.engines.ray_connection import Connection
from torchrl_rloo.engines.ray_messages import EngineFacts
from torchrl_rloo.engines.vllm_loop import CLOSED


class EngineHandle(NamedTuple):
    """Address of one start of a :class:`RayEngine`, which can be pickled to processes of its cluster.

    Attributes:
        actor: handle of the actor.
        name: name of the engine, for messages.
        start_count: number of restarts before this start.
        version: policy version of the weights.
        request_timeout: seconds of sampling that a request may take.
        facts: facts of the engine.
    """

    actor: Any
    name: str
    start_count: int
    version: int
    request_timeout: float
    facts: EngineFacts

    def connect(self) -> RayEngineClient:
        """Return a client of the engine in this process."""
        return RayEngineClient(self)


class RayEngineClient(SharedEngine):
    """Client of a :class:`RayEngine` in another process, which samples and leaves life and weights to the driver.

    A pickled :class:`RayEngine` becomes one. Requests of all clients are batched in the engine. If the client's process
    ends, the engine cancels its requests within a minute.

    Args:
        handle: address of the engine.

    Attributes:
        node_id: Ray's id of the engine's node.
        handle: address of the current start.
    """

    _stays = False  # whether to listen for the state without requests inside

    def __init__(self, handle: EngineHandle):
        super().__init__(handle.request_timeout)
        self._connect(handle)

    def _connect(self, handle: EngineHandle) -> None:
        self.handle = handle
        facts = handle.facts
        self.context_length, self.vocab_size, self.stop_ids = facts.context_length, facts.vocab_size, facts.stop_ids
        self.counts_running_tokens, self.node_id, self.pid = facts.counts_running_tokens, facts.node_id, facts.pid
        self.start_count = handle.start_count
        self._connection = Connection(handle.actor, handle.name, self.request_timeout, self._stays)
        self._connection.note_version(handle.version)

    def __reduce__(self) -> tuple:
        return RayEngineClient, (self.current_handle(),)

    def current_handle(self) -> EngineHandle:
        """Return the address with the current version."""
        return self.handle._replace(version=self.version)

    def follow(self, handle: EngineHandle) -> None:
        """Take the version of the same start, or change to a later start, at which the requests inside fail."""
        if handle.start_count > self.start_count:
            earlier = self._connection
            self._connect(handle)
            earlier.lose(EngineDeadError(f"{handle.name} was restarted"))
        elif handle.start_count == self.start_count:
            self._connection.note_version(handle.version)

    @property
    def version(self) -> int:
        """Policy version of the current weights, as last reported."""
        return self._connection.state.version

    @property
    def failed_version(self) -> int | None:
        """Version whose update failed halfway, or None."""
        return self._connection.state.failed_version

    @property
    def asleep(self) -> bool:
        """True while the engine sleeps."""
        return self._connection.state.asleep

    @property
    def paused(self) -> bool:
        """True between pause and resume."""
        return self._connection.state.paused

    @property
    def occupancy(self) -> Reading:
        """Occupancy by the requests of all clients since the actor's start, as last reported."""
        return self._connection.state.occupancy

    def occupancies(self) -> dict[int, Reading]:
        """Return the occupancy by the number of restarts."""
        return {self.start_count: self.occupancy}

    def submit(self, request: Request) -> Future[Sample]:
        """Send a request with others of the next milliseconds. Cancelling its future cancels it in the actor."""
        if (refusal := self._refusal(ready=False)) is not None:
            future: Future[Sample] = Future()
            future.set_exception(refusal)
            return future
        return self._connection.submit(request)

    def load(self) -> EngineLoad:
        """Return the engine's load of all clients, as last reported."""
        self._check()
        return self._connection.state.load

    def check_health(self, timeout: float = 10.0) -> None:
        self._check()
        connection, what = self._connection, "check_health()"
        try:
            connection.result(lambda: connection.handle.check_health.remote(timeout), timeout, what)
        except EngineTimeoutError as error:
            raise EngineDeadError(f"{connection.name} hangs: {error}; call restart()") from error

    def close(self) -> None:
        """Cancel this client's requests. The engine runs on."""
        self.closed = True
        self._connection.close(CLOSED)

    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        """Refuse the step, since the driver updates the weights."""
        raise self._not_here("update_weights()")

    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        """Refuse the call, since the driver pauses the engine."""
        raise self._not_here("pause()")

    def resume(self) -> None:
        """Refuse the call, since the driver resumes the engine."""
        raise self._not_here("resume()")

    def restart(self) -> None:
        """Refuse the call, since the driver restarts the engine."""
        raise self._not_here("restart()")

    def sleep(self) -> None:
        """Refuse the call, since the driver puts the engine to sleep."""
        raise self._not_here("sleep()")

    def wake(self) -> None:
        """Refuse the call, since the driver wakes the engine."""
        raise self._not_here("wake()")

    def _refusal(self, ready: bool) -> EngineError | None:
        if self._connection.death is not None and not self.closed:
            return EngineDeadError(*self._connection.death.args)
        return super()._refusal(ready)

    def _not_here(self, call: str) -> EngineError:
        return EngineError(f"{call} of {self.handle.name} belongs to the driver; call it there")

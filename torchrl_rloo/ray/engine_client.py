"""RayEngineClient: an engine in an actor, with which any process of the cluster samples.

A process has one connection to each actor: requests leave in batches, and answers arrive in a stream. All connections
share one event loop, on a thread of the process.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple
from uuid import uuid4

from torchrl_rloo.engines.base import (
    EngineDeadError,
    EngineError,
    EngineLoad,
    EngineTimeoutError,
    Request,
    Sample,
    SamplingClock,
    SharedEngine,
)
from torchrl_rloo.engines.occupancy import Reading
from torchrl_rloo.engines.vllm_base import CLOSED, LoopThread
from torchrl_rloo.ray.engine_actor import AnswerBatch, CallResult, EngineFacts, EngineState, RequestBatch
from torchrl_rloo.ray.session import require_ray

_LOGGER = logging.getLogger(__name__)
_GATHER_S = 0.001  # time after the first request in which others join its batch
_PERIOD_S = 0.01  # shortest time between two batches
_GRACE_S = 0.5  # time beyond a time-out for the engine's own error, which is more specific
_LATE_CHECK_S = 0.1  # shortest time between two looks at the deadlines
_LOOPS: dict[int, LoopThread] = {}  # by process id, since a fork has no threads


class EngineHandle(NamedTuple):
    """Address of one start of a :class:`RayEngine`, which can be pickled to processes of its cluster."""

    actor: Any
    name: str
    start_count: int
    version: int
    request_timeout: float
    facts: EngineFacts

    def connect(self) -> RayEngineClient:
        """Return a client of the engine."""
        return RayEngineClient(self)


def _refused(call: str) -> Callable[..., Any]:
    """Return a method that refuses a call of the driver."""

    def refuse(self: RayEngineClient, *args: Any, **kwargs: Any) -> Any:
        raise EngineError(f"{call}() of {self.handle.name} belongs to the driver; call it there")

    return refuse


class RayEngineClient(SharedEngine):
    """Client of a :class:`RayEngine` in another process, which samples and leaves life and weights to the driver.

    A pickled :class:`RayEngine` becomes one. Requests of all clients are batched in the engine. If the client's process
    ends, the engine cancels its requests within a minute.
    """

    _stays = False  # whether to listen for the state without requests inside

    def __init__(self, handle: EngineHandle):
        super().__init__(handle.request_timeout)
        self._connect(handle)

    def _connect(self, handle: EngineHandle) -> None:
        self.handle = handle
        facts = handle.facts
        self.context_length, self.vocab_size, self.stop_ids = facts.context_length, facts.vocab_size, facts.stop_ids
        self.image_settings = facts.image_settings
        self.counts_running_tokens, self.node_id, self.pid = facts.counts_running_tokens, facts.node_id, facts.pid
        self.is_near = facts.node_id == require_ray().get_runtime_context().get_node_id()
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

    # The driver updates, pauses and restarts the engine, and puts it to sleep
    update_weights, pause, resume, restart, sleep, wake = map(
        _refused, ("update_weights", "pause", "resume", "restart", "sleep", "wake")
    )

    def _refusal(self, ready: bool) -> EngineError | None:
        if self._connection.death is not None and not self.closed:
            return EngineDeadError(*self._connection.death.args)
        return super()._refusal(ready)


class Connection:
    """Requests of this process inside one actor."""

    def __init__(self, handle: Any, name: str, request_timeout: float, stays: bool):
        self.handle, self.name, self.request_timeout = handle, name, request_timeout
        self.state, self.death = EngineState(), None
        self._id = uuid4().hex
        self._stays, self._listens, self._flushes = stays, False, False
        self._lock, self._numbers, self._sent_at = Lock(), count(), 0.0
        self._outbox: list[tuple[int, Any]] = []  # encoded requests
        self._cancelled: list[int] = []
        self._inside: OrderedDict[int, tuple[Future[Sample], float]] = OrderedDict()  # with deadlines, in their order
        self._clock, self._watches = SamplingClock(), False
        self._send = handle.sample_many.options(num_returns=0)
        self._stream = handle.answers.options(num_returns="streaming")
        self._thread = _loop()
        if stays:
            self._thread.loop.call_soon_threadsafe(self._wake)

    @property
    def inside(self) -> int:
        """Number of requests that wait for an answer."""
        return len(self._inside)

    def submit(self, request: Request) -> Future[Sample]:
        """Send a request with the next batch."""
        number = next(self._numbers)
        future = _Reply(self, number)
        try:
            entry = RequestBatch.entry(number, request)
        except (TypeError, OverflowError) as error:
            future.set_exception(EngineError(f"{self.name} cannot send the prompt: {type(error).__name__}: {error}"))
            return future
        with self._lock:
            death = self.death
            if death is None:
                self._inside[number] = future, self._clock.read() + self.request_timeout
                self._outbox.append((number, entry))
                wake, self._flushes = not self._flushes, True
        if death is not None:
            future.set_exception(_copy(death))
        elif wake:
            self._thread.loop.call_soon_threadsafe(self._wake)
        return future

    def call(self, method: str, *args: Any, limit: float, **kwargs: Any) -> Any:
        """Call a method of the engine, with at most ``limit`` seconds to wait, and take the state after it."""
        return self.result(lambda: self.handle.call.remote(method, *args, **kwargs), limit, f"{method}()")

    def result(self, start: Callable[[], Any], timeout: float, what: str) -> Any:
        """Wait for the result of a remote call that ``start`` begins, or raise the error of its engine or actor."""
        ray = require_ray()
        if self.death is not None:
            raise _copy(self.death)
        try:
            answer: CallResult = ray.get(start(), timeout=timeout + _GRACE_S)
        except ray.exceptions.GetTimeoutError as error:
            raise EngineTimeoutError(f"{self.name}: {what} had no answer within timeout={timeout:g} s") from error
        except ray.exceptions.RayTaskError as error:  # of the actor's own code, or of a class it cannot import
            raise EngineError(f"{self.name}: {what} failed in its actor: {error}") from error
        except ray.exceptions.RayError as error:
            raise self.lose(_death(self.name, error)) from error
        self._take_state(answer.state)
        if answer.failure is not None:
            raise answer.failure.error()
        return answer.value

    def lose(self, death: EngineDeadError) -> EngineDeadError:
        """Note the actor's death, fail all requests, and return the first death's error."""
        with self._lock:
            if self.death is None:
                self.death = death
            futures = [future for future, _ in self._inside.values()]
            self._inside.clear()
            self._outbox.clear()
            self._cancelled.clear()
        for future in futures:
            _resolve(future, _copy(self.death))
        return _copy(self.death)

    def note_version(self, version: int) -> None:
        """Take a version that another process reports. Versions only grow within a start."""
        with self._lock:
            if version > self.state.version:
                self.state = self.state._replace(version=version)

    def close(self, error: EngineError) -> None:
        """Fail all requests, and cancel them in the actor."""
        for number in list(self._inside):
            self._fail(number, error)
        self._stays = False

    def drop(self, number: int) -> None:
        """Cancel a request in the actor."""
        with self._lock:
            if self._inside.pop(number, None) is None:
                return
            self._cancelled.append(number)
            wake, self._flushes = not self._flushes, True
        if wake:
            self._thread.loop.call_soon_threadsafe(self._wake)

    def _fail(self, number: int, error: EngineError) -> None:
        entry = self._inside.get(number)
        self.drop(number)
        if entry is not None:
            _resolve(entry[0], error)

    def _wake(self) -> None:
        """Send what waits after a moment, and listen. Runs on the loop."""
        if self._flushes:
            self._thread.loop.call_later(max(_GATHER_S, self._sent_at + _PERIOD_S - monotonic()), self._flush)
        if not self._listens and self.death is None:
            self._listens = True
            self._thread.start(self._listen())
        if not self._watches and self._inside:
            self._watches = True
            self._watch()

    def _flush(self) -> None:
        self._sent_at = monotonic()
        with self._lock:
            self._flushes = False
            requests, self._outbox = self._outbox, []
            cancelled, self._cancelled = self._cancelled, []
        inside = [(number, entry) for number, entry in requests if number in self._inside]
        if not (inside or cancelled) or self.death is not None:
            return
        try:
            self._send.remote(self._id, RequestBatch.of(entry for _, entry in inside), cancelled)
        except Exception as error:  # an option that cannot be pickled, or a cluster that has ended
            for number, _ in inside:
                self._fail(number, EngineError(f"{self.name} cannot send requests: {type(error).__name__}: {error}"))

    async def _listen(self) -> None:
        """Take answers and states until nothing is inside. The actor ends each stream."""
        ray = require_ray()
        try:
            while self._stays or self._inside:
                async for reference in self._stream.remote(self._id, self._stays):
                    state, answers = await reference
                    self._take(state, answers)
                    del reference, state, answers  # otherwise they live until the next ones
        except ray.exceptions.RayError as error:
            if self.death is None:
                self.lose(_death(self.name, error))
        finally:
            self._listens = False
        if self._inside and self.death is None:  # a request came after the last look
            self._wake()

    def _take(self, state: EngineState, answers: AnswerBatch) -> None:
        self._take_state(state)
        for number, answer in answers.answers():
            with self._lock:
                future, _ = self._inside.pop(number, (None, None))
            if future is not None:
                _resolve(future, answer)

    def _take_state(self, state: EngineState) -> None:
        with self._lock:  # reports of calls and of the stream may overtake each other
            if state.number > self.state.number:
                self.state = state
                (self._clock.stop if state.paused else self._clock.start)()

    def _watch(self) -> None:
        """Fail requests at their deadlines. Runs on the loop."""
        now = self._clock.read()
        late = []
        with self._lock:
            for number, (_, deadline) in self._inside.items():
                if deadline > now:
                    break
                late.append(number)
        for number in late:
            self._fail(
                number,
                EngineTimeoutError(
                    f"{self.name} did not finish a request in request_timeout={self.request_timeout:g} s of sampling; "
                    "raise it or lower max_new_tokens"
                ),
            )
        with self._lock:
            first = next(iter(self._inside.values()), None)
        if first is None:
            self._watches = False
        else:
            self._thread.loop.call_later(max(first[1] - now, _LATE_CHECK_S), self._watch)


class _Reply(Future[Sample]):
    """Future of a request, whose cancellation reaches the actor."""

    def __init__(self, connection: Connection, number: int):
        super().__init__()
        self._connection, self._number = connection, number

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._connection.drop(self._number)
        return cancelled


def _resolve(future: Future[Sample], answer: Sample | EngineError) -> None:
    if future.set_running_or_notify_cancel():
        (future.set_result if isinstance(answer, Sample) else future.set_exception)(answer)


def _death(name: str, error: BaseException) -> EngineDeadError:
    reason = " ".join(str(error).partition("Some common causes")[0].split())  # Ray's advice follows
    death = EngineDeadError(f"the actor of {name} is dead: {type(error).__name__}: {reason}; call restart()")
    death.__cause__ = error
    return death


def _copy(error: EngineError) -> EngineError:
    copy = type(error)(*error.args)  # one exception raised in several places would collect all their tracebacks
    copy.__cause__ = error.__cause__
    return copy


def _loop() -> LoopThread:
    """Return the event loop of this process, which all connections share."""
    if os.getpid() not in _LOOPS:
        _LOOPS[os.getpid()] = LoopThread("ray-engines")
    return _LOOPS[os.getpid()]

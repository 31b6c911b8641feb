"""Connection of one process to the actor of a RayEngine: batches of requests there, a stream of answers back."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from threading import Lock
from time import monotonic
from typing import Any
from uuid import uuid4

from torchrl_rloo.engines.base import EngineDeadError, EngineError, EngineTimeoutError, Request, Sample, SamplingClock
from torchrl_rloo.engines.ray_messages import AnswerBatch, CallResult, EngineState, RequestBatch
from torchrl_rloo.engines.vllm_loop import LoopThread
from torchrl_rloo.ray_session import require_ray

_LOGGER = logging.getLogger(__name__)
_GATHER_S = 0.001  # time after the first request in which others join its batch
_PERIOD_S = 0.01  # shortest time between two batches
_GRACE_S = 0.5  # time beyond a time-out for the engine's own error, which is more specific
_LATE_CHECK_S = 0.1  # shortest time between two looks at the deadlines
_LOOPS: dict[int, LoopThread] = {}  # by process id, since a fork has no threads


class Connection:
    """Requests of this process inside one actor.

    Args:
        handle: handle of the actor.
        name: name of the engine, for messages.
        request_timeout: seconds of sampling that a request may take.
        stays: whether to listen also without requests inside, for the state.

    Attributes:
        state: last known state of the engine.
        death: error of the actor's death; None while it lives.
    """

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
        """Call a method of the engine, and take the state after it.

        Args:
            method: name of the method.
            *args: arguments of the method.
            limit: seconds to wait for the answer.
            **kwargs: further arguments of the method.

        Raises:
            EngineDeadError: if the actor is dead.
            EngineTimeoutError: if there is no answer in time.
            EngineError: if the call fails, with its error.
        """
        return self.result(lambda: self.handle.call.remote(method, *args, **kwargs), limit, f"{method}()")

    def result(self, start: Callable[[], Any], timeout: float, what: str) -> Any:
        """Wait for the result of a remote call that ``start`` begins, with the errors of :meth:`call`."""
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

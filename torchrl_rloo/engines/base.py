"""Protocol between policies and the engines that sample for them, and BatchedEngine, which adapts batched ones."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from operator import index
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol, get_args

from torchrl_rloo.engines.occupancy import Reading
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.images.encoder import ImageSpan
from torchrl_rloo.runtime.threads import PackageThread
from torchrl_rloo.weight_update.protocol import (  # noqa: F401  for all engines, whose errors a publisher raises as well
    EngineDeadError,
    EngineError,
    EngineTimeoutError,
    InFlight,
    WeightStep,
    WeightTarget,
    check_in_flight,
)

Finish = Literal["stop", "length", "abort"]
MAX_ABORTS = 100  # times in a row that an engine may abort a turn; pauses abort it a few times
_GATHER_S = 0.002  # time after the first request in which others join its batch
_ROUNDING = 1e-3  # nats by which rounding may lift a log-prob above 0


@dataclass(frozen=True)
class Request:
    """One turn to sample.

    Args:
        prompt: token ids to continue, at least one.
        limit: maximum number of tokens to sample.
        seed: seed of the request's random stream, in ``[0, 2**63)``. Equal requests give equal tokens.
        distribution: distribution to draw tokens from.
        stop_ids: ids that end the turn. The sampled one is kept.
        stop_strings: texts that end the turn. The ids that spell one are kept.
        session: ids of the conversation, for routing only. ``(group_id,)`` at its first turn, then
            ``(group_id, trajectory_id)``.
        images: images of the prompt, in order; the prompt contains their tokens.
    """

    prompt: Sequence[int]
    limit: int
    seed: int
    distribution: SamplingDistribution = SamplingDistribution()
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    session: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()


class Sample(NamedTuple):
    """Result of a request.

    Attributes:
        tokens: ``n`` sampled ids, including the stop token.
        log_probs: ``n`` log-probs of the tokens, in nats, under the request's distribution; 0 if it is greedy.
        finish: ``"stop"``, ``"length"`` at the request's limit, or ``"abort"`` if a pause ended the turn.
        versions: ``n`` policy versions, one per token, of the weights that sampled it.
    """

    tokens: list[int]
    log_probs: list[float]
    finish: Finish
    versions: list[int]


def check_sample(sample: Any, request: Request, *, vocab_size: int, version: int) -> Sample:
    """Return an engine's answer to a request with plain lists, or raise ``EngineError`` if it contradicts ``Sample``.

    ``version`` is the highest policy version that may have sampled it.
    """
    try:
        tokens, versions = list(map(index, sample.tokens)), list(map(index, sample.versions))
        log_probs = list(map(float, sample.log_probs))
        finish = sample.finish
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"the engine answered {sample!r:.100} ({error}); return a Sample of plain numbers") from error
    n, outside = len(tokens), [t for t in tokens if not 0 <= t < vocab_size]
    if not n == len(log_probs) == len(versions):
        wrong = f"{n} tokens with {len(log_probs)} log-probs and {len(versions)} versions; return one of each per token"
    elif n > request.limit:
        wrong = f"{n} tokens, above limit={request.limit} of the request; end the turn there"
    elif finish not in get_args(Finish):
        wrong = f"finish={finish!r}, which must be one of {get_args(Finish)}"
    elif outside:
        wrong = f"the id {outside[0]}, but ids must be from 0 to {vocab_size - 1}; sample with the policy's model"
    elif bad := set(tokens) & set(request.distribution.excluded):
        wrong = f"the excluded id {min(bad)}, whose probability is 0; sample with the request's distribution"
    elif bad := [v for v in versions if not 0 <= v <= version]:
        wrong = f"version {bad[0]}, but versions must be from 0 to {version}, the engine's current one"
    elif bad := [v for v in log_probs if not (isfinite(v) and v <= _ROUNDING)]:
        wrong = f"log-prob {bad[0]}, which must be finite and at most 0; check the engine's weights and restart it"
    else:
        return Sample(tokens, log_probs, finish, versions)
    raise EngineError(f"the engine answered with {wrong}")


def is_dead(engine: Engine, timeout: float = 10.0) -> bool:
    """Return whether an engine died or does not answer within ``timeout`` seconds, so that a restart may help."""
    try:
        engine.check_health(timeout)
    except EngineDeadError:
        return True
    except EngineError:  # for example, a closed engine
        return False
    return False


class EngineLoad(NamedTuple):
    """Work inside an engine.

    Attributes:
        running: number of requests that are sampled now.
        waiting: number of requests that wait for a free slot.
        kv_usage: share of the key-value cache in use, from 0 to 1.
        preemptions: number of running requests that were set back to waiting since the start.
        tokens: number of tokens sampled since the start.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    tokens: int = 0


class Sampler(ABC):
    """Base of what samples turns from token ids.

    Attributes:
        context_length: maximum number of tokens of prompt and turn together; None if the engine does not report it.
        vocab_size: number of ids that the model may sample; None if the engine does not report it.
        stop_ids: ids that end a turn according to the model, in addition to the tokenizer's.
        image_settings: settings of the engine's images, as ``ImageEncoder.settings`` returns them; None if the engine
            samples from text only.
    """

    context_length: int | None = None
    vocab_size: int | None = None
    stop_ids: tuple[int, ...] = ()
    image_settings: dict[str, Any] | None = None

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Sample all requests and return one sample each, in their order. Common prefixes share computation.

        Raises:
            EngineDeadError: if the engine is dead, with its error.
            EngineError: if the engine is closed or asleep, its last update failed half-way, or it refuses a request.
        """

    def score(self, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Return the log-prob of each id of each row given the ids before it, in nats; 0 for the first id of a row.

        Logits are divided by ``temperature``, which must be 1 in vLLM engines, and are neither truncated nor penalized.
        """
        raise EngineError(f"{type(self).__name__} cannot score rows; use a TransformersEngine or one vLLM engine")


class Engine(Sampler, WeightTarget):
    """Base of engines, which sample turns, receive weight updates, sleep, die and restart.

    An engine is a context manager, which closes it on exit. After ``pause``, requests wait until ``resume``. After
    ``sleep``, they are refused until ``wake``.

    Attributes:
        is_near: False if requests of this process leave its machine.
    """

    closed: bool = False
    asleep: bool = False
    is_near: bool = True

    @abstractmethod
    def check_health(self, timeout: float = 10.0) -> None:
        """Call the engine and wait ``timeout`` seconds for its answer.

        Raise EngineDeadError if it is dead, or does not answer in time; its cause is then an EngineTimeoutError. Raise
        EngineError if it is closed.
        """

    def restart(self) -> None:
        """Kill what remains of the engine and start it from its checkpoint, with ``version`` 0."""
        raise EngineError(f"{type(self).__name__} cannot be restarted")

    @abstractmethod
    def close(self) -> None:
        """Stop the engine and release its resources. It may be called again."""

    @abstractmethod
    def sleep(self) -> None:
        """Release as much of the engine's device memory as possible, for training on the same device.

        A sleeping engine may refuse weights. Wake it before an update.
        """

    @abstractmethod
    def wake(self) -> None:
        """Undo :meth:`sleep`."""

    def _refusal(self, ready: bool) -> EngineError | None:
        """Return the error that every call raises now, or every request if ``ready``; None if there is none."""
        name = f"this {type(self).__name__}"
        if self.closed:
            return EngineError(f"{name} is closed")
        if ready and self.asleep:
            return EngineError(f"{name} is asleep; call wake() first")
        if ready and self.failed_version is not None:
            return EngineError(
                f"the update to version {self.failed_version} failed half-way in {name}; "
                "update the weights again before sampling"
            )
        return None

    def _check(self, ready: bool = False) -> None:
        if (refusal := self._refusal(ready)) is not None:
            raise refusal

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_for_all(started: Iterator[Future[Any]]) -> list[Any]:
    """Start all work and return its results. If one fails, cancel the others."""
    futures: list[Future[Any]] = []
    try:
        for future in started:
            futures.append(future)  # noqa: PERF402  those before an error must be cancelled
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


class AsyncEngine(Engine):
    """Base of engines that accept requests at any time and batch them as they arrive.

    Args:
        request_timeout: seconds of sampling that a request may take, above 0; time in a pause does not count.

    Attributes:
        paused: True between :meth:`pause` and :meth:`resume`.
        occupied: True during a call in which the engine may answer no others, such as a step of an update.
        counts_running_tokens: whether :meth:`load` counts the tokens of running requests, not only of finished ones.
    """

    paused: bool = False
    occupied: bool = False
    counts_running_tokens: bool = True

    def __init__(self, request_timeout: float = 600.0):
        if request_timeout <= 0:
            raise ValueError(f"request_timeout={request_timeout} must be above 0 seconds")
        self.request_timeout = request_timeout

    @abstractmethod
    def submit(self, request: Request) -> Future[Sample]:
        """Accept a request and return its future at once. Cancelling the future cancels the request.

        The future raises :class:`EngineTimeoutError` after ``request_timeout`` seconds of sampling.
        """

    @abstractmethod
    def load(self) -> EngineLoad:
        """Return the work inside the engine, without waiting for the engine."""

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Submit all requests and wait for their samples. If one fails, cancel the others."""
        return wait_for_all(self.submit(request) for request in requests)

    def _check_entry(self) -> None:
        """Raise an error unless a request may enter.

        A paused engine takes it, also within an update, which counts as failed until it is complete. The engine checks
        the request again after the pause.
        """
        self._check(ready=self.asleep or not self.paused)

    def _late(self) -> EngineTimeoutError:
        """Return the error of a request that reached its deadline."""
        return EngineTimeoutError(
            f"{type(self).__name__} did not finish a request in request_timeout={self.request_timeout} s of sampling; "
            "raise it or lower max_new_tokens"
        )


class BatchedEngine(AsyncEngine):
    """Engine that passes waiting requests to another engine's ``generate``, one batch at a time, on one thread.

    If a batch fails, its requests are repeated one by one, so that only the refused ones fail. A running batch cannot
    be cancelled. The deadline of a request is that of the engine's ``generate``. The engine keeps all of its state.
    """

    counts_running_tokens = False

    def __init__(self, engine: Engine):
        super().__init__(getattr(engine, "request_timeout", 600.0))
        self.sampler = engine
        self._requests: SimpleQueue[tuple[Request, Future[Sample]] | None] = SimpleQueue()
        self._counts = {"running": 0, "tokens": 0}
        self._finalizer = weakref.finalize(self, self._requests.put, None)
        PackageThread(
            _serve_batches, engine, self._requests, self._counts, name="batched-engine", stop=self._finalizer
        ).start()

    version = property(lambda self: self.sampler.version)
    failed_version = property(lambda self: self.sampler.failed_version)
    start_count = property(lambda self: self.sampler.start_count)
    in_process = property(lambda self: self.sampler.in_process)
    closed = property(lambda self: self.sampler.closed)
    asleep = property(lambda self: self.sampler.asleep)
    context_length = property(lambda self: self.sampler.context_length)
    vocab_size = property(lambda self: self.sampler.vocab_size)
    stop_ids = property(lambda self: self.sampler.stop_ids)
    image_settings = property(lambda self: self.sampler.image_settings)

    def submit(self, request: Request) -> Future[Sample]:
        self._check_entry()
        future: Future[Sample] = Future()
        self._requests.put((request, future))
        return future

    def score(self, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        return self.sampler.score(rows, temperature)

    def load(self) -> EngineLoad:
        """Return the work inside; running requests count their tokens once they have finished."""
        return EngineLoad(self._counts["running"], self._requests.qsize(), tokens=self._counts["tokens"])

    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        return self.sampler.update_weights(step, info, timeout=timeout)

    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        self.sampler.pause(in_flight, timeout=timeout)
        self.paused = True

    def resume(self) -> None:
        self.sampler.resume()
        self.paused = False

    def check_health(self, timeout: float = 10.0) -> None:
        self.sampler.check_health(timeout)

    def restart(self) -> None:
        self.sampler.restart()

    def close(self) -> None:
        self.sampler.close()
        self._finalizer()

    def sleep(self) -> None:
        self.sampler.sleep()

    def wake(self) -> None:
        self.sampler.wake()


def _serve_batches(engine: Engine, requests: SimpleQueue, counts: dict[str, int]) -> None:
    """Sample batches until the queue has None, and fail the requests behind it."""
    ended = False
    while not ended and (entry := requests.get()) is not None:
        # Gather the requests that arrived during the last batch or just after the first
        time.sleep(_GATHER_S)
        batch = [entry]
        while True:
            try:
                entry = requests.get_nowait()
            except Empty:
                break
            if entry is None:
                ended = True
                break
            batch.append(entry)
        batch = [(request, future) for request, future in batch if future.set_running_or_notify_cancel()]
        # Sample them, and deliver the results
        counts["running"] = len(batch)
        outcomes = _sample_batch(engine, [request for request, _ in batch], counts)
        counts["running"] = 0
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        del batch, entry, outcomes  # otherwise they live until the next request
    while not requests.empty():
        if (entry := requests.get()) is not None and entry[1].set_running_or_notify_cancel():
            entry[1].set_exception(EngineError(f"this {type(engine).__name__} is closed"))


def _sample_batch(engine: Engine, requests: Sequence[Request], counts: dict[str, int]) -> list[Sample | Exception]:
    """Return a sample or an error per request, and count the tokens."""
    if not requests:
        return []
    try:
        samples = engine.generate(requests)
        if len(samples) != len(requests):
            raise EngineError(f"the engine answered {len(samples)} of {len(requests)} requests; answer each once")
        counts["tokens"] += sum(len(sample.tokens) for sample in samples)
        return samples
    except EngineDeadError as error:
        return [error] * len(requests)
    except Exception as error:
        if len(requests) == 1:
            return [error]
        return [_sample_batch(engine, [request], counts)[0] for request in requests]


class EngineHandle(Protocol):
    """Address of a :class:`SharedEngine`, which can be pickled to other processes."""

    def connect(self) -> SharedEngine:
        """Return a client of the engine in this process."""


class SharedEngine(AsyncEngine):
    """Base of engines that several processes use: one, the driver, supervises them and updates their weights."""

    @property
    @abstractmethod
    def occupancy(self) -> Reading:
        """Occupancy by the requests of all processes, as last reported."""

    @abstractmethod
    def current_handle(self) -> EngineHandle:
        """Return the address with the current version."""

    @abstractmethod
    def follow(self, handle: EngineHandle) -> None:
        """Take the version of the same start, or change to a later start, at which the requests inside fail."""


class SamplingClock:
    """Clock for the deadlines of requests, which stands still during pauses."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._stopped_at = clock, None
        self.paused_seconds = 0.0  # sum of all pauses that have ended

    def read(self) -> float:
        """Return the time in seconds, without that of pauses."""
        return (self._clock() if self._stopped_at is None else self._stopped_at) - self.paused_seconds

    def stop(self) -> None:
        """Begin a pause, unless one has begun."""
        if self._stopped_at is None:
            self._stopped_at = self._clock()

    def start(self) -> None:
        """End a pause if there is one."""
        if self._stopped_at is not None:
            self.paused_seconds += self._clock() - self._stopped_at
            self._stopped_at = None


@contextmanager
def sleeping(engine: Engine | None) -> Iterator[None]:
    """Keep an engine asleep within the context. Do nothing if ``engine`` is None."""
    if engine is None:
        yield
        return
    engine.sleep()
    try:
        yield
    finally:
        engine.wake()

"""Protocol between policies and the engines that sample for them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from operator import index
from typing import Any, Literal, NamedTuple, Protocol, get_args

from torchrl_rloo.engines.occupancy import Reading
from torchrl_rloo.functional.sampling import SamplingDistribution
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
    """

    prompt: Sequence[int]
    limit: int
    seed: int
    distribution: SamplingDistribution = SamplingDistribution()
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    session: tuple[int, ...] = ()


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
    """

    context_length: int | None = None
    vocab_size: int | None = None
    stop_ids: tuple[int, ...] = ()

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Sample all requests and return one sample each, in their order. Common prefixes share computation.

        Raises:
            EngineDeadError: if the engine is dead, with its error.
            EngineError: if the engine is closed or asleep, its last update failed half-way, or it refuses a request.
        """


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
        futures: list[Future[Sample]] = []
        try:
            for request in requests:
                futures.append(self.submit(request))
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

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

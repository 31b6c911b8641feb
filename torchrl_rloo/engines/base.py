"""Protocol between policies and the engines that sample for them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Literal, NamedTuple

from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.weight_update.target import (
    EngineDeadError,
    EngineError,
    EngineTimeoutError,
    InFlight,
    WeightStep,
    WeightTarget,
    check_in_flight,
)

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineDeadError",
    "EngineError",
    "EngineTimeoutError",
    "InFlight",
    "Request",
    "Sample",
    "WeightStep",
    "check_in_flight",
    "sleeping",
]


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
    """

    prompt: Sequence[int]
    limit: int
    seed: int
    distribution: SamplingDistribution = SamplingDistribution()
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


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
    finish: Literal["stop", "length", "abort"]
    versions: list[int]


class EngineLoad(NamedTuple):
    running: int
    waiting: int
    kv_usage: float
    preemptions: int
    tokens: int


class Engine(WeightTarget):
    """Base of engines, which sample turns from token ids and receive weight updates.

    An engine is a context manager, which closes it on exit. After ``pause``, requests wait until ``resume``. After
    ``sleep``, they are refused until ``wake``.

    Attributes:
        closed: True once the engine was closed.
        asleep: True while the engine sleeps.
        context_length: maximum number of tokens of prompt and turn together; None if the engine does not report it.
        stop_ids: ids that end a turn according to the model, in addition to the tokenizer's.
    """

    closed: bool = False
    asleep: bool = False
    context_length: int | None = None
    stop_ids: tuple[int, ...] = ()

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Sample all requests and return one sample each, in their order. Common prefixes share computation.

        Raises:
            EngineDeadError: if the engine is dead, with its error.
            EngineError: if the engine is closed or asleep, its last update failed half-way, or it refuses a request.
        """

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
        request_timeout: maximum duration of a :meth:`generate` call, in seconds.

    Raises:
        ValueError: if ``request_timeout`` is not above 0.
    """

    def __init__(self, request_timeout: float = 600.0):
        if request_timeout <= 0:
            raise ValueError(f"request_timeout={request_timeout} must be above 0 seconds")
        self.request_timeout = request_timeout

    def load(self):
        return EngineLoad(0, 0, 0.0, 0, 0)

    @abstractmethod
    def submit(self, request: Request) -> Future[Sample]:
        """Accept a request and return its future at once. Cancelling the future cancels the request."""

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Submit all requests and wait for their samples. If one fails or times out, cancel the others.

        Raises:
            EngineTimeoutError: if the requests take longer than ``request_timeout`` seconds.
            EngineError: if the engine refuses a request or fails on it.
        """
        futures = [self.submit(request) for request in requests]
        deadline = monotonic() + self.request_timeout
        try:
            return [future.result(max(0.0, deadline - monotonic())) for future in futures]
        except TimeoutError as error:
            done = sum(future.done() for future in futures)
            raise EngineTimeoutError(
                f"{type(self).__name__} finished {done} of {len(futures)} requests in "
                f"request_timeout={self.request_timeout} s; raise it or lower max_new_tokens"
            ) from error
        finally:
            for future in futures:
                future.cancel()


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

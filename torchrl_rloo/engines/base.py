"""Engine and AsyncEngine: the protocol between policies and whatever samples for them."""

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
        prompt: ids to continue, at least one.
        limit: maximum number of tokens to sample.
        seed: of the request's own random stream, in ``[0, 2**63)``; the same request gives the same tokens.
        distribution: to draw tokens from.
        stop_ids: ids that end the turn; the sampled one is kept.
        stop_strings: texts that end the turn; the ids that spell one are kept.
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
        tokens: sampled ids, with the stop token.
        log_probs: of the tokens, in nats, under the request's distribution; 0 if it is greedy.
        finish: ``"stop"``, ``"length"`` at the request's limit, or ``"abort"`` if a pause ended it.
        versions: policy version that sampled each token.
    """

    tokens: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length", "abort"]
    versions: list[int]


class Engine(WeightTarget):
    """Samples turns from token ids, and takes weight updates.

    Engines are context managers: leaving one closes it. After ``pause`` requests wait until ``resume``; after ``sleep``
    they are refused until ``wake``.

    Attributes:
        closed: whether the engine was closed.
        asleep: whether the engine sleeps.
        context_length: limit of prompt and continuation together; None if the engine does not report it.
        stop_ids: ids that end a turn according to the model, in addition to the tokenizer's.
    """

    closed: bool = False
    asleep: bool = False
    context_length: int | None = None
    stop_ids: tuple[int, ...] = ()

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Sample all requests and return the samples in their order; common prefixes share work.

        Raises:
            EngineDeadError: if the engine is gone, with its own error.
            EngineError: if it is closed, asleep, or its last update failed half-way, or if it refuses a request.
        """

    @abstractmethod
    def close(self) -> None:
        """End the engine and free its resources; may be called again."""

    @abstractmethod
    def sleep(self) -> None:
        """Free the engine's memory on the device as far as possible, for training on the same device.

        A sleeping engine may refuse weights: wake it before an update.
        """

    @abstractmethod
    def wake(self) -> None:
        """Undo :meth:`sleep`."""

    def _refusal(self, ready: bool) -> EngineError | None:
        """Return the error that any call raises now, or with ``ready`` any request; None if there is none."""
        name = f"this {type(self).__name__}"
        if self.closed:
            return EngineError(f"{name} is closed")
        if ready and self.asleep:
            return EngineError(f"{name} is asleep: call wake() first")
        if ready and self.failed_version is not None:
            return EngineError(
                f"the update to version {self.failed_version} failed half-way in {name}: "
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
    """Engine that accepts requests at any time and batches them as they arrive.

    Args:
        request_timeout: seconds that a request of :meth:`generate` may take.
    """

    def __init__(self, request_timeout: float = 600.0):
        if request_timeout <= 0:
            raise ValueError(f"request_timeout={request_timeout} must be above 0 seconds")
        self.request_timeout = request_timeout

    @abstractmethod
    def submit(self, request: Request) -> Future[Sample]:
        """Accept a request and return at once. Cancelling the future cancels the request."""

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Submit all requests and wait for them; if one fails or is late, cancel the others."""
        futures = [self.submit(request) for request in requests]
        deadline = monotonic() + self.request_timeout
        try:
            return [future.result(max(0.0, deadline - monotonic())) for future in futures]
        except TimeoutError as error:
            done = sum(future.done() for future in futures)
            raise EngineTimeoutError(
                f"{type(self).__name__} finished {done} of {len(futures)} requests in "
                f"request_timeout={self.request_timeout} s: raise it, or lower max_new_tokens"
            ) from error
        finally:
            for future in futures:
                future.cancel()


@contextmanager
def sleeping(engine: Engine | None) -> Iterator[None]:
    """Keep an engine asleep within the context; do nothing for None."""
    if engine is None:
        yield
        return
    engine.sleep()
    try:
        yield
    finally:
        engine.wake()

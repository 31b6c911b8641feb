"""What a policy asks of whatever samples for it: one small protocol, whichever program and machine is behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal, NamedTuple

from torchrl_rloo.functional.sampling import SamplingDistribution

InFlight = Literal["finish", "abort", "continue"]
WeightStep = Literal["connect", "start", "bucket", "finish", "abort", "adapter"]
IN_FLIGHT: tuple[InFlight, ...] = ("finish", "abort", "continue")


class EngineError(RuntimeError):
    """An engine refused or failed a request; it may go on with others."""


class EngineDeadError(EngineError):
    """An engine is gone; :meth:`Engine.restart` starts it anew, with the weights of its checkpoint."""


class EngineTimeoutError(EngineError):
    """An engine did not answer in time."""


@dataclass(frozen=True)
class Request:
    """One turn to sample.

    Args:
        prompt: ids to continue, at least one.
        limit: most tokens to sample.
        seed: of the request's own random stream, from 0 to below ``2**63``; the same request gives the same tokens.
        distribution: what tokens are drawn from.
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
    """What a request came to.

    Attributes:
        tokens: sampled ids, the stop token included.
        log_probs: of the tokens, in nats, under the distribution sampled; 0 where it is greedy.
        finish: ``"stop"``, ``"length"`` at the request's limit, or ``"abort"`` if a pause cut it off.
        versions: of the weights that sampled each token.
    """

    tokens: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length", "abort"]
    versions: list[int]


class Engine(ABC):
    """Samples turns from token ids, and takes new weights.

    Engines are context managers: leaving one closes it. After ``pause`` requests wait until ``resume``; after ``sleep``
    they are refused until ``wake``.

    Attributes:
        version: policy version of the weights it samples with; 0 for those it started with.
        incarnation: how often it was started. Weights that went to an earlier one are gone.
        in_process: whether the model is in this process, so that weights may come by reference.
        closed: whether it was closed.
        asleep: whether it sleeps.
        torn: the version whose update failed half-way, None if there is none. A torn engine samples nothing until an
            update succeeds.
        context_length: most tokens of a prompt and its continuation; None if the engine does not say.
        stop_ids: ids that end a turn by the model's own account, beside the tokenizer's.
    """

    version: int = 0
    incarnation: int = 0
    in_process: bool = False
    closed: bool = False
    asleep: bool = False
    torn: int | None = None
    context_length: int | None = None
    stop_ids: tuple[int, ...] = ()

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Samples all requests, in their order; requests that begin alike share the work on what they share.

        Raises:
            EngineDeadError: if the engine is gone, with its own error.
            EngineError: if it is closed, asleep or torn, or refuses a request.
        """

    @abstractmethod
    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        """One step of a weight update; a :class:`~torchrl_rloo.weight_update.WeightUpdater` takes them in order.

        ``connect`` names the tensors and how they will come, ``start`` opens an update, ``bucket`` brings tensors,
        ``finish`` puts the new weights in force and takes their version, ``abort`` gives an open update up, ``adapter``
        loads a LoRA adapter. What is in ``info``: :mod:`torchrl_rloo.modules.engines.weight_protocol`.

        Returns:
            What each of the engine's workers reports: for ``finish`` the ``version`` and the ``checksums`` of buckets.

        Raises:
            EngineTimeoutError: if a worker has not answered after ``timeout`` seconds.
            EngineError: if a worker fails, with its error.
        """

    @abstractmethod
    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        """Stops sampling; what is cached of old weights is dropped.

        Args:
            in_flight: ``"finish"`` samples the running requests to their end first, ``"abort"`` ends them now as they
                are, ``"continue"`` freezes them: they go on after :meth:`resume`, under the weights of then.
            timeout: seconds to wait for running requests.
        """

    @abstractmethod
    def resume(self) -> None:
        """Samples again, frozen and waiting requests first."""

    @abstractmethod
    def check_health(self) -> None:
        """Raises EngineDeadError, with the engine's own error, if it is gone."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engine and frees what it holds; may be called again."""

    @abstractmethod
    def sleep(self) -> None:
        """Frees the engine's memory on the device as far as it can, for training on the same one.

        Weights may be refused meanwhile: wake it before an update.
        """

    @abstractmethod
    def wake(self) -> None:
        """Undoes :meth:`sleep`."""

    def restart(self) -> None:
        """Starts a dead engine anew. It then has the weights of its checkpoint, and ``version`` 0."""
        raise EngineError(f"{type(self).__name__} cannot be restarted")

    def _refusal(self, ready: bool) -> EngineError | None:
        """Why the engine does nothing or, if ``ready`` is asked, why it samples nothing; None if it does."""
        name = f"this {type(self).__name__}"
        if self.closed:
            return EngineError(f"{name} is closed")
        if ready and self.asleep:
            return EngineError(f"{name} is asleep: call wake() first")
        if ready and self.torn is not None:
            return EngineError(
                f"the update to version {self.torn} failed half-way in {name}: update the weights again before sampling"
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
    """An engine that takes requests at any time and samples them together as they come.

    Args:
        request_timeout: seconds that a request of :meth:`generate` may take.
    """

    def __init__(self, request_timeout: float = 600.0):
        if request_timeout <= 0:
            raise ValueError(f"request_timeout={request_timeout} must be above 0 seconds")
        self.request_timeout = request_timeout

    @abstractmethod
    def submit(self, request: Request) -> Future[Sample]:
        """Takes a request and returns at once. Cancelling the future gives the request up."""

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Submits all requests and waits for them; if one fails or takes too long, the others are given up."""
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
def asleep(engine: Engine | None) -> Iterator[None]:
    """Puts an engine to sleep meanwhile; nothing for None."""
    if engine is None:
        yield
        return
    engine.sleep()
    try:
        yield
    finally:
        engine.wake()

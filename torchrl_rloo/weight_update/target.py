"""Interfaces of engines to weight updaters: WeightTarget, Lifecycle and TargetGroup, and errors of engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

InFlight = Literal["finish", "abort", "continue"]
WeightStep = Literal["connect", "start", "bucket", "finish", "abort", "adapter"]
IN_FLIGHT: tuple[InFlight, ...] = ("finish", "abort", "continue")


class EngineError(RuntimeError):
    """Failure of one request or step. The engine may still serve others."""


class EngineDeadError(EngineError):
    """Failure of a whole engine. :meth:`Lifecycle.restart` starts it again from its checkpoint."""


class EngineTimeoutError(EngineError):
    """No answer from an engine within the time limit."""


class WeightTarget(ABC):
    """Base class of engines that receive weight updates.

    Attributes:
        version: policy version of the current weights. 0 is the checkpoint.
        start_count: number of restarts. A restart loses the connection and all weights sent before.
        in_process: True if the model is in this process, so that tensors may be passed by reference.
        reads_object_store: True if the engine is in an actor that can read Ray's object store.
        node_id: Ray's id of that actor's node; None without an actor.
        context_length: maximum number of tokens of a row; None if the engine does not report it.
        failed_version: version whose update failed halfway, or None. The engine then refuses to sample until an update
            succeeds.
    """

    version: int = 0
    start_count: int = 0
    in_process: bool = False
    reads_object_store: bool = False
    node_id: str | None = None
    context_length: int | None = None
    failed_version: int | None = None

    @abstractmethod
    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        """Execute one step of a weight update.

        - ``"connect"`` announces the tensors and their transport.
        - ``"start"`` opens an update.
        - ``"bucket"`` sends tensors.
        - ``"finish"`` activates the new weights and their version.
        - ``"abort"`` cancels an open update.
        - ``"adapter"`` loads a LoRA adapter.

        Args:
            step: name of the step.
            info: message of the step, see :mod:`torchrl_rloo.weight_update.protocol`.
            timeout: seconds to wait for the workers.

        Returns:
            One report per worker. The report of ``"finish"`` has the ``version`` and the ``checksums`` of the buckets.

        Raises:
            EngineTimeoutError: if a worker does not answer within ``timeout`` seconds.
            EngineError: if a worker fails, with its error.
        """

    @abstractmethod
    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        """Pause sampling and drop caches of the current weights.

        Args:
            in_flight: treatment of running requests. ``"finish"`` completes them first, ``"abort"`` ends them
                unfinished, and ``"continue"`` freezes them until :meth:`resume` continues them with the weights of
                that time.
            timeout: seconds to wait for running requests.
        """

    @abstractmethod
    def resume(self) -> None:
        """Resume sampling, with frozen and waiting requests first."""


class Lifecycle(ABC):
    """Base class of what starts, sleeps, dies and restarts."""

    closed: bool = False
    asleep: bool = False

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


class TargetGroup(ABC):
    """Base class of changing sets of engines, whose members are filled with weights one by one.

    A publisher attaches itself once. From then on no member samples before it was filled, neither at the start nor
    after a restart.
    """

    @abstractmethod
    def targets(self) -> list[WeightTarget]:
        """Return the engines that can take part in a push now. Dead, suspect and starting ones cannot."""

    @abstractmethod
    def attach(self, fill: Callable[[WeightTarget], None]) -> None:
        """Make all members wait for weights; only one publisher may be attached.

        After each restart the group calls ``fill`` on a thread, which gives one engine the latest weights. The engine
        samples once it has returned.
        """

    @abstractmethod
    def mark_filled(self, engine: WeightTarget, version: int) -> None:
        """Let an engine sample, since it has the weights of ``version``."""

    @abstractmethod
    def mark_failed(self, engine: WeightTarget, error: Exception) -> None:
        """Stop an engine from sampling, since a push failed in it. The group restarts it if needed, and refills it."""


def check_in_flight(in_flight: str) -> None:
    """Raise ValueError unless ``in_flight`` is one of :data:`IN_FLIGHT`."""
    if in_flight not in IN_FLIGHT:
        raise ValueError(f"in_flight={in_flight!r} must be one of {IN_FLIGHT}")


def is_dead(engine: Lifecycle, timeout: float = 10.0) -> bool:
    """Return whether an engine died or does not answer within ``timeout`` seconds, so that a restart may help."""
    try:
        engine.check_health(timeout)
    except EngineDeadError:
        return True
    except EngineError:  # for example, a closed engine
        return False
    return False

"""WeightTarget: the interface of engines to weight updaters, and errors of engines."""

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
    """Failure of a whole engine. :meth:`WeightTarget.restart` starts it again from its checkpoint."""


class EngineTimeoutError(EngineError):
    """No answer from an engine within the time limit."""


class WeightTarget(ABC):
    """Base class of engines that receive weight updates.

    Attributes:
        version: policy version of the current weights. 0 is the checkpoint.
        start_count: number of restarts. A restart loses the connection and all weights sent before.
        in_process: True if the model is in this process, so that tensors may be passed by reference.
        failed_version: version whose update failed halfway, or None. The engine then refuses to sample until an update
            succeeds.
    """

    version: int = 0
    start_count: int = 0
    in_process: bool = False
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

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDeadError with the engine's error if the engine is dead."""

    def restart(self) -> None:
        """Restart a dead engine from its checkpoint, with ``version`` 0.

        Raises:
            EngineError: if the engine cannot be restarted.
        """
        raise EngineError(f"{type(self).__name__} cannot be restarted")


class TargetGroup(ABC):
    """Base class of groups of engines whose members come and go, such as pools."""

    @abstractmethod
    def targets(self) -> list[WeightTarget]:
        """Return the engines of members that can take part in a push now."""

    @abstractmethod
    def attach(self, fill: Callable[[WeightTarget], None]) -> None:
        """Register the publisher's ``fill``. From then on every member is empty until it is filled."""

    @abstractmethod
    def mark_filled(self, engine: WeightTarget, version: int) -> None:
        """Note that an engine has this version, so that it may sample."""

    @abstractmethod
    def mark_failed(self, engine: WeightTarget, error: Exception) -> None:
        """Note that an engine missed a push or has only parts of it, so that it must not sample."""


def check_in_flight(in_flight: str) -> None:
    """Raise ValueError unless ``in_flight`` is one of :data:`IN_FLIGHT`."""
    if in_flight not in IN_FLIGHT:
        raise ValueError(f"in_flight={in_flight!r} must be one of {IN_FLIGHT}")


def is_dead(target: WeightTarget) -> bool:
    """Return whether an engine died, so that a restart may help."""
    try:
        target.check_health()
    except EngineDeadError:
        return True
    except EngineError:  # for example, a closed engine
        return False
    return False

"""WeightTarget: an engine as weight updaters see it, and the errors of engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

InFlight = Literal["finish", "abort", "continue"]
WeightStep = Literal["connect", "start", "bucket", "finish", "abort", "adapter"]
IN_FLIGHT: tuple[InFlight, ...] = ("finish", "abort", "continue")


class EngineError(RuntimeError):
    """Failure of one request or one step; the engine may still serve others."""


class EngineDeadError(EngineError):
    """Failure of a whole engine; :meth:`WeightTarget.restart` starts it again from its checkpoint."""


class EngineTimeoutError(EngineError):
    """Missing answer of an engine within the time limit."""


class WeightTarget(ABC):
    """Receiver of weight updates: one engine, whatever it samples with.

    Attributes:
        version: policy version of the current weights; 0 for those of the checkpoint.
        start_count: number of restarts. A restart loses the connection and all weights sent before.
        in_process: whether the model is in this process, so that tensors may be passed by reference.
        failed_version: version whose update failed half-way, None if there is none. Such an engine samples nothing
            until an update succeeds.
    """

    version: int = 0
    start_count: int = 0
    in_process: bool = False
    failed_version: int | None = None

    @abstractmethod
    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        """Do one step of a weight update.

        ``connect`` names the tensors and their transport, ``start`` opens an update, ``bucket`` brings tensors,
        ``finish`` activates the new weights and their version, ``abort`` cancels an open update, ``adapter`` loads a
        LoRA adapter. :mod:`torchrl_rloo.weight_update.protocol` documents ``info``.

        Returns:
            One report per worker; that of ``finish`` has the ``version`` and the ``checksums`` of the buckets.

        Raises:
            EngineTimeoutError: if a worker does not answer within ``timeout`` seconds.
            EngineError: if a worker fails, with its error.
        """

    @abstractmethod
    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        """Stop sampling and drop everything cached of the current weights.

        Args:
            in_flight: ``"finish"`` completes running requests first, ``"abort"`` ends them as they are, ``"continue"``
                freezes them: after :meth:`resume` they go on under the weights of then.
            timeout: seconds to wait for running requests.
        """

    @abstractmethod
    def resume(self) -> None:
        """Continue sampling, frozen and waiting requests first."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDeadError, with the engine's own error, if the engine is gone."""

    def restart(self) -> None:
        """Start a dead engine again, from its checkpoint and with ``version`` 0."""
        raise EngineError(f"{type(self).__name__} cannot be restarted")


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
    except EngineError:  # closed, for example
        return False
    return False

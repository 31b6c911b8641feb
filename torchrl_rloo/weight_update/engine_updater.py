"""What updaters of engines share: whom they send to, who sends where several ranks train, and engines that died."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrl_rloo.modules.engines.base import IN_FLIGHT, Engine, EngineDeadError, EngineError, InFlight
from torchrl_rloo.weight_update.base import WeightSyncError, WeightUpdater
from torchrl_rloo.weight_update.peers import Peer


class EngineUpdater(WeightUpdater):
    """Brings weights to one or several engines.

    Args:
        engines: one or several. Ranks that do not send need none.
        sends: whether this rank sends.
        sharded: whether the model's ranks push together: then all of them fail if one does.
        in_flight: what becomes of running requests; see :meth:`Engine.pause`.
        timeout: in seconds.
        max_restarts: how many calls of :meth:`restart` are granted; None is no limit.

    Raises:
        ValueError: for no engines, or values out of range.
    """

    def __init__(
        self,
        engines: Engine | Sequence[Engine],
        *,
        sends: bool,
        sharded: bool,
        in_flight: InFlight,
        timeout: float,
        max_restarts: int | None,
    ):
        self.engines = [engines] if isinstance(engines, Engine) else list(engines)
        if sends and not self.engines:
            raise ValueError("engines is empty; give at least one engine on the rank that sends")
        if in_flight not in IN_FLIGHT:
            raise ValueError(f"in_flight={in_flight!r} must be one of {IN_FLIGHT}")
        if timeout <= 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds")
        if max_restarts is not None and max_restarts < 0:
            raise ValueError(f"max_restarts={max_restarts} must be None or at least 0")
        self.in_flight, self.timeout, self.max_restarts = in_flight, timeout, max_restarts
        self.sharded, self.restarts = sharded, 0
        self._version = 0  # last pushed, or tried to
        self._peers = [Peer(engine, number) for number, engine in enumerate(self.engines)]

    def restart(self) -> int:
        """Starts dead engines anew, and pushes the present weights to all engines, as the version last pushed.

        Returns:
            How many engines were dead.

        Raises:
            EngineError: if ``max_restarts`` is used up.
            WeightSyncError: if an engine does not start, or the weights did not arrive.
        """
        if self.max_restarts is not None and self.restarts >= self.max_restarts:
            raise EngineError(f"engines died more than max_restarts={self.max_restarts} times: see why, or raise it")
        self.restarts += 1
        dead, failure = [engine for engine in self.engines if is_dead(engine)], None
        try:
            for engine in dead:
                engine.restart()
        except EngineError as error:
            failure = WeightSyncError(f"an engine that died does not start again: {error}")
            failure.__cause__ = error
        self._agree(failure)
        self.push_weights(self._version)
        return len(dead)

    def _agree(self, failure: Exception | None) -> None:
        """Raises what the sending rank failed with; on all ranks, where they push together."""
        if self.sharded:
            message = [str(failure) if failure else None]
            torch.distributed.broadcast_object_list(message, src=0)
            if message[0] is not None and failure is None:
                failure = WeightSyncError(f"rank 0 could not send: {message[0]}")
        if failure is not None:
            raise failure


def is_dead(engine: Engine) -> bool:
    """Whether an engine died, so that a restart may help."""
    try:
        engine.check_health()
    except EngineDeadError:
        return True
    except EngineError:  # closed, say
        return False
    return False

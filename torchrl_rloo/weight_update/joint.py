"""Calls of an updater that all ranks of a sharded model make together: rank 0 decides, the others gather for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.weight_update.base import WeightSyncError
from torchrl_rloo.weight_update.gathering import GatherError

T = TypeVar("T")


class JointCalls:
    """Calls that all ranks make together.

    Rank 0 may order any number of gathers in a call, for example to try again, and ends it for all ranks. An error that
    leaves the ranks out of step ends no call: it must end rank 0, and with it the connections of the others.

    Args:
        ranks: all ranks that share the model.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def lead(self, call: Callable[[], T], state: Callable[[], Any]) -> T:
        """Make a call on rank 0.

        Args:
            call: function that may call :meth:`order`.
            state: function that returns what the other ranks get at the end.
        """
        try:
            result = call()
        except (WeightSyncError, ValueError) as error:
            self._send(False, (state(), str(error)))
            raise
        self._send(False, (state(), None))
        return result

    def order(self, what: Any) -> None:
        """Let the other ranks gather."""
        self._send(True, what)

    def follow(self, gather: Callable[[Any], None]) -> tuple[Any, str | None]:
        """Take part in a call of rank 0, and return its state at the end and its error.

        Args:
            gather: function that gathers as rank 0 ordered.
        """
        while True:
            is_order, what = self.ranks.broadcast(lambda: None)
            if not is_order:
                return what
            with suppress(GatherError):  # rank 0 knows of it, and decides
                gather(what)

    def _send(self, is_order: bool, what: Any) -> None:
        if self.ranks.size > 1:
            self.ranks.broadcast(lambda: (is_order, what))

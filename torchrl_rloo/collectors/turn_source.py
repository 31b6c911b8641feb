"""Sources of turns for single conversations: an engine that accepts requests at any time, or a batched policy."""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import copy_row, set_entries, stack_rows
from torchrl_rloo.engines.base import AsyncEngine, EngineDeadError, EngineLoad, Request, Sample
from torchrl_rloo.engines.occupancy import Occupancy
from torchrl_rloo.modules.vllm_policy import vLLMWrapper
from torchrl_rloo.runtime import event_loop

_LOGGER = logging.getLogger(__name__)
_QUIET_S = 0.002  # time without another row before a batch begins although other conversations may still ask

Policy = Callable[[TensorDictBase], TensorDictBase]
Order = tuple[int, int]  # group and member of a conversation


class TurnSource(ABC):
    """Base of sources that continue single rows of conversations, each by a turn of the policy.

    Args:
        policy: callable that takes and returns rows.

    Attributes:
        occupancy: number of turns inside the engine or the policy.
    """

    load: Callable[[], EngineLoad] | None = None  # reports the engine's load; None if there is no such engine

    def __init__(self, policy: Policy):
        self.policy, self.occupancy = policy, Occupancy()

    @abstractmethod
    async def turn(self, row: TensorDictBase, order: Order) -> TensorDictBase:
        """Continue one row by one turn.

        Args:
            row: one row, without batch dimensions. It is unchanged if the turn fails or is cancelled.
            order: group and member of the conversation.

        Returns:
            The row, or a copy, with the policy's outputs.

        Raises:
            EngineDeadError: if the engine is dead.
            Exception: raised by the policy on this row.
        """

    def notify(self) -> None:  # noqa: B027  an engine needs no news
        """Note that a conversation ended, so that fewer may ask for a turn."""

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep the policy from using weights in this process within the context. Engines need no such lock."""
        yield


class EngineTurns(TurnSource):
    """Turn source that sends each turn of a :class:`vLLMWrapper` to its :class:`AsyncEngine` as one request, at once.

    Cancelling a turn cancels its request.
    """

    policy: vLLMWrapper

    def __init__(self, policy: vLLMWrapper):
        super().__init__(policy)
        self.load = policy.engine.load

    async def turn(self, row: TensorDictBase, order: Order) -> TensorDictBase:
        self.occupancy.add(1)
        try:
            return await self.policy.turn(row, self._submit)
        finally:
            self.occupancy.add(-1)

    async def _submit(self, request: Request) -> Sample:
        future = self.policy.engine.submit(request)
        if not future.done():
            return await asyncio.wrap_future(future)
        await asyncio.sleep(0)  # an engine that answers at once must not block time limits and cancellations
        return future.result()


class BatchedTurns(TurnSource):
    """Turn source that samples turns of any policy in batches: a thread calls it with all waiting rows.

    A batch begins once every conversation that may ask for a turn is waiting, so its rows depend on the seed only.
    With ``eager``, it also begins once no other row has arrived for 2 ms. If the policy fails on a batch, its rows are
    retried one by one, so that only the failing rows fail. Each row gets the version that sampled its first turn.

    Args:
        policy: callable that takes and returns any number of rows. Each row has a seed, and its sample must not depend
            on the other rows.
        version: function that returns the current policy version.
        expected: function that returns the number of conversations that wait for a turn or may still ask for one.
        eager: whether to begin a batch although other conversations may still ask.
        max_batch_size: maximum number of rows in a batch; None takes all waiting rows.
    """

    def __init__(
        self,
        policy: Policy,
        version: Callable[[], int],
        expected: Callable[[], float],
        *,
        eager: bool,
        max_batch_size: int | None = None,
    ):
        super().__init__(policy)
        self.version, self.expected, self.eager, self.max_batch_size = version, expected, eager, max_batch_size
        self._waiting: list[tuple[Order, TensorDictBase, asyncio.Future]] = []
        self._weights_lock = threading.Lock()
        self._running: asyncio.Task | None = None
        self._quiet: asyncio.TimerHandle | None = None
        self._since = self._seconds = 0.0  # time of the first waiting row; duration of the last batch

    async def turn(self, row: TensorDictBase, order: Order) -> TensorDictBase:
        turn = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._since = monotonic()
        self._waiting.append(waiting := (order, row, turn))
        self.notify()
        try:
            return await turn
        except asyncio.CancelledError:
            self._waiting = [other for other in self._waiting if other is not waiting]
            raise

    def notify(self) -> None:
        """Begin a batch if it is time for it."""
        if self._running is not None or not self._waiting:
            return
        if len(self._waiting) >= self.expected() or len(self._waiting) == self.max_batch_size:
            self._begin()
        elif self.eager:
            # Wait for further rows, but no longer than the last batch took
            loop = asyncio.get_running_loop()
            if self._quiet is not None:
                self._quiet.cancel()
            left = self._since + self._seconds - monotonic()
            self._quiet = loop.call_later(max(0.0, min(_QUIET_S, left)), self._begin)

    def _begin(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None
        if self._running is None and self._waiting:
            self._running = asyncio.ensure_future(self._run_batch())

    async def _run_batch(self) -> None:
        """Sample all waiting rows, or the first of them up to the maximum, in the order of their conversations."""
        self._waiting.sort(key=lambda waiting: waiting[0])
        size = self.max_batch_size or len(self._waiting)
        batch, self._waiting = self._waiting[:size], self._waiting[size:]
        began = monotonic()
        self.occupancy.add(len(batch))
        try:
            outcomes = await event_loop.call_at_once(self._sample, [row for _, row, _ in batch])
        except Exception as error:
            outcomes = [error] * len(batch)
        finally:
            self.occupancy.add(-len(batch))
        self._seconds, self._running = monotonic() - began, None
        for (_, _, turn), outcome in zip(batch, outcomes, strict=True):
            if turn.done():  # cancelled
                continue
            if isinstance(outcome, Exception):
                turn.set_exception(outcome)
            else:
                turn.set_result(outcome)
        self.notify()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait for the current batch, and start no other within the context."""
        with self._weights_lock:
            yield

    def _sample(self, rows: list[TensorDictBase]) -> list[TensorDictBase | Exception]:
        with self._weights_lock:
            return self._call(rows)

    def _call(self, rows: list[TensorDictBase]) -> list[TensorDictBase | Exception]:
        # Work on copies, since a failed turn must not change the row
        copies, version = list(map(copy_row, rows)), torch.tensor(self.version())
        for row in copies:
            if keys.POLICY_VERSION not in row.keys():
                set_entries(row, {keys.POLICY_VERSION: version})
        try:
            continued = list(self.policy(stack_rows(copies)).unbind(0))
            if len(continued) != len(rows):
                raise ValueError(f"the policy returned {len(continued)} rows for {len(rows)}; return each row once")
            return continued
        # A dead engine fails all rows. After any other error retry the rows one by one
        except EngineDeadError as error:
            return [error] * len(rows)
        except Exception as error:
            if len(rows) == 1:
                return [error]
            _LOGGER.warning("a batch of %d turns failed; retrying its rows one by one: %r", len(rows), error)
            return [self._call([row])[0] for row in rows]


def make_turn_source(
    policy: Policy,
    version: Callable[[], int],
    expected: Callable[[], float],
    *,
    eager: bool,
    max_batch_size: int | None = None,
) -> TurnSource:
    """Return :class:`EngineTurns` for a :class:`vLLMWrapper` over an :class:`AsyncEngine`, else :class:`BatchedTurns`.

    Args:
        policy: callable that takes and returns rows.
        version: see :class:`BatchedTurns`.
        expected: see :class:`BatchedTurns`.
        eager: see :class:`BatchedTurns`.
        max_batch_size: see :class:`BatchedTurns`. It must be None for an engine, which limits its batches itself.

    Raises:
        ValueError: if the policy samples several completions per row, or if ``max_batch_size`` is given for an engine.
    """
    if getattr(policy, "num_samples", None) is not None:
        raise ValueError(f"num_samples={policy.num_samples} must be None, since a conversation has one next turn")
    if isinstance(policy, vLLMWrapper) and isinstance(policy.engine, AsyncEngine):
        if max_batch_size is not None:
            raise ValueError(
                f"max_batch_size={max_batch_size} has no effect with {type(policy.engine).__name__}, which forms its "
                "batches itself; leave it None and limit max_in_flight instead"
            )
        return EngineTurns(policy)
    return BatchedTurns(policy, version, expected, eager=eager, max_batch_size=max_batch_size)

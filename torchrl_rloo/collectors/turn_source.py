"""Sources of turns for single conversations: an engine that accepts requests at any time, or a batched policy."""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_rloo._threads import PackageThread
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.engines.base import AsyncEngine, EngineDeadError, Request, Sample
from torchrl_rloo.modules.vllm_policy import vLLMWrapper

_LOGGER = logging.getLogger(__name__)
_QUIET_S = 0.002  # time without another row on an idle event loop before a batch begins

Policy = Callable[[TensorDictBase], TensorDictBase]


class TurnSource(ABC):
    """Base of sources that continue single rows of conversations, each by a turn of the policy.

    If the policy can restart a dead engine (``recover``), turns wait until the caller calls :meth:`recover`. Only the
    training loop knows when it may run, since it reads the training model's weights.

    Args:
        policy: callable that takes and returns rows.
        version: function that returns the current policy version.
        on_death: function called on the event loop when the engine died and :meth:`recover` should be called.

    Attributes:
        death: error of an engine that waits for :meth:`recover`; None if there is none.
    """

    def __init__(self, policy: Policy, version: Callable[[], int], on_death: Callable[[], None] = lambda: None):
        self.policy, self.version, self.on_death = policy, version, on_death
        self.death: EngineDeadError | None = None
        self._recover: Callable[[], Any] | None = getattr(policy, "recover", None)
        self._recoveries = 0
        self._waiting: set[asyncio.Future] = set()

    async def turn(self, row: TensorDictBase) -> TensorDictBase:
        """Continue one row by one turn.

        Args:
            row: one row, without batch dimensions. It is unchanged if the turn fails or is cancelled.

        Returns:
            The row, or a copy, with the policy's outputs.

        Raises:
            EngineDeadError: if the engine died and cannot be restarted, or died again after a restart.
            Exception: raised by the policy on this row.
        """
        recoveries = self._recoveries
        try:
            return await self._sample(row)
        except EngineDeadError as error:
            if self._recover is None:
                raise
            if self._recoveries == recoveries:
                await self._wait_for_recovery(error)
            return await self._sample(row)

    async def _wait_for_recovery(self, error: EngineDeadError) -> None:
        """Wait for :meth:`recover`, which releases all waiting turns at once."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        if self.death is None:
            self.death = error
            self.on_death()
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)

    def recover(self) -> None:
        """Restart a dead engine once for all waiting turns; do nothing if no engine is dead.

        It must not be called on the event loop.

        Raises:
            Exception: raised by the policy's ``recover``. Turns then still wait, and it may be called again.
        """
        if self.death is None:
            return
        _LOGGER.warning("restarting a dead engine: %s", self.death)
        self._recover()
        self._recoveries += 1
        self.death = None
        for waiting in list(self._waiting):
            waiting.get_loop().call_soon_threadsafe(lambda waiting=waiting: waiting.done() or waiting.set_result(None))

    @abstractmethod
    async def _sample(self, row: TensorDictBase) -> TensorDictBase:
        """Sample one turn, without restarting the engine."""

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep the policy from using weights in this process within the context. Engines need no such lock."""
        yield

    def close(self) -> None:  # noqa: B027  a source without threads has nothing to stop
        """Stop the source's threads."""


class EngineTurns(TurnSource):
    """Turn source that sends each turn of a :class:`vLLMWrapper` to its :class:`AsyncEngine` as one request, at once.

    Cancelling a turn cancels its request.
    """

    policy: vLLMWrapper

    async def _sample(self, row: TensorDictBase) -> TensorDictBase:
        return await self.policy.turn(row, self._submit)

    async def _submit(self, request: Request) -> Sample:
        return await asyncio.wrap_future(self.policy.engine.submit(request))


class BatchedTurns(TurnSource):
    """Turn source that samples turns of any policy in batches: a thread calls it with all waiting rows.

    A batch begins once no other row has arrived for 2 ms, since stepped rows return one after the other. It waits no
    longer than the previous batch took. If the policy fails on a batch, its rows are retried one by one, so that only
    the failing rows fail. Each row gets the version that sampled its first turn.

    Args:
        policy: callable that takes and returns any number of rows. Each row has a seed, and its sample must not depend
            on the other rows.
        version: see :class:`TurnSource`.
        on_death: see :class:`TurnSource`.
        max_batch_size: maximum number of rows in a batch; None takes all waiting rows.

    Raises:
        ValueError: if ``max_batch_size`` is below 1.
    """

    def __init__(
        self,
        policy: Policy,
        version: Callable[[], int],
        on_death: Callable[[], None] = lambda: None,
        *,
        max_batch_size: int | None = None,
    ):
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size} must be None or at least 1")
        super().__init__(policy, version, on_death)
        # The policy must not restart the engine in this thread; TurnSource.recover replaces its own recovery
        if self._recover is not None:
            self.policy = policy.get_new_version(recover=None)
        self.max_batch_size = max_batch_size
        self._rows: SimpleQueue[tuple[TensorDictBase, asyncio.Future] | None] = SimpleQueue()
        self._weights_lock = threading.Lock()
        self._batch_seconds = 0.05  # duration of the last batch; a guess before the first
        self._thread: PackageThread | None = None

    async def _sample(self, row: TensorDictBase) -> TensorDictBase:
        if self._thread is None:
            self._thread = PackageThread(self._run_batches, name="turns", stop=partial(self._rows.put, None))
            self._thread.start()
        turn = asyncio.get_running_loop().create_future()
        self._rows.put((row, turn))
        return await turn

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait for the current batch, and start no other within the context."""
        with self._weights_lock:
            yield

    def _run_batches(self) -> None:
        while (first := self._rows.get()) is not None:
            batch, closed = self._gather(first)
            if batch := [(row, turn) for row, turn in batch if not turn.cancelled()]:
                start = monotonic()
                rows, turns = zip(*batch, strict=True)
                with self._weights_lock:
                    outcomes = self._call(list(rows))
                self._batch_seconds = monotonic() - start
                _call_soon(turns[0], _deliver, turns, outcomes)
            if closed:
                return

    def _gather(self, first: tuple) -> tuple[list[tuple[TensorDictBase, asyncio.Future]], bool]:
        """Return the rows of the next batch, and whether the source is closed."""
        batch, deadline = [first], monotonic() + self._batch_seconds
        while len(batch) != self.max_batch_size and (remaining := deadline - monotonic()) > 0:
            # Let the event loop run its ready callbacks, which may submit more rows
            callbacks_ran = threading.Event()
            if not _call_soon(first[1], callbacks_ran.set):
                return [], False
            callbacks_ran.wait(remaining)
            # Take all rows that arrived, and stop if none arrives in the quiet time
            timeout = _QUIET_S
            while len(batch) != self.max_batch_size:
                try:
                    more = self._rows.get(timeout=timeout)
                except Empty:
                    break
                if more is None:
                    return batch, True
                batch.append(more)
                timeout = 0.0
            if timeout:
                break
        return batch, False

    def _call(self, rows: list[TensorDictBase]) -> list[TensorDictBase | Exception]:
        # Work on copies, since a failed turn must not change the row
        copies = [row.copy() for row in rows]
        for row in copies:
            if keys.POLICY_VERSION not in row.keys():
                row.set(keys.POLICY_VERSION, torch.tensor(self.version()))
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

    def close(self) -> None:
        """Stop the thread after its current batch."""
        self._rows.put(None)
        if self._thread is not None:
            self._thread.join(timeout=10.0)


def _call_soon(turn: asyncio.Future, function: Callable[..., Any], *args: Any) -> bool:
    """Call a function on a turn's loop; return False if the loop was closed, which cancelled the turn."""
    try:
        turn.get_loop().call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True


def _deliver(turns: tuple[asyncio.Future, ...], outcomes: list[TensorDictBase | Exception]) -> None:
    for turn, outcome in zip(turns, outcomes, strict=True):
        if turn.done():  # cancelled
            continue
        if isinstance(outcome, Exception):
            turn.set_exception(outcome)
        else:
            turn.set_result(outcome)


def make_turn_source(
    policy: Policy,
    version: Callable[[], int],
    on_death: Callable[[], None] = lambda: None,
    *,
    max_batch_size: int | None = None,
) -> TurnSource:
    """Return :class:`EngineTurns` for a :class:`vLLMWrapper` over an :class:`AsyncEngine`, else :class:`BatchedTurns`.

    Args:
        policy: callable that takes and returns rows.
        version: see :class:`TurnSource`.
        on_death: see :class:`TurnSource`.
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
        return EngineTurns(policy, version, on_death)
    return BatchedTurns(policy, version, on_death, max_batch_size=max_batch_size)

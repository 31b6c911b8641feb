"""Actor of a RayEngine: holds one engine, samples batches of requests for several clients, and reports its state."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from time import monotonic
from typing import Any

from torchrl_rloo.engines.base import AsyncEngine, Engine, Sample, WeightStep
from torchrl_rloo.engines.batched import BatchedEngine
from torchrl_rloo.engines.occupancy import Occupancy
from torchrl_rloo.engines.ray_messages import (
    AnswerBatch,
    CallResult,
    EngineFacts,
    EngineState,
    Failure,
    RequestBatch,
)
from torchrl_rloo.weight_update.object_store import ObjectStoreRelay

GATHER_S = 0.001  # time after the first answer in which others join its message
PERIOD_S = 0.01  # shortest time between two messages to a client
BEAT_S = 2.0  # time between two reports without answers
STREAM_S = 30.0  # time after which a client opens a new stream
_CLIENT_TIMEOUT_S = 20.0  # time without a stream after which a client counts as dead
_THREADS = 32  # threads for calls that block, such as a pause


class EngineActor:
    """Engine in an actor, for any number of clients.

    Its methods are coroutines of one event loop. Calls that block run on threads, so that a hung call delays no other.

    Args:
        name: name of the engine, for messages.
    """

    def __init__(self, name: str):
        self._name = name
        self._engine: AsyncEngine | None = None
        self._clients: dict[str, _Client] = {}
        self._relay = ObjectStoreRelay()
        self._occupancy = Occupancy()
        self._reports = count(1)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="engine-call")

    def __repr__(self) -> str:
        return self._name  # prefix of the actor's lines in the driver's log

    async def start(self, make_engine: Callable[[], Engine]) -> CallResult:
        """Make the engine, and return its :class:`EngineFacts`."""
        import ray

        def start() -> EngineFacts:
            engine = make_engine()
            self._engine = engine if isinstance(engine, AsyncEngine) else BatchedEngine(engine)
            return EngineFacts(
                engine.context_length,
                engine.vocab_size,
                tuple(engine.stop_ids),
                self._engine.counts_running_tokens,
                ray.get_runtime_context().get_node_id(),
                os.getpid(),
            )

        return await self._run(start)

    async def sample_many(self, client: str, batch: RequestBatch, cancelled: Sequence[int]) -> None:
        """Accept requests of a client and cancel others. The answers follow in the client's stream."""
        mailbox = self._client(client)
        for number, request in batch.requests():
            try:
                future = self._engine.submit(request)
            except Exception as error:
                mailbox.put(number, error)
            else:
                mailbox.inside[number] = future
                self._occupancy.add(1)
                future.add_done_callback(partial(self._answer, mailbox, number))
        for number in cancelled:
            if (future := mailbox.inside.get(number)) is not None:
                future.cancel()

    def _answer(self, mailbox: _Client, number: int, future: Future[Sample]) -> None:
        self._occupancy.add(-1)
        mailbox.answer(number, future)

    async def answers(self, client: str, stays: bool) -> AsyncIterator[tuple[EngineState, AnswerBatch]]:
        """Yield the engine's state and the client's answers as they come, and regularly without answers.

        The stream ends after a while, and without ``stays`` also once the client has nothing inside.
        """
        mailbox, end, idle = self._client(client), monotonic() + STREAM_S, False
        mailbox.streams += 1
        mailbox.wake.set()  # the client learns the state at once
        try:
            while monotonic() < end and not idle:
                answers = await mailbox.take()
                idle = not (stays or answers or mailbox.inside)
                yield self._state(), AnswerBatch.of(answers)
        finally:
            mailbox.streams -= 1
            mailbox.left_at = monotonic()
            self._expect(mailbox)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> CallResult:
        """Call a method of the engine on a thread, and report the state at once."""
        return self._spread(await self._run(partial(getattr(self._engine, method), *args, **kwargs)))

    async def close(self) -> CallResult:
        """Close the engine, and remove its files."""

        def close() -> None:
            self._engine.close()
            self._relay.close()

        return await self._run(close)

    async def update_weights(self, step: WeightStep, info: Mapping[str, Any], *, timeout: float) -> CallResult:
        """Do a step of an update, and report the state at once."""
        update = partial(self._relay.update_weights, self._engine, step, info, timeout=timeout)
        return self._spread(await self._run(update))

    async def check_health(self, timeout: float) -> CallResult:
        """Call the engine, unless a call is in progress for which it may answer no others."""
        return await self._run(lambda: None if self._engine.occupied else self._engine.check_health(timeout))

    def _spread(self, result: CallResult) -> CallResult:
        """Send the state to all clients."""
        for mailbox in self._clients.values():
            mailbox.wake.set()
        return result

    async def _run(self, call: Callable[[], Any]) -> CallResult:
        value = failure = None
        try:
            value = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except Exception as error:
            failure = Failure.of(error)
        return CallResult(value, failure, self._state())

    def _state(self) -> EngineState:
        if self._engine is None:
            return EngineState()
        return EngineState.of(self._engine, next(self._reports), self._occupancy.read())

    def _client(self, name: str) -> _Client:
        if name not in self._clients:
            self._clients[name] = _Client()
            self._expect(self._clients[name])  # its process may end before the first stream
        return self._clients[name]

    def _expect(self, client: _Client) -> None:
        """Look after a while whether a client has opened a stream."""
        asyncio.get_running_loop().call_at(client.left_at + _CLIENT_TIMEOUT_S, self._drop_silent_clients)

    def _drop_silent_clients(self) -> None:
        """Cancel the requests of clients that opened no stream for long, since their processes ended."""
        for name, client in list(self._clients.items()):
            if not client.streams and monotonic() - client.left_at >= _CLIENT_TIMEOUT_S:
                del self._clients[name]
                for future in list(client.inside.values()):
                    future.cancel()


class _Client:
    """Requests of one client, and answers that wait for its stream."""

    def __init__(self) -> None:
        self.inside: dict[int, Future[Sample]] = {}
        self.wake, self.streams, self.left_at = asyncio.Event(), 0, monotonic()
        self._loop = asyncio.get_running_loop()
        self._answers: list[tuple[int, Sample | BaseException]] = []
        self._waking, self._taken_at = False, 0.0

    def answer(self, number: int, future: Future[Sample]) -> None:
        """Keep the answer of a request. It may be called on any thread."""
        if future.cancelled():
            self.inside.pop(number, None)
        else:
            self.put(number, future.exception() or future.result())

    def put(self, number: int, answer: Sample | BaseException) -> None:
        """Keep an answer. It may be called on any thread."""
        self.inside.pop(number, None)
        self._answers.append((number, answer))
        if not self._waking:  # one message to the loop for all answers until it takes them
            self._waking = True
            self._loop.call_soon_threadsafe(self.wake.set)

    async def take(self) -> list[tuple[int, Sample | BaseException]]:
        """Wait for answers, for a change of the state, or for a while, and return the answers."""
        try:
            await asyncio.wait_for(self.wake.wait(), BEAT_S)
            await asyncio.sleep(max(GATHER_S, self._taken_at + PERIOD_S - monotonic()))
        except asyncio.TimeoutError:
            pass
        self._taken_at = monotonic()
        self.wake.clear()
        self._waking = False  # before the swap: an answer in between wakes the next call, which may find none
        found, self._answers = self._answers, []
        return found

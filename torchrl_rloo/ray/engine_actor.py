"""Actor of a RayEngine, and its messages: it holds one engine and samples batches of requests for several clients."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count, groupby, islice
from time import monotonic
from typing import Any, NamedTuple

from torchrl_rloo.engines.base import (
    AsyncEngine,
    BatchedEngine,
    Engine,
    EngineDeadError,
    EngineError,
    EngineLoad,
    EngineTimeoutError,
    Request,
    Sample,
    WeightStep,
)
from torchrl_rloo.engines.occupancy import Occupancy, Reading
from torchrl_rloo.ray.object_store import ObjectStoreRelay

GATHER_S = 0.001  # time after the first answer in which others join its message
PERIOD_S = 0.01  # shortest time between two messages to a client
BEAT_S = 2.0  # time between two reports without answers
STREAM_S = 30.0  # time after which a client opens a new stream
_CLIENT_TIMEOUT_S = 20.0  # time without a stream after which a client counts as dead
_THREADS = 32  # threads for calls that block, such as a pause
_ERRORS = {kind.__name__: kind for kind in (EngineError, EngineDeadError, EngineTimeoutError)}


class EngineState(NamedTuple):
    """State of the engine inside an actor, with the load and the occupancy of all clients."""

    number: int = 0  # a report with a lower number is older
    version: int = 0
    failed_version: int | None = None
    asleep: bool = False
    paused: bool = False
    load: EngineLoad = EngineLoad()
    occupancy: Reading = Reading()

    @classmethod
    def of(cls, engine: AsyncEngine, number: int, occupancy: Reading) -> EngineState:
        """Return the state of an engine. That of a dead one has an empty load."""
        try:
            load = engine.load()
        except EngineError:
            load = EngineLoad()
        return cls(number, engine.version, engine.failed_version, engine.asleep, engine.paused, load, occupancy)


class Failure(NamedTuple):
    """Error of a request or a call, as text, so that any process can read it."""

    kind: str
    text: str
    late: bool = False  # whether it was caused by a time-out

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an error. One of another class becomes an ``EngineError``."""
        if isinstance(error, EngineError):
            kind = next(name.__name__ for name in type(error).__mro__ if name.__name__ in _ERRORS)
            return cls(kind, str(error), isinstance(error.__cause__, EngineTimeoutError))
        return cls(EngineError.__name__, f"{type(error).__name__}: {error}")

    def error(self) -> EngineError:
        """Return the error."""
        error = _ERRORS[self.kind](self.text)
        error.__cause__ = EngineTimeoutError(self.text) if self.late else None
        return error


class RequestBatch(NamedTuple):
    """Several requests: the fields of each, and the ids of all prompts in int32."""

    fields: list[tuple]
    prompts: bytes

    @staticmethod
    def entry(number: int, request: Request) -> tuple[tuple, array]:
        """Encode one numbered request, or raise TypeError or OverflowError if its prompt is not of ids."""
        r = request
        options = (r.limit, r.seed, r.distribution, r.stop_ids, r.stop_strings, r.session, r.images)
        return (number, len(r.prompt), options), array("i", r.prompt)

    @classmethod
    def of(cls, entries: Iterable[tuple[tuple, array]]) -> RequestBatch:
        """Join encoded requests."""
        fields, prompts = [], array("i")
        for one, prompt in entries:
            fields.append(one)
            prompts.extend(prompt)
        return cls(fields, prompts.tobytes())

    def requests(self) -> list[tuple[int, Request]]:
        """Return the numbered requests."""
        prompts, found, start = _numbers("i", self.prompts), [], 0
        for number, length, options in self.fields:
            found.append((number, Request(prompts[start : start + length], *options)))
            start += length
        return found


class AnswerBatch(NamedTuple):
    """Several answers: the fields of each, and all tokens in int32 and log-probs in float64.

    The fields of a sample are its number, its numbers of tokens and log-probs, its finish, and ``(version, tokens)`` of
    each span of equal versions. An error has its :class:`Failure` in their place.
    """

    fields: list[tuple]
    tokens: bytes
    log_probs: bytes

    @classmethod
    def of(cls, answers: Sequence[tuple[int, Sample | BaseException]]) -> AnswerBatch:
        """Encode numbered answers; one that cannot be encoded becomes a failure."""
        fields, tokens, log_probs = [], array("i"), array("d")
        for number, answer in answers:
            if isinstance(answer, BaseException):
                fields.append((number, Failure.of(answer)))
                continue
            try:
                ids, values = array("i", answer.tokens), array("d", answer.log_probs)
                spans = [(version, len(list(equal))) for version, equal in groupby(answer.versions)]
                fields.append((number, len(ids), len(values), answer.finish, spans))
            except (AttributeError, TypeError, OverflowError) as error:
                text = f"the engine answered {answer!r:.100} ({error}); return a Sample of plain numbers"
                fields.append((number, Failure.of(EngineError(text))))
            else:
                tokens.extend(ids)
                log_probs.extend(values)
        return cls(fields, tokens.tobytes(), log_probs.tobytes())

    def answers(self) -> list[tuple[int, Sample | EngineError]]:
        """Return the numbered answers."""
        tokens, log_probs = iter(_numbers("i", self.tokens)), iter(_numbers("d", self.log_probs))
        found = []
        for number, *rest in self.fields:
            if len(rest) == 1:
                found.append((number, rest[0].error()))
                continue
            n, n_log_probs, finish, spans = rest
            versions = [version for version, count in spans for _ in range(count)]
            found.append((number, Sample([*islice(tokens, n)], [*islice(log_probs, n_log_probs)], finish, versions)))
        return found


class EngineFacts(NamedTuple):
    """Facts of a started engine that do not change."""

    context_length: int | None
    vocab_size: int | None
    stop_ids: tuple[int, ...]
    image_settings: dict[str, Any] | None
    counts_running_tokens: bool
    node_id: str
    pid: int


class CallResult(NamedTuple):
    """Result of a call of the engine, or its failure, and the state after it."""

    value: Any
    failure: Failure | None
    state: EngineState


def _numbers(kind: str, data: bytes) -> list:
    values = array(kind)
    values.frombytes(data)
    return values.tolist()


class EngineActor:
    """Engine in an actor, for any number of clients.

    Its methods are coroutines of one event loop. Calls that block run on threads, so that a hung call delays no other.
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
                engine.image_settings,
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

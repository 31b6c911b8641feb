"""Adapter that makes an engine with batched calls accept single requests."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from torchrl_rloo.engines.base import (
    AsyncEngine,
    Engine,
    EngineDeadError,
    EngineError,
    EngineLoad,
    InFlight,
    Request,
    Sample,
    WeightStep,
)
from torchrl_rloo.runtime.threads import PackageThread

_GATHER_S = 0.002  # time after the first request in which others join its batch


class BatchedEngine(AsyncEngine):
    """Engine that passes waiting requests to another engine's ``generate``, one batch at a time, on one thread.

    If a batch fails, its requests are repeated one by one, so that only the refused ones fail. A running batch cannot
    be cancelled. The deadline of a request is that of the engine's ``generate``. The engine keeps all of its state.
    """

    counts_running_tokens = False

    def __init__(self, engine: Engine):
        super().__init__(getattr(engine, "request_timeout", 600.0))
        self.sampler = engine
        self._requests: SimpleQueue[tuple[Request, Future[Sample]] | None] = SimpleQueue()
        self._counts = {"running": 0, "tokens": 0}
        self._finalizer = weakref.finalize(self, self._requests.put, None)
        PackageThread(_serve, engine, self._requests, self._counts, name="batched-engine", stop=self._finalizer).start()

    version = property(lambda self: self.sampler.version)
    failed_version = property(lambda self: self.sampler.failed_version)
    start_count = property(lambda self: self.sampler.start_count)
    in_process = property(lambda self: self.sampler.in_process)
    closed = property(lambda self: self.sampler.closed)
    asleep = property(lambda self: self.sampler.asleep)
    context_length = property(lambda self: self.sampler.context_length)
    vocab_size = property(lambda self: self.sampler.vocab_size)
    stop_ids = property(lambda self: self.sampler.stop_ids)

    def submit(self, request: Request) -> Future[Sample]:
        self._check_entry()
        future: Future[Sample] = Future()
        self._requests.put((request, future))
        return future

    def load(self) -> EngineLoad:
        """Return the work inside; running requests count their tokens once they have finished."""
        return EngineLoad(self._counts["running"], self._requests.qsize(), tokens=self._counts["tokens"])

    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        return self.sampler.update_weights(step, info, timeout=timeout)

    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        self.sampler.pause(in_flight, timeout=timeout)
        self.paused = True

    def resume(self) -> None:
        self.sampler.resume()
        self.paused = False

    def check_health(self, timeout: float = 10.0) -> None:
        self.sampler.check_health(timeout)

    def restart(self) -> None:
        self.sampler.restart()

    def close(self) -> None:
        self.sampler.close()
        self._finalizer()

    def sleep(self) -> None:
        self.sampler.sleep()

    def wake(self) -> None:
        self.sampler.wake()


def _serve(engine: Engine, requests: SimpleQueue, counts: dict[str, int]) -> None:
    """Sample batches until the queue has None, and fail the requests behind it."""
    ended = False
    while not ended and (entry := requests.get()) is not None:
        # Gather the requests that arrived during the last batch or just after the first
        time.sleep(_GATHER_S)
        batch = [entry]
        while True:
            try:
                entry = requests.get_nowait()
            except Empty:
                break
            if entry is None:
                ended = True
                break
            batch.append(entry)
        batch = [(request, future) for request, future in batch if future.set_running_or_notify_cancel()]
        # Sample them, and deliver the results
        counts["running"] = len(batch)
        outcomes = _sample(engine, [request for request, _ in batch], counts)
        counts["running"] = 0
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        del batch, entry, outcomes  # otherwise they live until the next request
    while not requests.empty():
        if (entry := requests.get()) is not None and entry[1].set_running_or_notify_cancel():
            entry[1].set_exception(EngineError(f"this {type(engine).__name__} is closed"))


def _sample(engine: Engine, requests: Sequence[Request], counts: dict[str, int]) -> list[Sample | Exception]:
    """Return a sample or an error per request, and count the tokens."""
    if not requests:
        return []
    try:
        samples = engine.generate(requests)
        if len(samples) != len(requests):
            raise EngineError(f"the engine answered {len(samples)} of {len(requests)} requests; answer each once")
        counts["tokens"] += sum(len(sample.tokens) for sample in samples)
        return samples
    except EngineDeadError as error:
        return [error] * len(requests)
    except Exception as error:
        if len(requests) == 1:
            return [error]
        return [_sample(engine, [request], counts)[0] for request in requests]

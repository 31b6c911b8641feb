"""Engines with scripted turns: one with latencies and failures, one with the log-probs of a model."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from threading import TIMEOUT_MAX, Condition, RLock, Thread, local
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from torchrl_rloo.engines.base import (
    AsyncEngine,
    EngineDeadError,
    EngineError,
    EngineLoad,
    EngineTimeoutError,
    InFlight,
    Request,
    Sample,
    SamplingClock,
    check_in_flight,
)
from torchrl_rloo.engines.base import WeightStep as Step
from torchrl_rloo.engines.head import padded_arguments, predicting_states, score_positions
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.images.encoder import PassImages, encoder_of
from torchrl_rloo.weight_update.protocol import OpenUpdate, StaleStepError, read_manifest, require_open
from torchrl_rloo.weight_update.transport import DirectReceiver


@dataclass(frozen=True)
class ScriptedTurn:
    """Outcome of a request.

    Args:
        tokens: ids to return as sampled. Those beyond the request's limit are dropped.
        log_probs: log-probs of the tokens, in nats; None means 0.
        latency: duration in seconds of the engine's clock, at least 0. Tokens arrive evenly in that time.
        finish: reason for the end.
        error: error to raise at the end instead; None raises none.
    """

    tokens: Sequence[int]
    log_probs: Sequence[float] | None = None
    latency: float = 0.0
    finish: Literal["stop", "length"] = "stop"
    error: Exception | None = None

    def __post_init__(self):
        if self.log_probs is not None and len(self.log_probs) != len(self.tokens):
            raise ValueError(f"log_probs has {len(self.log_probs)} entries for {len(self.tokens)} tokens")
        if not self.latency >= 0:
            raise ValueError(f"latency={self.latency} must be at least 0 seconds")


@dataclass
class _Run:
    """Request that plays its turn."""

    index: int
    turn: ScriptedTurn
    limit: int
    future: Future[Sample]
    start: float = inf
    versions: list[int] = field(default_factory=list)

    due = property(lambda self: self.start + self.turn.latency)

    def receive(self, now: float, version: int) -> None:
        """Record this version for the tokens that arrived since the last call."""
        n = min(len(self.turn.tokens), self.limit)
        if now < self.due:
            n = int(n * (now - self.start) / self.turn.latency + 1e-9)  # 28.999... is 29
        self.versions += [version] * (n - len(self.versions))

    def sample(self, finish: Literal["stop", "length", "abort"]) -> Sample:
        """Return the tokens received so far."""
        n = len(self.versions)
        log_probs = self.turn.log_probs or [0.0] * n
        return Sample(list(self.turn.tokens[:n]), list(log_probs[:n]), finish, self.versions)


class UpdateRecord(NamedTuple):
    """One step of an update: its name, its ``info`` without the payload, and whether the engine was paused."""

    step: Step
    info: dict[str, Any]
    paused: bool


class ScriptedEngine(AsyncEngine):
    """Engine that plays a script instead of a model, on one thread for any number of requests.

    A turn without latency is complete when :meth:`submit` returns, so such a script is deterministic. A script with
    latencies is deterministic if the test advances the clock and calls :meth:`tick`. Turns begin and end at the
    scripted times, even if the thread wakes up late, so ``request_seconds`` is that of an ideal engine.

    Args:
        script: function that returns (or raises) the turn for a request and its index, or a list of turns in order.
        clock: function that returns the time in seconds.
        max_concurrency: maximum number of running requests; None disables the limit.
        request_timeout: seconds of the engine's clock that a request may take; time in a pause does not count.
        update_latency: seconds of the engine's clock by step of an update; infinity hangs until the time-out.
        fail_updates: error that a step raises every time, or a list of errors and None, one per occurrence.

    Attributes:
        requests: all submitted requests.
        updates: all steps of updates, as :class:`UpdateRecord`.
        request_seconds: integral of the number of running requests up to the last event or :meth:`tick`.

    Example:
        >>> engine = ScriptedEngine(lambda request, index: ScriptedTurn(tokens=[7, index]))
        >>> [sample.tokens for sample in engine.generate([Request([1], limit=8, seed=0)] * 2)]
        [[7, 0], [7, 1]]
        >>> engine.close()
    """

    in_process = True

    def __init__(
        self,
        script: Callable[[Request, int], ScriptedTurn] | Sequence[ScriptedTurn],
        *,
        clock: Callable[[], float] = time.monotonic,
        max_concurrency: int | None = None,
        request_timeout: float = 600.0,
        update_latency: Mapping[Step, float] | None = None,
        fail_updates: Mapping[Step, Exception | list[Exception | None]] | None = None,
    ):
        super().__init__(request_timeout)
        if max_concurrency is not None and max_concurrency < 1:
            raise ValueError(f"max_concurrency={max_concurrency} must be None or at least 1")
        self._script, self.clock, self._slots = script, clock, max_concurrency or inf
        self.requests: list[Request] = []
        self.update_latency, self.fail_updates = dict(update_latency or {}), dict(fail_updates or {})
        self.updates: list[UpdateRecord] = []
        self._connection: dict[str, Any] | None = None
        self._update: OpenUpdate | None = None
        self._dead, self._frozen_at, self._hung = None, None, False
        self._sampling_clock, self._tokens = SamplingClock(clock), 0
        self._waiting: deque[_Run] = deque()
        self._running: dict[int, _Run] = {}
        self._due: list[tuple[float, int]] = []  # a heap; entries of runs that ended early stay until they are due
        self._deadlines: OrderedDict[int, tuple[float, _Run]] = OrderedDict()  # in seconds without pauses
        self._wakes_at = inf  # time of the clock at which the thread wakes up
        self._results: list[tuple[Future[Sample], Sample | Exception]] = []  # results of the call that holds the lock
        self._delivering = local()
        self.request_seconds, self._counted_to = 0.0, clock()
        lock = RLock()
        self._wake, self._waiters = Condition(lock), Condition(lock)  # of the thread; of pause and update_weights
        Thread(target=self._run, name="scripted-engine", daemon=True).start()

    def submit(self, request: Request) -> Future[Sample]:
        with self._now():
            self._check_entry()
            index = len(self.requests)
            self.requests.append(request)
        future = Future()
        future.add_done_callback(lambda f: self._drop(index) if f.cancelled() else None)
        try:
            turn = self._turn(request, index)
        except Exception as error:
            future.set_exception(error)
            return future
        with self._now():
            self._check_entry()  # the script, called without the lock, may have used the engine
            run = _Run(index, turn, request.limit, future)
            self._waiting.append(run)
            self._deadlines[index] = self._sampling_clock.read() + self.request_timeout, run
        return future

    def _turn(self, request: Request, index: int) -> ScriptedTurn:
        if callable(self._script):
            return self._script(request, index)
        if index >= len(self._script):
            raise EngineError(f"the script has {len(self._script)} turns, so there is none for request {index}")
        return self._script[index]

    def tick(self) -> None:
        """Process everything that is due. Call it after advancing a clock by hand."""
        with self._now():
            pass

    def _run(self) -> None:
        while not self.closed:
            self.tick()
            with self._wake:
                self._wakes_at = self._next_event()
                if not self.closed and (seconds := self._wakes_at - self.clock()) > 0:
                    self._wake.wait(min(seconds, TIMEOUT_MAX))

    def _next_event(self) -> float:
        """Return the time at which the next turn or deadline is due."""
        return min(self._next_due(), self._next_deadline())

    def _next_due(self) -> float:
        return self._due[0][0] if self._due and self._frozen_at is None else inf

    def _next_deadline(self) -> float:
        if not self._deadlines or self.paused:
            return inf
        return next(iter(self._deadlines.values()))[0] + self._sampling_clock.paused_seconds

    @contextmanager
    def _now(self) -> Iterator[float]:
        """Hold the lock, process what is due before and after, and deliver results at the end. Do not wait inside."""
        results = []
        try:
            with self._wake:
                now = self.clock()
                self._advance(now)
                try:
                    yield now
                finally:
                    self._advance(self.clock())
                    if self._next_event() < self._wakes_at:
                        self._wakes_at = -inf  # notify once
                        self._wake.notify()
                    self._waiters.notify_all()
                    results, self._results = self._results, results
        finally:
            self._deliver(results)

    def _advance(self, now: float) -> None:
        """End turns that are due or late, in the order of time. Each one starts a waiting request at once."""
        self._end_due(now)
        self._count(now)
        self._begin(now)
        self._end_due(now)  # turns without latency

    def _result(self, run: _Run, result: Sample | Exception) -> None:
        self._deadlines.pop(run.index, None)
        self._tokens += len(run.versions)
        self._results.append((run.future, result))

    def _end_due(self, now: float) -> None:
        while (time := self._next_event()) <= now:
            if self._next_deadline() < self._next_due():
                index, (_, run) = next(iter(self._deadlines.items()))
                self._count(time)
                self._running.pop(index, None)
                self._result(run, self._late())
            else:
                _, index = heappop(self._due)
                if index not in self._running:
                    continue
                self._count(time)
                run = self._running.pop(index)
                run.receive(time, self.version)
                finish = run.turn.finish if len(run.turn.tokens) <= run.limit else "length"
                self._result(run, run.turn.error or run.sample(finish))
            self._begin(time)

    def _begin(self, now: float) -> None:
        if self.paused or self._hung or self.failed_version is not None:
            return
        while self._waiting and len(self._running) < self._slots:
            run = self._waiting.popleft()
            if run.index in self._deadlines:  # neither cancelled nor late
                self._count(now)
                run.start, self._running[run.index] = now, run
                heappush(self._due, (run.due, run.index))

    def _count(self, now: float) -> None:
        """Add the time since the last change of the running requests. Call it before each change."""
        if self._frozen_at is None:
            self.request_seconds += (now - self._counted_to) * len(self._running)
        self._counted_to = now

    def _deliver(self, results: list[tuple[Future[Sample], Sample | Exception]]) -> None:
        """Deliver results without the lock. Results of requests that a callback submits follow after it."""
        if (queue := getattr(self._delivering, "queue", None)) is not None:
            queue += results
            return
        self._delivering.queue = queue = deque(results)
        while queue:
            future, result = queue.popleft()
            if future.set_running_or_notify_cancel():
                (future.set_exception if isinstance(result, Exception) else future.set_result)(result)
        self._delivering.queue = None

    def _receive(self, now: float) -> None:
        for run in self._running.values():
            run.receive(now if self._frozen_at is None else self._frozen_at, self.version)

    def _drop(self, index: int) -> None:
        with self._now():
            self._deadlines.pop(index, None)
            self._running.pop(index, None)

    def _fail_all(self, error: Exception) -> None:
        for _, run in list(self._deadlines.values()):
            self._result(run, error)
        self._running.clear()
        self._waiting.clear()

    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        """Pause sampling. Requests beyond ``max_concurrency`` keep waiting, and a time-out ends the pause."""
        check_in_flight(in_flight)
        self._answer(timeout, "pause()")
        with self._now() as now:
            self._check()
            self._thaw(now)
            self._receive(now)
            self._set_paused(True)
            if in_flight == "continue":
                self._frozen_at = now
            elif in_flight == "abort":
                self._abort_running()
        with self._waiters:
            paused = in_flight == "continue" or self._waiters.wait_for(lambda: not self._running, timeout)
        with self._now():
            self._check()
            if not paused:
                self._set_paused(False)
                raise EngineTimeoutError(f"{len(self._running)} requests run after timeout={timeout} s; not paused")

    def resume(self) -> None:
        """Continue sampling. After a failed update, frozen requests end as they are and waiting ones fail."""
        self._answer(self.request_timeout, "resume()")
        with self._now() as now:
            self._check()
            self._thaw(now)
            self._set_paused(False)
            if self.failed_version is not None:
                self._abort_running()
            if error := self._refusal(ready=True):
                self._fail_all(error)

    def _set_paused(self, paused: bool) -> None:
        self.paused = paused
        (self._sampling_clock.stop if paused else self._sampling_clock.start)()

    def _abort_running(self) -> None:
        for run in self._running.values():
            self._result(run, run.sample("abort"))
        self._running.clear()

    def _thaw(self, now: float) -> None:
        if self._frozen_at is not None:
            for run in self._running.values():
                run.start += now - self._frozen_at
            self._due = sorted((run.due, run.index) for run in self._running.values())
            self._frozen_at = None

    def update_weights(self, step: Step, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        """Do one step of a weight update. Checksums are compared with transport ``"direct"``, otherwise trusted."""
        info = dict(info or {})
        with self._now():
            self._check()
            if self.asleep and step != "abort":
                raise self._refusal(ready=True)
            self.updates.append(UpdateRecord(step, {k: v for k, v in info.items() if k != "payload"}, self.paused))
            update = self._update  # the update that this step belongs to
            if step in ("bucket", "finish"):
                require_open(update, info)
            if step == "finish" or (step == "start" and self._connection and not self._connection["staged"]):
                self.failed_version = info["version"]  # until finish succeeds, as in an engine with a model
        # Take the scripted time without the lock. Another call may abort the update in that time
        try:
            self._play(step, timeout)
            with self._now() as now:
                self._check()
                if update is not self._update:
                    raise StaleStepError(f"{step} is late; its update was aborted")
                return [{"rank": 0, **self._take(step, info, now)}]
        except BaseException:
            with self._now():
                if update is self._update:
                    self._update = None
            raise

    def _play(self, step: Step, timeout: float) -> None:
        """Wait and fail as scripted."""
        deadline, due = time.monotonic() + timeout, self.clock() + self.update_latency.get(step, 0.0)
        with self._waiters:
            while (self._hung or due > self.clock()) and self._refusal() is None:
                if (allowed := deadline - time.monotonic()) <= 0:
                    raise EngineTimeoutError(f"{step} was not done after timeout={timeout} s")
                self._waiters.wait(min(inf if self._hung else due - self.clock(), allowed))
        failure = self.fail_updates.get(step)
        if isinstance(failure, list):
            failure = failure.pop(0) if failure else None
        if failure is not None:
            raise failure

    def _take(self, step: Step, info: dict[str, Any], now: float) -> dict[str, Any]:
        if step == "bucket":
            direct = self._connection["transport"] == "direct"
            self._update.take(info, DirectReceiver({}, None, 0) if direct else None)
            return {}
        if step == "finish":
            self._update.complete()
        if step in ("finish", "adapter"):
            report = self._update.report() if step == "finish" else {"checksums": [info["checksum"]]}
            self._receive(now)
            self.version, self.failed_version, self._update = info["version"], None, None
            return report | {"version": self.version}
        self._update = None
        if step == "connect":
            self._connection = info | {"manifest": read_manifest(info)}
        elif step == "start" and self._connection is None:
            raise EngineError("no transport is connected; connect before start")
        elif step == "start":
            manifest, kind = self._connection["manifest"], self._connection.get("checksum", "xxh3")
            self._update = OpenUpdate(manifest, info["version"], verify=info.get("verify", True), kind=kind)
        return {}

    def sleep(self) -> None:
        """Put the engine to sleep, which is refused while requests are running."""
        self._answer(self.request_timeout, "sleep()")
        with self._now():
            self._check()
            if self._running:
                raise EngineError(f"{len(self._running)} requests are running; call pause() before sleep()")
            self.asleep = True

    def wake(self) -> None:
        self._answer(self.request_timeout, "wake()")
        self._check()
        self.asleep = False

    def kill(self, error: Exception | None = None) -> None:
        """Kill the engine. All requests and calls raise an ``EngineDeadError`` caused by ``error`` until a restart."""
        with self._now():
            self._dead = error or RuntimeError("kill() was called")
            self._fail_all(self._refusal())

    def hang(self) -> None:
        """Stop answering until :meth:`restart`: calls wait for their time-outs, requests for their deadlines."""
        with self._now() as now:
            self._hung = True
            if self._frozen_at is None:
                self._receive(now)
                self._frozen_at = now

    def _answer(self, timeout: float, what: str) -> None:
        """Wait until the engine no longer hangs."""
        count = self.start_count
        with self._waiters:
            if not self._waiters.wait_for(lambda: not self._hung or self._refusal(), timeout):
                raise EngineTimeoutError(f"{what} had no answer within timeout={timeout} s")
        if self.start_count != count:
            raise EngineDeadError(f"this {type(self).__name__} was restarted during {what}")

    def restart(self) -> None:
        """Start the engine again with ``version`` 0, after killing it if it is alive. A pause continues."""
        self.kill()
        with self._now():
            self._dead = self._frozen_at = self._connection = self._update = self.failed_version = None
            self.asleep = self._hung = False
            self._check()
            self.version, self.start_count = 0, self.start_count + 1

    def check_health(self, timeout: float = 10.0) -> None:
        try:
            self._answer(timeout, "check_health()")
        except EngineTimeoutError as error:
            raise EngineDeadError(f"this {type(self).__name__} hangs: {error}; call restart()") from error
        self._check()

    def load(self) -> EngineLoad:
        with self._now() as now:
            self._receive(now)
            waiting = len(self._deadlines) - len(self._running)
            tokens = self._tokens + sum(len(run.versions) for run in self._running.values())
            return EngineLoad(len(self._running), waiting, 0.0, 0, tokens)

    def close(self) -> None:
        with self._now():
            self.closed = True
            self._fail_all(self._refusal())
            self._wake.notify()

    def _refusal(self, ready: bool = False) -> EngineError | None:
        if self._dead is not None and not self.closed:
            death = EngineDeadError(f"this {type(self).__name__} is dead: {type(self._dead).__name__}: {self._dead}")
            death.__cause__ = self._dead
            return death
        return super()._refusal(ready)


class ScriptedModelEngine(TransformersEngine):
    """Engine that answers each prompt with one of its scripted turns, and receives weights like a real engine.

    The log-probs are those of the model with its current weights, so ratios, parity and the self-test of weight updates
    are meaningful.

    ``turns`` has the turns by the ids of a prompt, of which a request's seed chooses one. Other prompts, such as those
    of later turns, get one of ``default``.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        turns: Mapping[tuple[int, ...], Sequence[Sequence[int]]],
        default: Sequence[Sequence[int]],
    ):
        super().__init__(model, tokenizer)
        if not all(each and all(each) for each in (default, *turns.values())):
            raise ValueError("turns and default must have at least one turn each, of at least one token")
        self.turns, self.default = dict(turns), default

    @torch.no_grad()
    def _sample(self, requests: Sequence[Request]) -> list[Sample]:
        # Choose the turns
        chosen = [self.turns.get(tuple(request.prompt), self.default) for request in requests]
        turns = [list(each[request.seed % len(each)]) for each, request in zip(chosen, requests, strict=True)]
        played = [turn[: request.limit] for turn, request in zip(turns, requests, strict=True)]
        # Score them, padded on the right
        rows = [torch.tensor([*request.prompt, *turn]) for request, turn in zip(requests, played, strict=True)]
        starts = torch.tensor([len(request.prompt) for request in requests])[:, None]
        ends = torch.tensor([len(row) for row in rows])[:, None]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        places = torch.arange(tokens.shape[1])[None]
        positions = (places >= starts) & (places < ends)
        shown, encoder = {}, encoder_of(self.tokenizer)
        if encoder is not None:
            paths = [[image.path for image in request.images] for request in requests]
            shown = padded_arguments(self.model, PassImages(encoder, rows, paths))
        scores = self._score(tokens, positions, requests[0].distribution, shown)
        log_probs = scores.split([len(turn) for turn in played])
        return [
            Sample(turn, scores.tolist(), "stop" if turn == whole else "length", [self.version] * len(turn))
            for turn, whole, scores in zip(played, turns, log_probs, strict=True)
        ]

    def _score(
        self, tokens: torch.Tensor, positions: torch.Tensor, distribution: Any, shown: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the log-probs ``[N]`` of the tokens at ``positions``; 0 for a greedy distribution."""
        if distribution.temperature == 0:
            return torch.zeros(int(positions.sum()))
        tokens, positions = tokens.to(self.model.device), positions.to(self.model.device)
        states, _ = predicting_states(self.model, self.head, tokens, positions, **shown)
        scored = score_positions(self.model, self.head, tokens, positions, distribution, hidden=states, entropy=False)
        return scored.log_probs.float().cpu()

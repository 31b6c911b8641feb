"""Weight updates of ScriptedEngine, with scripted latencies and failures."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from math import inf
from threading import Condition
from typing import Any, NamedTuple

from torchrl_rloo.engines.base import AsyncEngine, EngineError, EngineTimeoutError
from torchrl_rloo.engines.base import WeightStep as Step
from torchrl_rloo.weight_update.protocol import OpenUpdate, StaleStepError, read_manifest, require_open
from torchrl_rloo.weight_update.transport import DirectReceiver


class UpdateRecord(NamedTuple):
    """One step of an update: its name, its ``info`` without the payload, and whether the engine was paused."""

    step: Step
    info: dict[str, Any]
    paused: bool


class ScriptedUpdates(AsyncEngine):
    """Base of ScriptedEngine that takes weight updates.

    Args:
        request_timeout: see :class:`AsyncEngine`.
        update_latency: seconds by step.
        fail_updates: error that a step raises every time, or a list of errors and None, one per occurrence.
    """

    clock: Callable[[], float]
    _waiters: Condition
    _hung: bool

    def __init__(
        self,
        request_timeout: float,
        update_latency: Mapping[Step, float],
        fail_updates: Mapping[Step, Exception | list[Exception | None]],
    ):
        super().__init__(request_timeout)
        self.update_latency, self.fail_updates = dict(update_latency), dict(fail_updates)
        self.updates: list[UpdateRecord] = []
        self._connection = self._update = None

    @abstractmethod
    def _now(self) -> AbstractContextManager[float]:
        """Hold the engine's lock within the context, and process what is due."""

    @abstractmethod
    def _receive(self, now: float) -> None:
        """Record the current version for the tokens that arrived until now."""

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

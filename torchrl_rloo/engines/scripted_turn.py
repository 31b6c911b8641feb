"""Parts of ScriptedEngine: the outcome of a request, and its progress."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from torchrl_rloo.engines.base import Sample


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
class ScriptedRun:
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

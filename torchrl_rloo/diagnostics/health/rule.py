"""Rules about the metrics of a run, and the events of a rule that fires or clears."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchrl_rloo.diagnostics.health.history import History

SEVERITIES = ("info", "warn", "stop")

Evidence = Mapping[str, float]
Condition = Callable[[History], Evidence | None]


@dataclass(frozen=True)
class Rule:
    """A condition on the metrics of a run, what it means, and what helps.

    Attributes:
        name: name in settings and logs.
        condition: function from the history of the metrics to the evidence, values by name, or None if the condition
            does not hold. It must be pure: it reads nothing else and keeps nothing.
        metrics: names of the metrics that it reads, with ``*`` for any text.
        sentence: what is wrong, in one sentence.
        remedy: what to do about it.
        healthy: range of a healthy run, in words.
        source: paper or page that the range comes from, or the measurement that it was chosen by.
        severity: ``"info"`` for a fact, ``"warn"`` for a likely failure, ``"stop"`` for a failure that no run recovers
            from.
        patience: consecutive evaluations with evidence before the rule fires.
        recovery: consecutive evaluations without evidence before it clears.
        at: metrics of which a step must have one for an evaluation of the rule. Empty takes the first of ``metrics``.
        clock: True if the metrics depend on the clock, such as seconds.

    Raises:
        ValueError: if a field is out of range.

    Example:
        >>> short = lambda history: {"length": now} if (now := history.now("completions/mean_length")) < 3 else None
        >>> rule = Rule(
        ...     "short", short, ("completions/mean_length",), "Completions are short.", "Read some.", "above 3", "own"
        ... )
        >>> rule.severity
        'warn'
    """

    name: str
    condition: Condition
    metrics: tuple[str, ...]
    sentence: str
    remedy: str
    healthy: str
    source: str
    severity: Literal["info", "warn", "stop"] = "warn"
    patience: int = 1
    recovery: int = 10
    at: tuple[str, ...] = ()
    clock: bool = False

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity={self.severity!r} of rule {self.name!r} must be one of {SEVERITIES}")
        if not self.metrics or isinstance(self.metrics, str):
            raise ValueError(f"metrics={self.metrics!r} of rule {self.name!r} must be a tuple of at least one name")
        if self.patience < 1 or self.recovery < 1:
            raise ValueError(
                f"patience={self.patience} and recovery={self.recovery} of rule {self.name!r} must be at least 1"
            )
        if not self.name or self.name in SEVERITIES:
            raise ValueError(f"name={self.name!r} of a rule must be a text other than {SEVERITIES}")


@dataclass(frozen=True)
class Event:
    """A rule that fired or cleared at a step.

    Attributes:
        step: number of the step.
        rule: name of the rule.
        severity: severity of the rule.
        state: ``"fired"`` or ``"cleared"``.
        sentence: what is wrong.
        remedy: what to do about it.
        evidence: values by name.
        since: first step of the evidence; the step itself for a rule that cleared.
    """

    step: int
    rule: str
    severity: str
    state: Literal["fired", "cleared"]
    sentence: str
    remedy: str
    evidence: Evidence
    since: int

    def record(self) -> dict[str, Any]:
        """Return the event as a line of ``health.jsonl``; values that are not finite become None."""
        evidence = {name: value if math.isfinite(value) else None for name, value in self.evidence.items()}
        names = ("step", "rule", "severity", "state", "sentence", "remedy")
        return {name: getattr(self, name) for name in names} | {"evidence": evidence}

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value:.3g}" for name, value in self.evidence.items())
        if self.state == "cleared":
            return f"step {self.step}: {self.rule} is over"
        shown = f" ({values})" if values else ""
        return f"step {self.step}, {self.severity}, {self.rule}: {self.sentence}{shown} {self.remedy}"

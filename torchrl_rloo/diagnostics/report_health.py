"""Events of the health rules of a run, as pages and the report show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HEALTH_FILE = "health.jsonl"
SEVERITIES = ("stop", "warn", "info")  # most urgent first
_LONGEST = 1000  # characters of a sentence


@dataclass(frozen=True)
class HealthEvent:
    """A rule that fired, and the step at which it cleared; None if it has not.

    Attributes:
        step: step at which it fired.
        rule: name of the rule.
        severity: one of :data:`SEVERITIES`.
        sentence: what is wrong.
        remedy: what to do.
        evidence: metrics by name, at that step.
        cleared: step at which it was over.
    """

    step: int
    rule: str
    severity: str
    sentence: str
    remedy: str
    evidence: dict[str, float]
    cleared: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the event as plain data."""
        return dict(vars(self))


def read_events(records: Sequence[Mapping[str, Any]]) -> list[HealthEvent]:
    """Return the events of a health file: those that last first, the most urgent first, then the newest.

    Args:
        records: lines of :data:`HEALTH_FILE`. Lines of another form are ignored.

    Example:
        >>> fired = {"step": 3, "rule": "entropy", "severity": "warn", "state": "fired", "sentence": "It collapsed."}
        >>> [event.cleared for event in read_events([fired, fired | {"step": 9, "state": "cleared"}])]
        [9]
    """
    ended: list[HealthEvent] = []
    lasting: dict[str, HealthEvent] = {}
    for record in records:
        event = _parse(record)
        if event is None:
            continue
        before = lasting.pop(event.rule, None)
        if record.get("state") == "cleared" and before is not None:
            ended.append(HealthEvent(**vars(before) | {"cleared": event.step}))
        elif record.get("state") == "fired":
            lasting[event.rule] = event if before is None else before
    urgency = SEVERITIES.index
    return [
        *sorted(lasting.values(), key=lambda event: (urgency(event.severity), -event.step)),
        *sorted(ended, key=lambda event: (urgency(event.severity), -event.step)),
    ]


def _parse(record: Mapping[str, Any]) -> HealthEvent | None:
    step, severity, evidence = record.get("step"), record.get("severity"), record.get("evidence")
    if type(step) is not int or not isinstance(record.get("rule"), str):
        return None
    numbers = evidence.items() if isinstance(evidence, Mapping) else ()
    return HealthEvent(
        step=step,
        rule=record["rule"][:_LONGEST],
        severity=severity if severity in SEVERITIES else "info",
        sentence=str(record.get("sentence") or record["rule"])[:_LONGEST],
        remedy=str(record.get("remedy") or "")[:_LONGEST],
        evidence={str(name)[:_LONGEST]: value for name, value in numbers if type(value) in (int, float)},
    )

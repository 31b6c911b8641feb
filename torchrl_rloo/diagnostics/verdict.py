"""Verdict on a run in two sentences, from its metrics and health events: whether it learned, and what limited it."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchrl_rloo.diagnostics.curves import EVAL_DETAILS, Series, match_names
from torchrl_rloo.functional.statistics import Interval
from torchrl_rloo.runtime.files import SAFE_FLAGS

HEALTH_FILE = "health.jsonl"
SEVERITIES = ("stop", "warn", "info")  # most urgent first
_LONGEST = 1000  # characters of a sentence
_TAIL = 1 << 18  # bytes of the file that are read
_LEAST = 10  # steps from which rewards are compared
_HEADLINES = ("eval/greedy", "eval/sampled")


@dataclass(frozen=True)
class HealthEvent:
    """A rule that fired at a step, and the step at which it cleared; None if it has not."""

    step: int
    rule: str
    severity: str
    sentence: str
    remedy: str
    cleared: int | None = None


def read_events(records: Iterable[Mapping[str, Any]]) -> list[HealthEvent]:
    """Return the events of a health file's records: those that last first, the most urgent first, then the newest.

    Example:
        >>> fired = {"step": 3, "rule": "entropy", "severity": "warn", "state": "fired", "sentence": "It collapsed."}
        >>> [event.cleared for event in read_events([fired, fired | {"step": 9, "state": "cleared"}])]
        [9]
    """
    ended: list[HealthEvent] = []
    lasting: dict[str, HealthEvent] = {}
    for record in records:
        step, rule, severity = (record.get(name) for name in ("step", "rule", "severity"))
        if type(step) is not int or not isinstance(rule, str):
            continue
        before = lasting.pop(rule[:_LONGEST], None)
        if record.get("state") == "cleared" and before is not None:
            ended.append(replace(before, cleared=step))
        elif record.get("state") == "fired":
            texts = (str(record.get("sentence") or rule)[:_LONGEST], str(record.get("remedy") or "")[:_LONGEST])
            event = HealthEvent(step, rule[:_LONGEST], severity if severity in SEVERITIES else "info", *texts)
            lasting[event.rule] = before or event

    def urgency(event: HealthEvent) -> tuple[int, int]:
        return SEVERITIES.index(event.severity), -event.step

    return sorted(lasting.values(), key=urgency) + sorted(ended, key=urgency)


def read_health(path: Path) -> list[HealthEvent]:
    """Return the events at the end of a health file, without damaged lines; none if it is missing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | SAFE_FLAGS)
    except OSError:
        return []
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return []
        start = max(0, status.st_size - _TAIL)
        file.seek(start)
        lines = file.read(_TAIL).split(b"\n")
    records = []
    for line in lines[1 if start else 0 : -1]:
        with suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return read_events(record for record in records if isinstance(record, dict))


class Change(NamedTuple):
    """First and last value of a metric with their intervals, and the 95 % interval of their difference."""

    name: str
    steps: tuple[int, int]
    first: Interval
    last: Interval
    difference: Interval

    @property
    def direction(self) -> int:
        """1 if the interval of the difference is above 0, -1 if it is below, 0 if it has 0 or there is none."""
        return int(self.difference.low > 0) - int(self.difference.high < 0)


def difference_interval(first: Interval, last: Interval) -> Interval:
    """Return ``last - first`` with an interval from those of the two means (Newcombe 1998, method 10).

    It takes the two as independent. Evaluations of the same prompts are not, so it is rather too wide.

    Example:
        >>> low, high = difference_interval(Interval(0.2, 0.1, 0.3), Interval(0.8, 0.7, 0.9))[1:]
        >>> round(low, 3), round(high, 3)
        (0.459, 0.741)
    """
    mean = last.mean - first.mean
    low = mean - math.hypot(last.mean - last.low, first.high - first.mean)
    return Interval(mean, low, mean + math.hypot(last.high - last.mean, first.mean - first.low))


def evaluation_changes(series: Series) -> list[Change]:
    """Return the changes of the held-out scores, the headline first; bounds are NaN if none were logged."""
    bounds = {f"{name}_{end}" for name in series.names for end in ("low", "high")}
    hidden = {*bounds, *match_names(series.names, EVAL_DETAILS)}
    names = [name for name in series.names if name.startswith("eval/") and name not in hidden]
    names.sort(key=lambda name: _HEADLINES.index(name) if name in _HEADLINES else len(_HEADLINES))
    return [_evaluation_change(series, name) for name in names]


def _evaluation_change(series: Series, name: str) -> Change:
    steps, means = series.column(name)
    ends = []
    for place in (0, -1):
        bounds = []
        for end in ("low", "high"):
            its_steps, values = series.column(f"{name}_{end}")
            found = np.flatnonzero(its_steps == steps[place])
            bounds.append(float(values[found[place]]) if len(found) else math.nan)
        ends.append(Interval(float(means[place]), *bounds))
    return Change(name, (int(steps[0]), int(steps[-1])), *ends, difference_interval(*ends))


def verdict(series: Series, events: Sequence[HealthEvent] = (), limit: str = "") -> tuple[str, str]:
    """Return two sentences: whether the run learned, with an interval, and what to look at or what it waited for.

    Example:
        >>> scores = ((0, 0.1), (9, 0.8))
        >>> rows = [{"step": i, "eval/greedy": s, "eval/greedy_low": s - 0.1, "eval/greedy_high": s + 0.1}
        ...         for i, s in scores]
        >>> verdict(Series(rows))[0]
        'Learned: eval/greedy rose from 0.1 at step 0 to 0.8 at step 9, by 0.7 (95 % interval 0.559 to 0.841).'
    """
    return _learned(series), _look_at(events, limit)


def _learned(series: Series) -> str:
    changes = [change for change in evaluation_changes(series) if change.steps[0] < change.steps[1]]
    if not changes:
        rewards = series.column("reward")[1]
        part = max(1, len(rewards) // 5)
        if len(rewards) < _LEAST:
            return f"Too early to tell: {len(rewards)} steps have a reward, and fewer than two were evaluated."
        first, last = float(rewards[:part].mean()), float(rewards[-part:].mean())
        return f"Not evaluated on held-out prompts: the mean training reward went from {first:.3g} to {last:.3g}."
    change = changes[0]
    first, last, difference = change.first.mean, change.last.mean, change.difference
    span = f"from {first:.3g} at step {change.steps[0]} to {last:.3g} at step {change.steps[1]}"
    if math.isnan(difference.low + difference.high):
        return f"Unsure: {change.name} went {span}, and no interval was logged."
    bounds = f"95 % interval {difference.low:.3g} to {difference.high:.3g}"
    if change.direction == 0:
        return f"No change shown: {change.name} went {span}, a difference of {difference.mean:.3g} ({bounds})."
    word, verb = ("Learned", "rose") if change.direction > 0 else ("Got worse", "fell")
    return f"{word}: {change.name} {verb} {span}, by {abs(difference.mean):.3g} ({bounds})."


def _look_at(events: Sequence[HealthEvent], limit: str) -> str:
    """Return the most urgent rule that still holds, or what the run waited for."""
    lasting = [event for event in events if event.cleared is None]
    urgent = [event for event in lasting if event.severity != "info"]
    if chosen := urgent or (lasting if not limit else []):
        more = f" ({len(chosen) - 1} more below)" if len(chosen) > 1 else ""
        texts = (text.strip().rstrip(".") + "." for text in (chosen[0].sentence, chosen[0].remedy) if text.strip())
        return f"Look at {chosen[0].rule}{more}: {' '.join(texts)}"
    if limit:
        return limit
    ended = sum(event.severity != "info" for event in events)
    if ended:
        return f"Nothing stands out at the end; {ended} warnings fired and cleared on the way."
    return "No health rule holds."

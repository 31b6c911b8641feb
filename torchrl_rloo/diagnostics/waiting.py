"""Table of waits: who waits for whom over some steps of a run, and one sentence about the limit.

An entry is a dictionary of a step's metrics and timings, as a run logs them. All shares are of wall-clock time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchrl_rloo.diagnostics.waiting_limit import name_limit

Entry = Mapping[str, Any]

_PHASES = {
    "rows_wait": "waits for rows",
    "collect": "takes rows",
    "train": "trains",
    "sync": "updates the samplers",
    "eval": "evaluates",
    "checkpoint": "saves checkpoints",
    "other": "other",
}
_WORKER = {
    "engine": "wait for an engine",
    "tools": "wait for tools",
    "environment": "wait for the environment",
    "rewards": "wait for rewards",
    "group": "wait for the rest of the group",
    "place": "wait for a place",
    "idle": "idle, without a group",
}
_WAIT = "time/collect/wait"
_NO_SIGNAL = tuple(f"count/zero_signal/{why}" for why in ("all_wrong", "all_right", "flat", "unanswered"))
_STALE_TOKENS = re.compile(r"staleness/tokens_(\d+)")


class WaitRow(NamedTuple):
    """Line of the table: who, in which state, and for how long or how many."""

    who: str
    state: str
    value: str


@dataclass
class WaitSummary:
    """Means over some steps; what was not measured is missing.

    Attributes:
        steps: number of the first and of the last step.
        seconds: mean seconds of a step.
        trainer: share of the time by phase; they sum to 1.
        worker: share of a worker's time by state; they sum to 1.
        latency: mean, p90 and maximum in seconds by kind. The p90 is the mean of those of the steps.
        engine: ``busy`` and ``busy_min`` as shares of the time, ``in_flight`` requests.
        finished_groups: mean number of finished groups that waited for the trainer; None if unknown.
        groups: number of groups kept, dropped and redrawn.
        staleness: share of the trained tokens by staleness; by the rows' mean only, it has one entry ``"mean"``.
    """

    steps: tuple[int, int]
    seconds: float
    trainer: dict[str, float]
    worker: dict[str, float] = field(default_factory=dict)
    latency: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    engine: dict[str, float] = field(default_factory=dict)
    finished_groups: float | None = None
    groups: dict[str, int] = field(default_factory=dict)
    staleness: dict[str, float] = field(default_factory=dict)


def join_entries(history: Iterable[Entry], timings: Iterable[Entry]) -> list[dict[str, Any]]:
    """Return one entry per step from two lists of entries, each with ``step``.

    Example:
        >>> join_entries([{"step": 1, "reward": 0.5}], [{"step": 1, "time/step": 2.0}])
        [{'step': 1, 'reward': 0.5, 'time/step': 2.0}]
    """
    joined: dict[int, dict[str, Any]] = {}
    for entries in (history, timings):
        for entry in entries:
            joined.setdefault(entry["step"], {}).update(entry)
    return [joined[step] for step in sorted(joined)]


def summarize_waits(entries: Sequence[Entry], before: Entry | None = None) -> WaitSummary | None:
    """Return the means over steps.

    Args:
        entries: entry of each step.
        before: entry before the first one, from which counters are subtracted. None subtracts nothing from the entries
            of a run's first steps, and otherwise those of the first entry.

    Returns:
        The summary, or None if no step has timings.
    """
    timed = [entry for entry in entries if entry["step"] > 0 and _number(entry, "time/step") > 0]
    if not timed:
        return None
    seconds = math.fsum(entry["time/step"] for entry in timed)
    if before is None and entries[0]["step"] > 1:
        before = entries[0]
    return WaitSummary(
        steps=(timed[0]["step"], timed[-1]["step"]),
        seconds=seconds / len(timed),
        trainer=_trainer_shares(timed, seconds),
        worker={state: share for state in _WORKER if (share := _mean(timed, f"wait/worker/{state}")) is not None},
        latency=_latencies(timed),
        engine={
            name: mean
            for name in ("busy", "busy_min", "in_flight")
            if (mean := _mean(timed, f"engine/{name}")) is not None
        },
        finished_groups=_mean(timed, "queue/finished_groups"),
        groups=_group_counts(entries[-1], before or {}),
        staleness=_staleness(timed),
    )


def waiting_rows(entries: Sequence[Entry], before: Entry | None = None) -> list[WaitRow]:
    """Return the lines of the table, see :func:`summarize_waits`; none if no step has timings.

    Example:
        >>> entry = {"step": 1, "time/step": 4.0, "time/collect": 3.0, "time/collect/wait": 3.0, "time/train": 1.0}
        >>> for row in waiting_rows([entry]):
        ...     print(*row)
        trainer waits for rows 75 %
        trainer trains 25 %
    """
    summary = summarize_waits(entries, before)
    return [] if summary is None else _rows(summary)


def waiting_table(entries: Sequence[Entry], before: Entry | None = None) -> str:
    """Return the table as text, with a sentence about the limit; empty if no step has timings."""
    summary = summarize_waits(entries, before)
    if summary is None:
        return ""
    rows, (first, last) = _rows(summary), summary.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    width = max(len(row.state) for row in rows)
    lines = [f"who waits for whom in {steps}, {summary.seconds:.3g} s a step"]
    previous = None
    for who, state, value in rows:
        lines.append(f"  {who if who != previous else '':<8}  {state:<{width}}  {value}")
        previous = who
    return "\n".join([*lines, f"  {limiting_sentence(summary)}"])


def limiting_sentence(summary: WaitSummary) -> str:
    """Return one sentence: what limits the run, by how much, and what would help."""
    return name_limit(summary.trainer, summary.worker, summary.engine)


def _rows(summary: WaitSummary) -> list[WaitRow]:
    rows = [
        WaitRow("trainer", _PHASES.get(phase, phase), _percent(share))
        for phase, share in summary.trainer.items()
        if share >= 0.005 or phase in ("rows_wait", "train")
    ]
    rows += [
        WaitRow("workers", _WORKER[state], _percent(share) + _seconds(summary.latency.get(state)))
        for state, share in summary.worker.items()
        if share >= 0.005 or state in summary.latency or state == "idle"
    ]
    if "busy" in summary.engine:
        least = f", the least busy {_percent(summary.engine['busy_min'])}" if "busy_min" in summary.engine else ""
        rows.append(WaitRow("engines", "busy", _percent(summary.engine["busy"]) + least))
    if "in_flight" in summary.engine:
        rows.append(WaitRow("engines", "requests in flight", f"{summary.engine['in_flight']:.3g} an engine"))
    if summary.finished_groups is not None:
        rows.append(WaitRow("groups", "finished, wait for the trainer", f"{summary.finished_groups:.3g}"))
    if summary.groups:
        kept = summary.groups["kept"] / (sum(summary.groups.values()) or 1)
        numbers = "{kept}, {dropped}, {redrawn}".format(**summary.groups)
        rows.append(WaitRow("groups", "kept, dropped, drawn again", f"{numbers}; {_percent(kept)} kept"))
    if "mean" in summary.staleness:
        rows.append(WaitRow("tokens", "mean staleness of their rows", f"{summary.staleness['mean']:.3g}"))
    elif summary.staleness:
        shares = ", ".join(f"{age}: {_percent(share)}" for age, share in summary.staleness.items())
        rows.append(WaitRow("tokens", "by staleness", shares))
    return rows


def _trainer_shares(entries: Sequence[Entry], seconds: float) -> dict[str, float]:
    """Return the share of each phase, with the wait for rows apart from the rest of ``collect``."""
    names = [name for entry in entries for name in entry if re.fullmatch(r"time/[^/]+", name)]
    phases = [name.removeprefix("time/") for name in dict.fromkeys(names) if name != "time/step"]
    spent = {phase: math.fsum(_number(entry, f"time/{phase}") for entry in entries) for phase in phases}
    if "collect" in spent and any(_WAIT in entry for entry in entries):
        waited = math.fsum(_number(entry, _WAIT) for entry in entries)
        spent["rows_wait"] = min(waited, spent["collect"])
        spent["collect"] -= spent["rows_wait"]
    spent["other"] = max(0.0, seconds - math.fsum(spent.values()))
    ordered = sorted(spent, key=lambda phase: list(_PHASES).index(phase) if phase in _PHASES else len(_PHASES) - 2)
    return {phase: spent[phase] / seconds for phase in ordered}


def _latencies(entries: Sequence[Entry]) -> dict[str, tuple[float, float, float]]:
    found = {}
    for kind in _WORKER:
        mean, p90 = (_mean(entries, f"time/{kind}/{what}") for what in ("mean", "p90"))
        if mean is not None:
            found[kind] = (mean, p90, max(_number(entry, f"time/{kind}/max") for entry in entries))
    return found


def _group_counts(last: Entry, before: Entry) -> dict[str, int]:
    """Return the groups that were trained on, sampled in vain, and drawn again."""
    if "count/ledger/drawn" not in last:
        return {}

    def grown(*names: str) -> int:
        return round(sum(_number(last, name) - _number(before, name) for name in names))

    no_signal = grown(*_NO_SIGNAL, "count/refill/stale_groups")
    return {
        "kept": max(0, grown("count/ledger/acknowledged") - no_signal),
        "dropped": no_signal + grown("count/collector/cancelled_groups"),
        "redrawn": grown("count/ledger/requeued"),
    }


def _staleness(entries: Sequence[Entry]) -> dict[str, float]:
    names = {found[1]: found[0] for entry in entries for name in entry if (found := _STALE_TOKENS.fullmatch(name))}
    if names:
        steps = [entry for entry in entries if any(name in entry for name in names.values())]
        return {
            age: math.fsum(_number(entry, names[age]) for entry in steps) / len(steps) for age in sorted(names, key=int)
        }
    mean = _mean(entries, "staleness")
    return {} if mean is None else {"mean": mean}


def _mean(entries: Sequence[Entry], name: str) -> float | None:
    """Return the mean of a value, weighed by the durations of the steps that have it; None if none has."""
    pairs = [(entry["time/step"], entry[name]) for entry in entries if _is_number(entry.get(name))]
    weight = math.fsum(seconds for seconds, _ in pairs)
    return math.fsum(seconds * value for seconds, value in pairs) / weight if pairs else None


def _number(entry: Entry, name: str) -> float:
    value = entry.get(name)
    return value if _is_number(value) else 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _seconds(latency: tuple[float, float, float] | None) -> str:
    return "" if latency is None else "; mean {:.2g} s, p90 {:.2g} s, longest {:.2g} s".format(*latency)

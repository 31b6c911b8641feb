"""Waits of a run: a table of who waits for whom over some steps, and one sentence about the limit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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
# Sentence by the trainer's longest phase
_LIMITS = {
    "rows_wait": "Sampling limits: the trainer waited {} of the time",
    "train": "Training limits: it took {} of the time; add ranks, or enlarge passes.",
    "sync": "Weight updates limit: they took {} of the time; raise sampler.sync_every, or use another transport.",
    "eval": "Evaluation limits: it took {} of the time; raise eval.every, or evaluate on fewer prompts.",
    "checkpoint": "Checkpoints limit: they took {} of the time; raise checkpoint.every.",
    "collect": "Taking rows limits: fetching and scoring them took {} of the time; add ranks.",
}
# What conversations mostly wait for while the trainer waits for rows, and the remedy
_CAUSES = {
    "engine": ("engines", "add engines, or shorten completions"),
    "tools": ("tools", "make tools faster"),
    "environment": ("the environment", "make its functions faster, or add workers"),
    "rewards": ("rewards", "make reward functions faster, or raise collector.reward_threads"),
    "group": ("the wait for the rest of their group", "set collector.min_members, or limit lengths"),
    "place": ("the wait for a place", "raise collector.max_in_flight"),
}
_MUCH = 0.25  # share of the time from which something is worth a remark
_WAIT = "time/collect/wait"
_NO_SIGNAL = tuple(f"count/zero_signal/{why}" for why in ("all_wrong", "all_right", "flat", "unanswered"))
_STALE_TOKENS = re.compile(r"staleness/tokens_(\d+)")


class Waits(NamedTuple):
    """Table of waits: its title, rows of who does what for how long, and the sentence about the limit."""

    title: str
    rows: list[tuple[str, str, str]]
    sentence: str


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


def summarize_waits(entries: Sequence[Entry], before: Entry | None = None) -> Waits | None:
    """Return the table of means over some steps, or None if no step has timings; see :func:`waiting_table`.

    Example:
        >>> entry = {"step": 1, "time/step": 4.0, "time/collect": 3.0, "time/collect/wait": 3.0, "time/train": 1.0}
        >>> for row in summarize_waits([entry]).rows:
        ...     print(*row)
        trainer waits for rows 75 %
        trainer trains 25 %
    """
    timed = [entry for entry in entries if entry["step"] > 0 and _number(entry, "time/step") > 0]
    if not timed:
        return None
    if before is None and entries[0]["step"] > 1:
        before = entries[0]
    seconds = math.fsum(entry["time/step"] for entry in timed)
    trainer = trainer_shares(timed, seconds)
    worker = {state: share for state in _WORKER if (share := _mean(timed, f"wait/worker/{state}")) is not None}
    rows = [
        ("trainer", _PHASES.get(phase, phase), _percent(share))
        for phase, share in trainer.items()
        if share >= 0.005 or phase in ("rows_wait", "train")
    ]
    latencies = {state: _latency(timed, state) for state in worker}
    rows += [
        ("workers", _WORKER[state], _percent(share) + latencies[state])
        for state, share in worker.items()
        if share >= 0.005 or latencies[state] or state == "idle"
    ]
    rows += [*_engine_rows(timed), *_group_rows(timed, entries[-1], before or {}), *_staleness_rows(timed)]
    first, last = timed[0]["step"], timed[-1]["step"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    title = f"who waits for whom in {steps}, {seconds / len(timed):.3g} s a step"
    return Waits(title, rows, name_limit(trainer, worker))


def waiting_table(entries: Sequence[Entry], before: Entry | None = None) -> str:
    """Return who waits for whom over some steps as a text, with a sentence about the limit.

    Args:
        entries: one dictionary per step with ``step`` and ``time/step``, and the timings of its parts.
        before: entry before the first, from which counters grow. None takes the first unless it is step 1.

    Returns:
        The table, empty if no step has timings.

    Example:
        >>> print(waiting_table([{"step": 1, "time/step": 4.0, "time/train": 4.0}]))
        who waits for whom in step 1, 4 s a step
          trainer   trains  100 %
          Training limits: it took 100 % of the time; add ranks, or enlarge passes.
    """
    waits = summarize_waits(entries, before)
    if waits is None:
        return ""
    width = max(len(state) for _, state, _ in waits.rows)
    lines, previous = [waits.title], None
    for who, state, value in waits.rows:
        lines.append(f"  {who if who != previous else '':<8}  {state:<{width}}  {value}")
        previous = who
    return "\n".join([*lines, f"  {waits.sentence}"])


def name_limit(trainer: Mapping[str, float], worker: Mapping[str, float]) -> str:
    """Return what limits a run, by the shares of the trainer's phases and of the workers' states.

    Example:
        >>> name_limit({"rows_wait": 0.3, "train": 0.7}, {})
        'Training limits: it took 70 % of the time; add ranks, or enlarge passes.'
    """
    limit = max(trainer, key=trainer.get)
    share = _percent(trainer[limit])
    sentence = _LIMITS.get(limit, f"The phase {limit!r} limits: it took {{}} of the time.").format(share)
    if limit == "rows_wait":
        active = {state: worker[state] for state in _CAUSES if worker.get(state)}
        if active:  # compare with the time in which there were conversations at all
            state = max(active, key=active.get)
            cause, remedy = _CAUSES[state]
            part = _percent(active[state] / sum(active.values()))
            sentence += f", and conversations spent {part} of their time on {cause}; {remedy}."
        else:
            sentence += "; add engines or workers."
    # Advise to sample ahead if trainer and workers wait for each other much of the time
    if (
        limit in ("rows_wait", "train")
        and min(trainer.get("rows_wait", 0.0), trainer.get("train", 0.0), worker.get("idle", 0.0)) >= _MUCH
    ):
        idle = _percent(worker["idle"])
        sentence += f" Workers were idle {idle}; collector.max_staleness=1 samples while the trainer trains."
    return sentence


def trainer_shares(entries: Sequence[Entry], seconds: float) -> dict[str, float]:
    """Return the share of each phase, with the wait for rows apart from the rest of ``collect``."""
    names = [name for entry in entries for name in entry if re.fullmatch(r"time/[^/]+", name)]
    phases = [name.removeprefix("time/") for name in dict.fromkeys(names) if name != "time/step"]
    spent = {phase: math.fsum(_number(entry, f"time/{phase}") for entry in entries) for phase in phases}
    if "collect" in spent and any(_WAIT in entry for entry in entries):
        spent["rows_wait"] = min(math.fsum(_number(entry, _WAIT) for entry in entries), spent["collect"])
        spent["collect"] -= spent["rows_wait"]
    spent["other"] = max(0.0, seconds - math.fsum(spent.values()))
    ordered = sorted(spent, key=lambda phase: list(_PHASES).index(phase) if phase in _PHASES else len(_PHASES) - 2)
    return {phase: spent[phase] / seconds for phase in ordered}


def _latency(entries: Sequence[Entry], state: str) -> str:
    """Return mean, 90 % quantile and maximum of the seconds behind a state, or nothing."""
    mean, p90 = (_mean(entries, f"time/{state}/{what}") for what in ("mean", "p90"))
    if mean is None:
        return ""
    longest = max(_number(entry, f"time/{state}/max") for entry in entries)
    return f"; mean {mean:.2g} s, p90 {p90:.2g} s, longest {longest:.2g} s"


def _engine_rows(entries: Sequence[Entry]) -> list[tuple[str, str, str]]:
    busy, least, in_flight = (_mean(entries, f"engine/{name}") for name in ("busy", "busy_min", "in_flight"))
    rows = []
    if busy is not None:
        rows.append(("engines", "busy", _percent(busy) + ("" if least is None else f", the least {_percent(least)}")))
    if in_flight is not None:
        rows.append(("engines", "requests in flight", f"{in_flight:.3g} an engine"))
    return rows


def _group_rows(entries: Sequence[Entry], last: Entry, before: Entry) -> list[tuple[str, str, str]]:
    """Return the groups that wait, and those that were trained on, sampled in vain, and drawn again."""
    finished = _mean(entries, "queue/finished_groups")
    rows = [] if finished is None else [("groups", "finished, wait for the trainer", f"{finished:.3g}")]
    if "count/ledger/drawn" not in last:
        return rows

    def grown(*names: str) -> int:
        return round(sum(_number(last, name) - _number(before, name) for name in names))

    no_signal = grown(*_NO_SIGNAL, "count/refill/stale_groups")
    kept = max(0, grown("count/ledger/acknowledged") - no_signal)
    dropped, redrawn = no_signal + grown("count/collector/cancelled_groups"), grown("count/ledger/requeued")
    share = _percent(kept / (kept + dropped + redrawn or 1))
    return [*rows, ("groups", "kept, dropped, drawn again", f"{kept}, {dropped}, {redrawn}; {share} kept")]


def _staleness_rows(entries: Sequence[Entry]) -> list[tuple[str, str, str]]:
    names = {int(found[1]): found[0] for entry in entries for name in entry if (found := _STALE_TOKENS.fullmatch(name))}
    if names:
        steps = [entry for entry in entries if any(name in entry for name in names.values())]
        shares = {age: math.fsum(_number(entry, names[age]) for entry in steps) / len(steps) for age in sorted(names)}
        return [("tokens", "by staleness", ", ".join(f"{age}: {_percent(share)}" for age, share in shares.items()))]
    mean = _mean(entries, "staleness")
    return [] if mean is None else [("tokens", "mean staleness of their rows", f"{mean:.3g}")]


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

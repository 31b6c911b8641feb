"""Waits of a run: who waits for whom over some steps, one sentence about the limit, and a picture of one step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrl_rloo.diagnostics.curves import save_figure
from torchrl_rloo.envs.activity import STATES, Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
_MUCH = 0.25  # share of the time from which something is worth a remark

# What conversations mostly wait for while the trainer waits for rows: cause and remedy
_CAUSES = {
    "engine": ("conversations spent {share} of their time on engines", "add engines, or shorten completions"),
    "tools": (
        "conversations spent {share} of their time on tools",
        "make tools faster",
    ),
    "environment": (
        "conversations spent {share} of their time on the environment",
        "make its functions faster, or add workers",
    ),
    "rewards": (
        "conversations spent {share} of their time on rewards",
        "make reward functions faster, or raise collector.reward_threads",
    ),
    "group": (
        "conversations spent {share} of their time on the wait for the rest of their group",
        "set collector.min_members, or limit lengths",
    ),
    "place": ("conversations spent {share} of their time on the wait for a place", "raise collector.max_in_flight"),
}

_OTHERS = {
    "sync": "Weight updates limit: they took {share} of the time; raise sampler.sync_every, or use another transport.",
    "eval": "Evaluation limits: it took {share} of the time; raise eval.every, or evaluate on fewer prompts.",
    "checkpoint": "Checkpoints limit: they took {share} of the time; raise checkpoint.every.",
    "collect": "Taking rows limits: fetching and scoring them took {share} of the time; add ranks.",
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
    """Means over some steps; what was not measured is missing."""

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
    """Return the means over steps."""
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


def describe_waits(entries: Sequence[Entry]) -> dict[str, Any] | None:
    """Return the table of waits as plain data, with the sentence about the limit; None without timings."""
    if not entries or (summary := summarize_waits(entries)) is None:
        return None
    rows = [list(row) for row in _rows(summary)]
    return {"heads": ["who", "does", "share or number"], "rows": rows, "sentence": limiting_sentence(summary)}


def name_limit(trainer: Mapping[str, float], worker: Mapping[str, float], engine: Mapping[str, float]) -> str:
    """Return what limits a run.

    Example:
        >>> name_limit({"rows_wait": 0.3, "train": 0.7}, {}, {})
        'Training limits: it took 70 % of the time; add ranks, or enlarge passes.'
    """
    limit = max(trainer, key=trainer.get)
    share = _percent(trainer[limit])
    if limit == "rows_wait":
        sentence = f"Sampling limits: the trainer waited {share} of the time{_cause(worker, engine)}."
        return sentence + _overlap(trainer, worker)
    if limit == "train":
        busy = f", and engines were busy {_percent(engine['busy'])}" if engine else ""
        sentence = f"Training limits: it took {share} of the time{busy}; add ranks, or enlarge passes."
        return sentence + _overlap(trainer, worker)
    if limit in _OTHERS:
        return _OTHERS[limit].format(share=share)
    return f"The phase {limit!r} limits: it took {share} of the time."


def _cause(worker: Mapping[str, float], engine: Mapping[str, float]) -> str:
    """Return why rows came late, and a remedy."""
    active = {state: worker[state] for state in _CAUSES if worker.get(state)}
    if not active:
        return "; add engines or workers"
    state = max(active, key=active.get)
    cause, remedy = _CAUSES[state]
    # Compare with the time in which there were conversations at all
    begun = sum(active.values())
    if state == "engine" and engine and (busy := min(1.0, engine["busy"] / begun)) < 2 * _MUCH:
        cause += f", though engines were busy only {_percent(busy)} of that"
        remedy = "look for pauses, restarts, and requests on their way"
    return f", and {cause.format(share=_percent(active[state] / begun))}; {remedy}"


def _overlap(trainer: Mapping[str, float], worker: Mapping[str, float]) -> str:
    """Return the advice to sample while the trainer trains, if both wait for each other much of the time."""
    if min(trainer.get("rows_wait", 0.0), trainer.get("train", 0.0), worker.get("idle", 0.0)) < _MUCH:
        return ""
    return f" Workers were idle {_percent(worker['idle'])}; collector.max_staleness=1 samples while the trainer trains."


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


# Picture of one step


Span = tuple[str, float, float]
StepTimes = tuple[float, float, Sequence[Span]]

_PHASE_COLORS = {
    "collect": "#e3e3e3",
    "train": "#3d3d3d",
    "sync": "#6d7f94",
    "eval": "#7d6b4f",
    "checkpoint": "#5a4a5f",
}
_STATE_COLORS = {
    "engine": "#1f5fa8",
    "tools": "#c8553d",
    "environment": "#3b8a5a",
    "rewards": "#8a5fb0",
    "group": "#d9d9d9",
    "place": "#b08a2e",
}
_STATE_LABELS = {
    "engine": "engine",
    "tools": "tools",
    "environment": "environment",
    "rewards": "rewards",
    "group": "rest of the group",
    "place": "place",
}
_OTHER_COLOR = "#9a9a9a"


def choose_step(recent: Sequence[StepTimes]) -> StepTimes | None:
    """Return the step of median duration, of those with an evaluation or a checkpoint only if all have one.

    Args:
        recent: begin, end and phases of each step.
    """
    plain = [step for step in recent if not {"eval", "checkpoint"} & {name for name, _, _ in step[2]}] or list(recent)
    ordered = sorted(plain, key=lambda step: step[1] - step[0])
    return ordered[len(ordered) // 2] if ordered else None


def plot_timeline(step: StepTimes, profiles: Iterable[Profile], path: str | Path) -> Path:
    """Plot a step as a PNG.

    Args:
        step: begin and end in seconds, and name, begin and end of each phase.
        profiles: number of conversations in each state, over times that cover the step.
        path: PNG file to write.

    Returns:
        ``path``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here because it takes half a second
    from matplotlib.figure import Figure

    start, end, phases = step
    whole = Profile()
    for profile in profiles:
        whole.merge(profile)
    figure = Figure(figsize=(10.0, 3.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    trainer, conversations = figure.subplots(2, 1, sharex=True, height_ratios=(1, 5))
    _draw_phases(trainer, [(name, first - start, last - start) for name, first, last in phases], end - start)
    _draw_conversations(conversations, whole.numbers(start, end), start, end)
    conversations.set_xlim(0.0, end - start)
    for axes in (trainer, conversations):
        axes.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, Path(path))


def _draw_conversations(axes: Axes, bins: Sequence[tuple[float, list[float]]], start: float, end: float) -> None:
    """Draw the number of conversations in each state, stacked."""
    edges = [max(0.0, time - start) for time, _ in bins] + [end - start]
    most = max((sum(numbers) for _, numbers in bins), default=0.0)
    used = [k for k in range(len(STATES)) if any(numbers[k] > 0.01 * most for _, numbers in bins)]
    if used:
        columns = [[numbers[k] for _, numbers in bins] for k in used]
        axes.stackplot(
            edges,
            [[*column, column[-1]] for column in columns],
            step="post",
            labels=[_STATE_LABELS[STATES[k]] for k in used],
            colors=[_STATE_COLORS[STATES[k]] for k in used],
            linewidth=0,
        )
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        axes.legend(title="they wait for", frameon=False, fontsize=8, reverse=True, **place)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the begin of the step")
    axes.set_ylabel("conversations")


def _draw_phases(axes: Axes, phases: Sequence[Span], seconds: float) -> None:
    """Draw the trainer's phases as one bar, with names where they have room."""
    for name, start, end in phases:
        axes.barh(0, end - start, left=start, height=0.8, color=_PHASE_COLORS.get(name, _OTHER_COLOR), linewidth=0)
        if end - start > 0.05 * seconds:
            color = "#222222" if name == "collect" else "#ffffff"
            axes.text((start + end) / 2, 0, name, ha="center", va="center", fontsize=8, color=color)
    axes.set_yticks([0], ["trainer"])
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)

"""Picture of one step: phases of the trainer, and what conversations do at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_rloo.diagnostics.report_curves import save_figure
from torchrl_rloo.envs.activity import STATES, Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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

"""Picture of a simulated cluster: running requests of the engines above the trainer's steps."""

from __future__ import annotations

from pathlib import Path

from torchrl_rloo.diagnostics.cluster_simulation import ClusterResult
from torchrl_rloo.diagnostics.report_curves import save_figure

_COLORS = {"trains": "#1f5fa8", "pushes": "#d98a1f", "waits": "#e4e4e4"}


def plot_cluster(result: ClusterResult, path: str | Path) -> Path:
    """Plot who waits for whom over time: a line for each of up to 64 engines, and one for the trainer.

    Args:
        result: result of :func:`simulate` with ``record=True``.
        path: PNG file.

    Raises:
        ValueError: if the result has no timeline.
    """
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timeline = result.timeline
    if timeline is None:
        raise ValueError("the result has no timeline; call simulate with record=True")
    figure = Figure(figsize=(10.0, 5.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    engines, trainer = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    # Engines: darker with more running requests, orange while they stand still
    running = np.array(timeline.running, dtype=float).T
    still = running < 0
    shades = LinearSegmentedColormap.from_list("running", ["#f4f4f4", "#1f5fa8"])
    shades = shades.with_extremes(bad=_COLORS["pushes"])
    masked = np.ma.array(running, mask=still)
    edges = [*timeline.looks, timeline.looks[-1] + timeline.looks[-1] - timeline.looks[-2]]
    image = engines.pcolormesh(edges, range(len(running) + 1), masked, cmap=shades, vmin=0, rasterized=True)
    figure.colorbar(image, ax=engines, label="running requests", pad=0.01)
    engines.set_ylabel(f"engine (of {result.settings.engines})")
    mode = result.settings.mode
    engines.set_title(
        f"max_staleness={mode.max_staleness}, in_flight={mode.in_flight}: engines {result.engine_busy:.0%} busy, "
        f"trainer {result.trainer_busy:.0%} busy",
        fontsize=10,
    )
    # Trainer
    for begin, end, what in timeline.trainer:
        trainer.broken_barh([(begin, end - begin)], (0, 1), color=_COLORS[what], linewidth=0)
    trainer.set_yticks([])
    trainer.set_ylabel("trainer")
    trainer.set_xlabel("seconds")
    names = {"trains": "trains", "pushes": "updates weights", "waits": "waits for a batch"}
    handles = [Patch(color=_COLORS[what], label=label) for what, label in names.items()]
    trainer.legend(handles=handles, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.55), frameon=False)
    return save_figure(figure, Path(path))

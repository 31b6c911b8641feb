"""Draw the curves of finished runs as one SVG: ``python docs/curves.py docs/pictures/NAME.svg RUN_DIR...``.

Backgrounds are transparent and axes mid-gray, so that a picture reads on white and on black.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

GRAY = "#7a8694"
COLORS = ("#2f7fd6", "#2e9e5b", "#d98a1f")
CURVES = (
    "reward",
    "rewards/accuracy",
    "eval/nll",
    "eval/greedy",
    "eval/sampled",
    "eval/pair_accuracy",
    "right_moves",
    "first_player",
)


def use_style() -> None:
    """Set the style of all curves and timelines."""
    plt.rcParams.update(
        {key: GRAY for key in ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")}
    )
    plt.rcParams.update({"svg.hashsalt": "curves", "svg.fonttype": "none", "font.family": "sans-serif"})


def new_figure(number: int) -> tuple:
    """Return a figure with panels side by side."""
    use_style()
    figure, panels = plt.subplots(1, number, figsize=(8.8, 2.8), squeeze=False, layout="constrained")
    for panel in panels[0]:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels[0]


def draw(path: Path, runs: list[Path], curves: list[str] | None = None) -> None:
    """Draw one panel for each curve, or each of ``CURVES`` that the runs have, a line for each run."""
    histories = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    names = curves or [name for name in CURVES if any(name in row for row in histories[0])]
    figure, panels = new_figure(len(names))
    for panel, name in zip(panels, names, strict=True):
        for history, run, color in zip(histories, runs, COLORS, strict=False):
            points = [(row["step"], row[name]) for row in history if name in row]
            marker = "" if len(points) > 40 else "o"
            panel.plot(
                *zip(*points, strict=True), color=color, label=run.name, marker=marker, markersize=3, linewidth=1.4
            )
        panel.set(title=name, xlabel="step")
        if "nll" in name:
            panel.set_ylim(bottom=0)
        elif all(0 <= row[name] <= 1 for history in histories for row in history if name in row):
            panel.set_ylim(0, 1.02)
    if len(runs) > 1:
        panels[-1].legend(frameon=False, loc="lower right")
    figure.savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--curves", nargs="+", help="names of metrics")
    args = parser.parse_args()
    draw(args.picture, args.runs, args.curves)

"""Draw when a run sampled, trained and pushed weights: ``python docs/timeline.py docs/pictures/NAME.svg RUN_DIR...``.

The runs need ``collector.audit=true``. Each has a panel, with groups in a color per policy version.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from curves import COLORS, GRAY, use_style  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw(path: Path, runs: list[Path]) -> None:
    """Draw one panel for each run, with a row for each kind of work."""
    use_style()
    figure, panels = plt.subplots(len(runs), 1, figsize=(8.8, 1.3 * len(runs) + 0.6), sharex=True, layout="constrained")
    for panel, run in zip([panels] if len(runs) == 1 else panels, runs, strict=True):
        # Times of groups are those of the audit; training and push follow the delivery of a step's last group
        times: dict[str, dict[int, float]] = {"leased": {}, "complete": {}, "delivered": {}}
        versions = {}
        for record in read_jsonl(run / "ledger.jsonl"):
            times.get(record.get("state"), {})[record.get("group")] = record["time"]
            versions[record.get("group")] = record.get("version") or versions.get(record.get("group")) or 0
        began = min(times["leased"].values())
        for group, end in times["complete"].items():
            start = times["leased"][group]
            panel.barh(2, end - start, left=start - began, height=0.6, color=COLORS[versions[group] % 2], alpha=0.3)
        steps = [record for record in read_jsonl(run / "timings.jsonl") if "time/train" in record]
        delivered = sorted(times["delivered"].values())
        for number, step in enumerate(steps, 1):
            at = delivered[len(delivered) * number // len(steps) - 1] - began
            panel.barh(1, step["time/train"], left=at, height=0.6, color=GRAY)
            panel.barh(0, step["time/sync"], left=at + step["time/train"], height=0.6, color=COLORS[2])
        panel.set(yticks=range(3), yticklabels=("push", "train", "sample"), title=run.name)
        panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlabel("seconds")
    figure.savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    arguments = parser.parse_args()
    draw(arguments.picture, arguments.runs)

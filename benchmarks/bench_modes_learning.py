"""Learning curves of the four modes of the recipe `rloo` on a cluster, on the built-in calculator task.

    python benchmarks/bench_modes_learning.py --seeds 0 --picture modes.svg

Each run has equally many steps, one engine of the built-in model and one worker, on a local Ray. The two asynchronous
modes allow a staleness of 2. Runs that have finished in ``--directory`` are not repeated. Times are of collection,
training and weight updates, without evaluation. The picture shows the accuracy on held-out prompts against steps and
against time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import print_result, print_table

MODES = {
    "sync": ["collector.max_staleness=0"],
    "one-step-off": ["collector.max_staleness=1", "collector.on_stale=wait", "inference.updater.in_flight=finish"],
    "async": ["collector.max_staleness=2", "inference.updater.in_flight=finish"],
    "partial": ["collector.max_staleness=2", "inference.updater.in_flight=continue"],
}
COMMON = [
    "inference=ray_transformers",
    "task=calculator",
    "eval.every=3",
    "data.eval_size=64",
    "ray.num_workers=1",
    "log.loggers=[]",
    "log.samples=0",
]
GRAY = "#7a8694"
MAX_AGE = 3  # largest staleness of a token in the table


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def train(mode: str, seed: int, args: argparse.Namespace) -> Path:
    """Run the recipe, unless it has finished, and return its folder."""
    folder = args.directory / f"{mode}-{seed}"
    if not (folder / "report.html").exists():
        command = [sys.executable, "-m", "torchrl_rloo.cli.main", "run", "rloo", *COMMON, *MODES[mode]]
        command += [f"seed={seed}", f"plan.steps={args.steps}", f"output_dir={folder.resolve()}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def curve(folder: Path) -> list[dict[str, float]]:
    """Return step, seconds and accuracies of each evaluation."""
    seconds, clock = 0.0, {0: 0.0}
    for line in read_lines(folder / "timings.jsonl"):
        seconds += sum(line.get(f"time/{phase}", 0.0) for phase in ("collect", "train", "sync"))
        clock[line["step"]] = seconds
    names = ("eval/greedy", "eval/sampled")
    return [
        {"step": line["step"], "seconds": clock[line["step"]], **{name: line[name] for name in names}}
        for line in read_lines(folder / "metrics.jsonl")
        if "eval/greedy" in line
    ]


def summarize(mode: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return the figures of a run."""
    points, lines = curve(folder), read_lines(folder / "metrics.jsonl")
    steps = [line for line in lines if "staleness" in line]
    half = len(points) // 2
    row: dict[str, Any] = {"mode": mode, "seed": seed, "steps": points[-1]["step"], "seconds": points[-1]["seconds"]}
    row |= {f"greedy after {points[half]['step']}": points[half]["eval/greedy"]}
    row |= {"greedy at the end": points[-1]["eval/greedy"], "sampled at the end": points[-1]["eval/sampled"]}
    for age in range(MAX_AGE):
        row[f"tokens of age {age}"] = sum(line.get(f"staleness/tokens_{age}", 0.0) for line in steps) / len(steps)
    return row


def draw(folders: dict[tuple[str, int], Path], file: Path) -> None:
    """Draw the greedy accuracy against steps and against time; it reads on white and on black."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    parts = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    pyplot.rcParams.update(dict.fromkeys(parts, GRAY) | {"svg.hashsalt": "modes", "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for number, mode in enumerate(MODES):
        for (name, seed), folder in folders.items():
            if name != mode:
                continue
            points = curve(folder)
            for axis, x in zip(axes, ("step", "seconds"), strict=True):
                label = mode if seed == min(s for m, s in folders if m == mode) else None
                axis.plot([p[x] for p in points], [p["eval/greedy"] for p in points], color=f"C{number}", label=label)
    axes[0].set_xlabel("steps")
    axes[1].set_xlabel("seconds of collection, training and updates")
    axes[0].set_ylabel("accuracy on held-out prompts, greedy")
    axes[0].legend(frameon=False)
    for axis in axes:
        axis.set_ylim(0, 1)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, transparent=True, metadata={"Date": None})


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--directory", type=Path, default=Path("outputs/bench_modes_learning"))
    parser.add_argument("--picture", type=Path, help="file of the picture")
    args = parser.parse_args()
    folders = {(mode, seed): train(mode, seed, args) for seed in args.seeds for mode in args.modes}
    table = [summarize(mode, seed, folder) for (mode, seed), folder in folders.items()]
    print_table("Four modes on the calculator task", table)
    if args.picture is not None:
        draw(folders, args.picture)
    print_result({"runs": table})


if __name__ == "__main__":
    main()

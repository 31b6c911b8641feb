"""Learning curves of the methods on the embedded task: same start, prompts, samples per step, optimizer and seeds.

    python benchmarks/bench_algorithms.py [--start clean] [--methods rloo grpo ...] [--seeds 0 1 2] [--steps 150]

Each run is `rloo.py` with one setting changed and two optimizer steps per rollout batch, so that ratios and clips
act on the second. `--start sloppy` begins at the default warm start on a sloppy teacher, where the model must learn to
prefer the better demonstrations. `--start clean` begins at a warm start of 200 steps on a teacher without errors, where
the model must find what it cannot do yet.

Draws `docs/pictures/algorithms_<start>.png`, held-out accuracy over steps (mean and range of the seeds), prints a table
and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "sota_implementations" / "rloo" / "rloo.py"
METHODS = {
    "rloo": ["algorithm=rloo"],
    "reinforce": ["algorithm=rloo", "advantage.estimator=reinforce"],
    "grpo": ["algorithm=grpo"],
    "dr_grpo": ["algorithm=dr_grpo"],
    "gspo": ["algorithm=gspo"],
    "reinforce_pp_baseline": ["algorithm=reinforce_pp_baseline"],
    "rloo_trl": ["algorithm=rloo_trl"],
}
DEFAULT = [name for name in METHODS if name != "rloo_trl"]


STARTS = {"sloppy": "", "clean": ", steps=200, clean=True"}


def build_start(kind: str, seed: int) -> Path:
    """Build the warm start in a separate process, which keeps this one small."""
    code = f"from torchrl_rloo.embedded import warm_start; print(warm_start({seed}{STARTS[kind]}))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])


def run(method: str, seed: int, start: Path, steps: int, directory: str) -> dict:
    """Run one method, and return its held-out accuracies by step and its CPU seconds."""
    output = Path(directory) / f"{method}-{seed}"
    overrides = [f"seed={seed}", f"model.name={start}", f"plan.steps={steps}", "plan.minibatches=2"]
    overrides += [f"output_dir={output}", "log.loggers=[]", "log.samples_every=0", "checkpoint.every=0"]
    command = [sys.executable, str(SCRIPT), *overrides, *METHODS[method]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    evaluations = [r for r in records if "eval/greedy" in r]
    curves = {name: [r[f"eval/{name}"] for r in evaluations] for name in ("greedy", "sampled")}
    cpu = json.loads(done.stdout.splitlines()[-1])["cpu_seconds"]
    first, last = curves["greedy"][0], curves["greedy"][-1]
    print(f"{method} seed {seed}: greedy {first:.3f} -> {last:.3f}, {cpu} CPU s", flush=True)
    return {"method": method, "seed": seed, "steps": [r["step"] for r in evaluations], "cpu_seconds": cpu, **curves}


def table(runs: list[dict]) -> str:
    """Return the last accuracies by method as Markdown: the mean over the seeds, and each seed's."""
    lines = ["| method | greedy, mean | greedy, by seed | sampled, mean | sampled, by seed | CPU s a run |"]
    lines.append("| --- | ---: | --- | ---: | --- | ---: |")
    for method in dict.fromkeys(r["method"] for r in runs):
        selected = [r for r in runs if r["method"] == method]
        cells = [f"`{method}`"]
        for name in ("greedy", "sampled"):
            last = [r[name][-1] for r in selected]
            cells += [f"{statistics.mean(last):.3f}", " / ".join(f"{x:.3f}" for x in last)]
        cells.append(f"{statistics.mean(r['cpu_seconds'] for r in selected):.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(runs: list[dict], path: Path) -> None:
    """Draw accuracy over steps, with a panel for greedy and one for sampled answers. Bands are the seeds' range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for axis, name in zip(axes, ("greedy", "sampled"), strict=True):
        for method in dict.fromkeys(r["method"] for r in runs):
            selected = [r for r in runs if r["method"] == method]
            columns = list(zip(*(r[name] for r in selected), strict=True))
            (line,) = axis.plot(selected[0]["steps"], [statistics.mean(c) for c in columns], label=method)
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            axis.fill_between(selected[0]["steps"], low, high, color=line.get_color(), alpha=0.08)
        axis.set(title=f"held-out accuracy, {name}", xlabel="rollout batches of 128 completions", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", choices=STARTS, default="clean")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=DEFAULT)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150, help="rollout batches of a run")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs, one CPU thread each")
    parser.add_argument("--picture", type=Path, help="file to draw to")
    args = parser.parse_args()
    starts = {seed: build_start(args.start, seed) for seed in args.seeds}
    picture = args.picture or ROOT / "docs" / "pictures" / f"algorithms_{args.start}.png"
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(run, m, s, starts[s], args.steps, directory) for m in args.methods for s in args.seeds]
        runs = [job.result() for job in jobs]
    print(table(runs))
    draw(runs, picture)
    print(json.dumps({"benchmark": "algorithms", "steps": args.steps, "start": args.start, "runs": runs}))


if __name__ == "__main__":
    main()

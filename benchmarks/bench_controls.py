"""Controls of the default run: accuracy must come from the reward, and learning from the weight updates.

    python benchmarks/bench_controls.py [--seeds 0 1 2] [--steps 120] [--only none flipped shuffled unsynced]

- ``none`` is the default run, which alone may learn the task.
- ``flipped`` rewards wrong answers.
- ``shuffled`` gives each reward to another completion.
- ``unsynced`` samples and evaluates with a copy of the weights that is never updated.

Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "sota_implementations" / "rloo" / "rloo.py"
ACCURACY = "torchrl_rloo.rewards.boxed_accuracy"
CONTROLS = {
    "none": [],
    "flipped": ["reward.weights=[-1]"],
    "shuffled": [f"reward.functions=[{{_target_: torchrl_rloo.rewards.Shuffled, function: {ACCURACY}}}]"],
    "unsynced": ["sampler.share_weights=false", "sampler.sync_every=0"],
}


def run(control: str, seed: int, steps: int, directory: str) -> dict[str, float]:
    """Run the script once, and return its last line of JSON."""
    overrides = [f"seed={seed}", f"plan.steps={steps}", f"output_dir={directory}/{control}-{seed}", *CONTROLS[control]]
    overrides += ["eval.every=1000", "log.loggers=[]", "log.samples_every=1000", "checkpoint.every=1000"]
    done = subprocess.run([sys.executable, str(SCRIPT), *overrides], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--only", nargs="+", choices=CONTROLS, default=list(CONTROLS))
    args = parser.parse_args()
    results = []
    print(f"{'control':<10} seed  greedy before -> after   sampled before -> after   CPU s")
    with tempfile.TemporaryDirectory() as directory:
        for control in args.only:
            for seed in args.seeds:
                r = run(control, seed, args.steps, directory)
                greedy = f"{r['eval/greedy_before']:.3f} -> {r['eval/greedy_after']:.3f}"
                sampled = f"{r['eval/sampled_before']:.3f} -> {r['eval/sampled_after']:.3f}"
                print(f"{control:<10} {seed:>4}  {greedy:<23}  {sampled:<23}  {r['cpu_seconds']:>6.1f}", flush=True)
                figures = {k: v for k, v in r.items() if k not in ("model", "report")}  # their directory is temporary
                results.append({"control": control, "seed": seed, **figures})
    print(json.dumps({"benchmark": "controls", "steps": args.steps, "runs": results}))


if __name__ == "__main__":
    main()

"""Weights after training on several ranks, compared with one process: every preset, layout and way to distribute.

Each case trains a small model on fixed rollouts with dropped rows and ragged tails. The table has the largest
difference of any weight over all presets. Ranks are real processes that communicate over gloo.

Example:
    python benchmarks/bench_ranks.py --sizes 1 2 3 4 --steps 20
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import OFFLINE, ONE_THREAD, print_table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test"))

PACKINGS = ("none", "packed", "shared_prefix")
PARALLEL = ("ddp", "fsdp")


def train_ranks(cases: list[dict], size: int) -> list[list[dict]]:
    """Train all cases on ranks of one group; return the results of each rank."""
    import torch

    from support import rank_training

    environment = os.environ | ONE_THREAD | OFFLINE | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "test")])}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps(cases))
        command = [sys.executable, rank_training.__file__]
        ranks = [
            subprocess.Popen([*command, str(rank), str(size), name], env=environment, stderr=subprocess.DEVNULL)
            for rank in range(size)
        ]
        for rank in ranks:
            rank.wait()
        return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


def largest_difference(found: dict, expected: dict) -> float:
    """Return the largest absolute difference of two sets of weights."""
    return max(float((found["weights"][n] - w).abs().max()) for n, w in expected["weights"].items())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3, 4], help="numbers of ranks")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each case")
    parser.add_argument("--presets", nargs="+", help="methods; default: all")
    arguments = parser.parse_args()

    from support import rank_training
    from torchrl_rloo.objectives import PRESETS

    presets = arguments.presets or list(PRESETS)
    bases = [
        {"preset": preset, "packing": packing, "steps": arguments.steps}
        for preset, packing in itertools.product(presets, PACKINGS)
    ]
    expected = [rank_training.train(base, None) for base in bases]
    cases = [{**base, "parallel": parallel} for parallel in PARALLEL for base in bases]
    rows = []
    for size in arguments.sizes:
        results = train_ranks(cases, size)
        for parallel, packing in itertools.product(PARALLEL, PACKINGS):
            chosen = [i for i, c in enumerate(cases) if (c["parallel"], c["packing"]) == (parallel, packing)]
            gaps = [largest_difference(of_rank[i], expected[i % len(bases)]) for of_rank in results for i in chosen]
            equal = all(largest_difference(of_rank[i], results[0][i]) == 0 for of_rank in results for i in chosen)
            rows.append(
                {
                    "ranks": size,
                    "parallel": parallel,
                    "packing": packing,
                    "presets": len(chosen),
                    "largest difference": f"{max(gaps):.1e}",
                    "ranks equal": "yes" if equal else "no",
                }
            )
        print(f"{size} ranks done", flush=True)
    print_table(f"Weights after {arguments.steps} steps against one process", rows)


if __name__ == "__main__":
    main()

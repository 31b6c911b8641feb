"""Stored rows of a run: cost of keeping them, training on them alone, and rescoring them.

    python benchmarks/bench_stored_rows.py

A run of the built-in task keeps the 5,120 rows of 40 steps. A second run trains on these files alone and must end with
the same weights, bit for bit. Then ``torchrl-rloo rescore`` scores all rows with other rewards.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import OFFLINE, ONE_THREAD, print_table

from torchrl_rloo.data import concatenate
from torchrl_rloo.replay import RolloutFiles, RolloutWriter

ROWS_PER_STEP = 128


def seconds(*arguments: str) -> float:
    """Run the command line in a process of one thread, and return its wall-clock seconds."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "torchrl_rloo.cli.main", *arguments]
    environment = os.environ | ONE_THREAD | OFFLINE
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:])
    return time.perf_counter() - start


def rewrite(files: RolloutFiles, folder: Path) -> float:
    """Store all rows again, and return the seconds of a step's rows."""
    manifest = {name: files.manifest[name] for name in ("model", "tokenizer")}
    batches = [concatenate(list(files.read(file).values())) for file in files.files()]
    writer = RolloutWriter(folder, **manifest)
    start = time.perf_counter()
    for rows in batches:
        writer.extend(rows)
    return (time.perf_counter() - start) / len(batches)


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps of 128 rows; default: 40")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        rows, common = place / "rows", [f"plan.steps={steps}", "eval.every=0", "log.loggers=[]"]
        sampled = seconds("run", "rloo", *common, f"rollouts.path={rows}", f"output_dir={place / 'sampled'}")
        stored = seconds("run", "rloo", *common, f"rollouts.source={rows}", f"output_dir={place / 'stored'}")
        rescored = seconds("rescore", str(rows), "--rewards", "boxed_accuracy,think_format", "--weights", "1", "0.2")
        written = seconds(
            "rescore", str(rows), "--rewards", "boxed_accuracy,think_format", "--output", str(place / "new")
        )
        files = RolloutFiles(rows)
        statistics, once = files.statistics(), rewrite(files, place / "again")
        models = [place / name / "model" / "model.safetensors" for name in ("sampled", "stored")]
        digests = [hashlib.sha256(model.read_bytes()).hexdigest()[:16] for model in models]
    measured = {
        "rows, groups": f"{statistics['rows']:,}, {statistics['groups']:,}",
        "bytes of a row": f"{statistics['bytes'] / statistics['rows']:.0f}",
        "ms to store the rows of a step": f"{1000 * once:.1f}",
        "s of the run that samples and trains": f"{sampled:.1f}",
        "s of the run on its stored rows": f"{stored:.1f}",
        "s of rescore": f"{rescored:.1f}",
        "s of rescore with --output": f"{written:.1f}",
        "SHA-256 of the weights, sampled and stored": " ".join(digests),
        "same weights": str(digests[0] == digests[1]),
    }
    print_table("Stored rows", [{"measurement": name, "value": value} for name, value in measured.items()])
    if statistics["rows"] != ROWS_PER_STEP * steps or digests[0] != digests[1]:
        raise SystemExit("the run on stored rows must have all rows, and the weights of the run that stored them")


if __name__ == "__main__":
    main()

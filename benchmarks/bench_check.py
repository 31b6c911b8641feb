"""Cost of the checks before the first step, of ``torchrl-rloo check`` and of a dry run, on the built-in tasks.

    python benchmarks/bench_check.py [--tasks addition calculator] [--repeats 3] [--steps 1]

Each run is a process, which is started several times; the table has medians. The cost of the checks is the difference
of two runs, with ``check.mode=warn`` and ``check.mode=off``, in CPU seconds. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from statistics import median

COMMAND = (sys.executable, "-m", "torchrl_rloo.cli.main")


def measure(arguments: Sequence[str], repeats: int) -> tuple[float, float, str]:
    """Run a command several times; return the medians of its CPU and wall-clock seconds, and its last output."""
    cpu, wall = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            before, start = _children(), time.perf_counter()
            command = [*COMMAND, *arguments, f"output_dir={folder}/run"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            cpu.append(_children() - before)
            wall.append(time.perf_counter() - start)
    return median(cpu), median(wall), done.stdout


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["addition", "calculator"], help="built-in tasks")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="training steps of the compared runs")
    args = parser.parse_args()
    results = []
    print("task         run, off (CPU s)   run, warn   checks alone   check (wall s)   dry run (wall s)   findings")
    for task in args.tasks:
        base = ["rloo", f"task={task}", f"plan.steps={args.steps}", "log.loggers=[]"]
        off, _, _ = measure(["run", *base, "check.mode=off"], args.repeats)
        warn, _, _ = measure(["run", *base], args.repeats)
        _, check, printed = measure(["check", "rloo", f"task={task}"], args.repeats)
        _, dry, _ = measure(["run", *base, "--dry-run"], args.repeats)
        found = printed.strip().splitlines()[-1]
        figures = f"{off:>16.1f} {warn:>11.1f} {warn - off:>14.1f} {check:>16.1f} {dry:>18.1f}"
        print(f"{task:<12} {figures}   {found}", flush=True)
        results.append({"task": task, "off": off, "warn": warn, "check": check, "dry_run": dry, "findings": found})
    print(json.dumps({"benchmark": "check", "steps": args.steps, "repeats": args.repeats, "tasks": results}))


if __name__ == "__main__":
    main()

"""Cost of running rewards: overhead per sample in each execution mode, and samples per second of the accuracy reward.

    python benchmarks/bench_rewards.py

A trivial reward shows the overhead of RewardRunner's calls, transport and bookkeeping. MathAccuracy (math-verify)
parses and compares LaTeX in a separate process for each thread that calls it. The modes alternate. Figures are
wall-clock medians over rounds, since other processes do the work.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from common import print_result, print_table

from torchrl_rloo.rewards import MathAccuracy
from torchrl_rloo.rewards.executors import Executor, InlineExecutor, ProcessExecutor, ThreadExecutor
from torchrl_rloo.rewards.protocol import RewardBatch
from torchrl_rloo.rewards.runner import RewardRunner

TIMEOUT = 10.0
WORKERS = (1, 2)


def trivial(completions, **columns: Any) -> list[float]:
    """Return one number for each completion, at no cost."""
    return [1.0] * len(completions)


def crash_or_pass(completions, **columns: Any) -> list[float]:
    """End the process if the first completion is ``"crash"``."""
    if completions[0] == "crash":
        os._exit(1)
    return [1.0] * len(completions)


def addition_rows(n: int) -> RewardBatch:
    """Return ``n`` different rows like those of the embedded task. Half of the answers are correct."""
    draw = random.Random(0)
    prompts, completions, ids, answers = [], [], [], []
    for i in range(n):
        a, b = draw.randrange(100), draw.randrange(100)
        said = a + b if i % 2 else a + b + 1
        prompts.append([{"role": "user", "content": f"What is {a}+{b}?"}])
        completions.append([{"role": "assistant", "content": f"<think>{a}+{b}={said}</think>\\boxed{{{said}}}"}])
        ids.append([draw.randrange(300) for _ in range(25)])
        answers.append(str(a + b))
    return RewardBatch(prompts, completions, ids, {"answer": answers}, [False] * n)


def modes() -> dict[str, Callable[[], Executor]]:
    """Return a factory of the executor of each mode."""
    made: dict[str, Callable[[], Executor]] = {"inline": InlineExecutor}
    for n in WORKERS:
        made[f"thread, {n}"] = lambda n=n: ThreadExecutor(n, TIMEOUT)
    for n in WORKERS:
        made[f"process, {n}"] = lambda n=n: ProcessExecutor(n, TIMEOUT)
    for n in WORKERS:
        made[f"process, {n}, 16 rows a call"] = lambda n=n: ProcessExecutor(n, TIMEOUT, rows_per_call=16)
    return made


def seconds_per_row(function: Callable[..., Any], batch: RewardBatch, rounds: int) -> dict[str, float]:
    """Return the median seconds per row of each mode, after one warm-up batch."""
    runners = {name: RewardRunner(function, executor=make()) for name, make in modes().items()}
    found: dict[str, list[float]] = {name: [] for name in runners}
    for round_number in range(rounds + 1):
        for name, runner in runners.items():
            start = time.perf_counter()
            scores = runner(batch).scores[0]
            if round_number:
                found[name].append((time.perf_counter() - start) / len(batch))
            assert None not in scores and not runner.counts, runner.counts
    for runner in runners.values():
        runner.close()
    return {name: median(values) for name, values in found.items()}


def replacement_seconds(rounds: int) -> float:
    """Return the median seconds that a crash costs.

    It is the time of a call that ends its worker and one in the new worker, minus that of two good calls.
    """
    executor = ProcessExecutor(1, TIMEOUT)
    good, bad = ([RewardBatch(["p"], [c], [[1]]) for c in (first, "pass")] for first in ("pass", "crash"))
    found = []
    executor.run(crash_or_pass, good)
    for _ in range(rounds):
        times = []
        for batches in (good, bad):
            start = time.perf_counter()
            executor.run(crash_or_pass, batches)
            times.append(time.perf_counter() - start)
        found.append(times[1] - times[0])
    executor.close()
    return median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="rows in a batch of the trivial reward")
    parser.add_argument("--math-rows", type=int, default=128, help="rows in a batch of MathAccuracy")
    parser.add_argument("--rounds", type=int, default=7, help="measured batches of each mode")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    overhead = seconds_per_row(trivial, addition_rows(args.rows), args.rounds)
    accuracy = seconds_per_row(MathAccuracy(column="answer"), addition_rows(args.math_rows), args.rounds)
    rows = [
        {
            "mode, workers": name,
            "overhead, us a sample": overhead[name] * 1e6,
            "MathAccuracy, samples a second": 1 / accuracy[name],
            "of inline": accuracy["inline"] / accuracy[name],
        }
        for name in overhead
    ]
    print_table(f"{args.rounds} batches of {args.rows} and {args.math_rows} different rows, load {load:.1f}", rows)
    replacement = replacement_seconds(args.rounds)
    print(f"\nreplacing a crashed worker takes {replacement:.3f} s")
    print_result(
        {
            "overhead_us": {name: round(value * 1e6, 1) for name, value in overhead.items()},
            "math_samples_per_second": {name: round(1 / value, 1) for name, value in accuracy.items()},
            "replacement_seconds": round(replacement, 3),
            "load": round(load, 1),
        }
    )


if __name__ == "__main__":
    main()

"""Attacks: hostile programs, texts, data, replies, files and processes, and how many of them were contained.

    python benchmarks/bench_attacks.py --seconds 600
    python benchmarks/bench_attacks.py --areas judge processes --seconds 60 --seed 1

Each area draws attacks from a corpus of known ones and from a seeded generator. An attack counts as contained if it
gained nothing: no score, no file, no process, no code that ran outside of its sandbox, and no time beyond its limit.
The exit code is 1 if one was not contained.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from common import print_result, print_table

AREAS = {
    "judge": "programs that cheat in unit tests",
    "processes": "programs in the sandbox, reward workers and tool sessions",
    "text": "completions in every reward and parser",
    "data": "dataset files and outputs of tools",
    "http": "replies of remote rewards and servers",
    "files": "checkpoints",
}
BATCH = 50  # attacks between two looks at the clock


def attack_for(area: str, seconds: float, seed: int) -> dict:
    """Run attacks on one area in batches until the time is over, and return the sums of their results."""
    attack = importlib.import_module(f"support.attacks_{area}").attack
    total: dict = {"tried": 0, "contained": 0, "failures": []}
    start = time.monotonic()
    while not total["tried"] or time.monotonic() - start < seconds:
        result = attack(BATCH, seed)
        seed += 1
        for key in total:
            total[key] += result[key]
    return total | {"s": time.monotonic() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS), help="areas to attack")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each area")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generators")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "test"))  # the tests use the same attacks
    results = {area: attack_for(area, args.seconds, args.seed) for area in args.areas}
    rows = [
        {
            "area": area,
            "attacks": AREAS[area],
            "tried": result["tried"],
            "contained": result["contained"],
            "a second": result["tried"] / result["s"],
        }
        for area, result in results.items()
    ]
    print_table("Hostile input", rows)
    failures = [f"{area}: {failure}" for area, result in results.items() for failure in result["failures"]]
    print("\n" + ("\n".join(failures) or "all contained"))
    print_result({area: {key: result[key] for key in ("tried", "contained")} for area, result in results.items()})
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()

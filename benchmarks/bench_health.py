"""Health rules on runs with a planted fault and on healthy runs: when does each fire, and does any fire in vain?

    python benchmarks/bench_health.py                                              everything, in about 20 minutes
    python benchmarks/bench_health.py --record DIR --faults --healthy 20 --seeds 1 2 3
    python benchmarks/bench_health.py --evaluate DIR
    python benchmarks/bench_health.py --time 100000

``--record`` trains on the built-in tasks, 64 rows a step, and keeps the metrics of each run. ``--evaluate`` applies
the rules to them. Their limits were chosen on seeds 0 and 5. ``--provoked`` adds runs that fail by their settings,
and ``--unseen`` healthy runs of settings that no limit was chosen on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from common import print_result, print_table  # noqa: E402
from health_cases import FILES, QUIET, SIZES, Case, healthy, planted, provoked, run_recipe, unseen  # noqa: E402

from torchrl_rloo.diagnostics.health import RULES, Event, Health  # noqa: E402


def record(name: str, case: Case, folder: Path) -> None:
    """Train once and keep ``metrics.jsonl`` as ``<name>.jsonl``."""
    start, target = time.process_time(), folder / f"{name}.jsonl"
    with tempfile.TemporaryDirectory() as output, contextlib.redirect_stdout(sys.stderr):
        if case.train is not None:
            case.train(Path(output) / "metrics.jsonl")
            shutil.copy(Path(output) / "metrics.jsonl", target)
        else:
            train(name, case, Path(output))
            shutil.copy(Path(output) / "run" / "metrics.jsonl", target)
    print(f"{name}: {time.process_time() - start:.0f} CPU s", flush=True)


def train(name: str, case: Case, folder: Path) -> None:
    """Run the recipe with the settings of a case, whose names of files are made first."""
    seed = next(int(part.partition("=")[2]) for part in case.overrides if part.startswith("seed="))
    made = {word: make(folder, seed) for word, make in FILES.items() if any(word in part for part in case.overrides)}
    overrides = [*SIZES, *QUIET, *case.overrides, f"output_dir={folder}/run"]
    for word, path in made.items():
        overrides = [part.replace(word, str(path)) for part in overrides]
    with case.fault() if case.fault else contextlib.nullcontext():
        try:
            run_recipe("rloo", overrides, finish=False)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)


def load(file: Path) -> list[dict[str, float]]:
    """Return the metrics of a recorded run, with NaN for values that were not finite."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: math.nan if value is None else value for name, value in line.items()} for line in lines]


def judge(history: list[dict[str, float]]) -> list[Event]:
    """Return the events of a recorded run."""
    health = Health(stop_on=())
    return [event for metrics in history for event in health.update(int(metrics["step"]), metrics)]


def visible_step(history: list[dict[str, float]]) -> int | None:
    """Return the evaluation at which a person sees the failure: the held-out score has halved, or stayed near 0 thrice.

    A score that has halved for good, against its best so far, or three scores of at most 0.02 from the start on.
    """
    scores = [(int(line["step"]), line["eval/sampled"]) for line in history if "eval/sampled" in line]
    if len(scores) > 2 and all(score <= 0.02 for _, score in scores[:3]):
        return scores[2][0]
    for place, (step, _) in enumerate(scores):
        best = max(score for _, score in scores[: place + 1])
        if all(score <= best / 2 for _, score in scores[place:]):
            return step
    return None


# Signs by which a person sees a failure, written before the runs that they judge. No rule has their metrics and limits.


def lost_accuracy(history: list[dict[str, float]]) -> int | None:
    """Return the first evaluation at which the held-out score is 0.1 below its best so far."""
    best = 0.0
    for line in history:
        if "eval/sampled" in line:
            best = max(best, line["eval/sampled"])
            if line["eval/sampled"] <= best - 0.1:
                return int(line["step"])
    return None


def one_answer(history: list[dict[str, float]]) -> int | None:
    """Return the first evaluation at which four samples solve hardly more than one, with a quarter unsolved."""
    name = "eval/boxed_accuracy/pass@4"
    for line in history:
        if name in line and line["eval/sampled"] < 0.75 and line[name] < line["eval/sampled"] + 0.05:
            return int(line["step"])
    return None


def impossible_values(history: list[dict[str, float]]) -> int | None:
    """Return the first step at which the critic's estimates are on average above the largest return, 1."""
    return next((int(line["step"]) for line in history if not line.get("values/mean_abs", 0.0) <= 1.0), None)


SIGNS = {
    "trained_reward_model": lost_accuracy,
    "no_kl_high_rate": lost_accuracy,
    "entropy_sign": one_answer,
    "critic_rate": impossible_values,
}


def evaluate(folder: Path) -> None:
    """Print the events of all recorded runs, and the rates of both kinds."""
    faults, alarms, learned, quiet = [], [], [], 0
    for file in sorted(folder.glob("*.jsonl")):
        history = load(file)
        events = [event for event in judge(history) if event.state == "fired" and event.severity != "info"]
        if file.stem.startswith("healthy"):
            quiet += 1
            scores = [line["eval/sampled"] for line in history if "eval/sampled" in line]
            learned.append({"run": file.stem, "first": scores[0], "best": max(scores), "last": scores[-1]})
            alarms += [{"run": file.stem, "rule": event.rule, "step": event.step} for event in events]
            continue
        first = {
            "fault": file.stem,
            "seen": SIGNS.get(file.stem, visible_step)(history),
            "fired": events[0].step if events else None,
        }
        rules = ", ".join(f"{event.rule} {event.step}" for event in events)
        faults.append(first | {"rules": rules, "sentence": events[0].sentence if events else None})
    if faults:
        print_table("Planted faults: step at which a person sees it, step and rules that fired", faults)
    if learned:
        print_table("Healthy runs: held-out score", learned)
    print(f"\n{quiet} healthy runs, {len(alarms)} warnings or stops: {alarms}")
    found = sum(fault["fired"] is not None for fault in faults)
    print_result(
        {"benchmark": "health", "faults": len(faults), "found": found, "healthy": quiet, "alarms": len(alarms)}
    )


def time_rules(steps: int) -> None:
    """Print the time of a step of all rules at the beginning and at the end of a long run, in microseconds."""
    rng, health, spent = random.Random(0), Health(), []
    names = [metric.replace("*", "x") for rule in RULES for metric in rule.metrics]
    for step in range(steps):
        metrics = {name: 0.5 + 0.1 * rng.random() for name in names}
        start = time.perf_counter()
        health.update(step, metrics)
        spent.append(time.perf_counter() - start)
    size = len(json.dumps(health.state_dict()))
    first, last = (1e6 * statistics.median(part) for part in (spent[50:1000], spent[-1000:]))
    print_result({"benchmark": "health", "steps": steps, "us_first": first, "us_last": last, "state_bytes": size})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="DIR", help="train, and keep the metrics here")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="apply the rules to the metrics here")
    parser.add_argument("--time", type=int, metavar="STEPS", help="time the rules over that many steps")
    parser.add_argument("--faults", action="store_true", help="record the runs with a planted fault")
    parser.add_argument("--healthy", type=int, default=0, help="number of healthy runs to record")
    parser.add_argument("--provoked", action="store_true", help="record the runs that fail by their settings")
    parser.add_argument("--unseen", type=int, default=0, help="number of further healthy runs, each of own settings")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", nargs="+", help="names of the runs to record")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.record:
        args.record.mkdir(parents=True, exist_ok=True)
        cases = planted(args.seeds[0], args.steps) if args.faults else {}
        cases |= provoked(args.seeds[0], args.steps) if args.provoked else {}
        cases |= healthy(args.seeds, args.steps, args.healthy) if args.healthy else {}
        cases |= unseen(args.seeds, args.steps, args.unseen)
        for name, case in cases.items():
            if (args.only is None or name in args.only) and not (args.record / f"{name}.jsonl").exists():
                record(name, case, args.record)
    if args.evaluate:
        evaluate(args.evaluate)
    if args.time:
        time_rules(args.time)
    if not (args.record or args.evaluate or args.time):
        with tempfile.TemporaryDirectory() as folder:
            for name, case in {**planted(1, args.steps), **healthy(args.seeds, args.steps, 20)}.items():
                record(name, case, Path(folder))
            evaluate(Path(folder))
        time_rules(100_000)


if __name__ == "__main__":
    main()

"""Training under faults of engines, weight updates, tools, resets and the trainer itself.

    python benchmarks/bench_chaos.py --engine scripted   # a few minutes; final weights equal those without faults
    python benchmarks/bench_chaos.py --engine vllm       # half an hour on two cores; two engines in child processes
    python benchmarks/bench_chaos.py --quick             # seconds; the figures mean nothing

The recipe trains the built-in model on the calculator task, once without and once with faults. In the second run a
pool harms its own engines at random instants, also in the middle of weight updates. This program kills and interrupts
the trainer, and starts the same command again until the run is finished. Afterwards, it checks the ledger's audit file
and compares final weights and sampled tokens of the two runs. It prints a table of faults, their effects and the times
until they were overcome, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from chaos import ENGINE_FAULTS, FaultLog
from common import print_result, print_table
from safetensors.torch import load_file

from torchrl_rloo.collectors.ledger import check_audit

RECIPE = Path(__file__).parents[1] / "sota_implementations" / "rloo" / "rloo.py"
EFFECTS = {
    "kill": "requests go to the other engine with the same seeds; the engine is restarted and filled",
    "hang": "the engine does not answer and is killed; then as above",
    "kill in a push": "the other engine takes the version; the dead one is restarted and filled",
    "hang in a push": "the other engine takes the version; the hung one is killed, restarted and filled",
    "refused push": "the engine is filled again before it samples",
    "tool stalls": "its conversation waits, the others go on",
    "reset fails": "the run ends with the error; the same command resumes it",
    "trainer killed": "the same command resumes the run from its checkpoint",
    "trainer interrupted": "the run stops after the step; the same command resumes it",
}


def command(args: argparse.Namespace, directory: Path, faults: int) -> list[str]:
    """Return the recipe's command line."""
    log = directory / "faults.jsonl"
    engine = ["inference.engine.request_timeout=60"]
    if args.engine == "scripted":
        engine = ["inference.engine._target_=chaos.CalculatorScript", "inference.engine.request_timeout=5"]
        engine += ["inference.self_test=false"]
    resets, stalls = (args.resets, args.stalls) if faults else (0, 0)
    transforms = (
        f"[{{_target_: chaos.FlakyTools, log: {log}, faults: {stalls}}},"
        f"{{_target_: chaos.FlakyReset, log: {log}, faults: {resets}}}]"
    )
    overrides = [
        "inference=vllm_process",
        f"output_dir={directory}",
        f"plan.steps={args.steps}",
        f"plan.prompts_per_step={args.prompts}",
        "eval.every=0",
        "eval.num_samples=1",
        "checkpoint.every=5",
        "collector.audit=true",
        "collector.max_failed_pushes=1000",
        "inference.parity_every=0",
        "inference.replicas=2",
        *engine,
        "inference.pool._target_=chaos.ChaoticPool",
        f"+inference.pool.log={log}",
        f"+inference.pool.faults={faults}",
        f"+inference.pool.mean_gap={args.gap}",
        f"+inference.pool.seed={args.seed}",
        "inference.pool.supervisor.probe_every=0.5",
        f"inference.pool.supervisor.probe_timeout={1.0 if args.engine == 'scripted' else 3.0}",
        "inference.pool.supervisor.max_restarts=1000",
        "+inference.pool.supervisor.max_backoff=1",
        f"inference.updater.timeout={3 if args.engine == 'scripted' else 15}",
        f"environment.transforms={transforms}",
        f"reward.shaping=[{{_target_: chaos.RecordTokens, path: {directory / 'tokens.jsonl'}}}]",
    ]
    return [sys.executable, str(RECIPE), "--config", "rloo_tools", *overrides]


def run(args: argparse.Namespace, directory: Path, faults: int, kills: int) -> dict[str, Any]:
    """Run the recipe to its end, with faults from outside, and return its result line and the number of starts."""
    directory.mkdir(parents=True)
    log, rng, starts = FaultLog(directory / "faults.jsonl"), random.Random(args.seed), 0
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    begin = time.monotonic()
    while True:
        starts += 1
        with (directory / f"trainer_{starts}.log").open("w") as output:
            process = subprocess.Popen(
                command(args, directory, faults), stdout=output, stderr=subprocess.STDOUT, env=environment
            )
            log.write("trainer starts")
            gap = (3.0, 10.0) if args.engine == "scripted" else (20.0, 60.0)
            done = _watch(process, directory, log, rng, kills, gap)
        if done is not None:
            return done | {"starts": starts, "seconds": time.monotonic() - begin}
        if starts > 3 + kills + args.resets:
            raise RuntimeError(f"the run did not end in 50 starts; see {directory}")


def _watch(
    process: subprocess.Popen, directory: Path, log: FaultLog, rng: random.Random, kills: int, gap: tuple[float, float]
) -> dict | None:
    """Wait for the trainer, and kill or interrupt it at random steps; return its result if it finished."""
    ledger, planned = directory / "ledger.jsonl", None
    size = ledger.stat().st_size if ledger.exists() else 0
    while process.poll() is None:
        time.sleep(0.05)
        grown = ledger.exists() and ledger.stat().st_size > size
        if grown and planned is None:
            log.write("trainer samples")
            planned = time.monotonic() + rng.uniform(*gap)
        due = planned is not None and time.monotonic() > planned
        if due and log.count("trainer killed", "trainer interrupted") < kills:
            kind = rng.choice(("trainer killed", "trainer killed", "trainer interrupted"))
            children = psutil.Process(process.pid).children(recursive=True)
            log.write(kind)
            process.send_signal(signal.SIGKILL if kind == "trainer killed" else signal.SIGTERM)
            process.wait()
            for child in children:  # a stopped child cannot see that its parent died
                if child.is_running() and child.status() == psutil.STATUS_STOPPED:
                    child.kill()
    output = sorted(directory.glob("trainer_*.log"), key=lambda p: p.stat().st_mtime)[-1].read_text()
    lines = [line for line in output.splitlines() if line.startswith('{"cpu_seconds"')]
    return json.loads(lines[-1]) if process.returncode == 0 and lines else None


def recovery_times(records: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the seconds from each fault until the engine, or the trainer, works again."""
    found: dict[str, list[float]] = defaultdict(list)
    for i, record in enumerate(records):
        kind = record["kind"]
        if kind in ENGINE_FAULTS:
            for later in records[i + 1 :]:
                if later["kind"] == "trainer starts":  # the trainer died before the engine was back
                    break
                lost = later["kind"] == "state" and later["member"] == record["member"]
                if lost and later["state"] == "ready":
                    found[kind].append(later["time"] - record["time"])
                    break
        elif kind in ("reset fails", "trainer killed", "trainer interrupted"):
            back = [later for later in records[i + 1 :] if later["kind"] == "trainer samples"]
            if back:
                found[kind].append(back[0]["time"] - record["time"])
        elif kind == "tool stalls":
            found[kind].append(record["seconds"])
    return found


def same_weights(one: Path, two: Path) -> bool:
    """Return whether two saved models are equal bit for bit."""
    a, b = (load_file(path / "model" / "model.safetensors") for path in (one, two))
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def equal_rows(one: Path, two: Path) -> float:
    """Return the share of rows with equal tokens, by group and member; the last record of a row counts."""
    tokens = []
    for path in (one, two):
        records = [json.loads(line) for line in (path / "tokens.jsonl").read_text().splitlines()]
        tokens.append({(r["group"], r["member"]): r["tokens"] for r in records})
    return sum(tokens[1].get(row) == ids for row, ids in tokens[0].items()) / len(tokens[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("scripted", "vllm"), default="scripted")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--faults", type=int, default=50, help="faults of engines")
    parser.add_argument("--kills", type=int, default=4, help="times that the trainer is killed or interrupted")
    parser.add_argument("--stalls", type=int, default=4, help="stalls of tools")
    parser.add_argument("--resets", type=int, default=2, help="resets that raise")
    parser.add_argument("--gap", type=float, default=None, help="mean seconds between two faults of engines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", default=None, help="directory of both runs; a temporary one by default")
    parser.add_argument("--quick", action="store_true", help="smallest size of everything")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.faults, args.kills, args.stalls, args.resets = 4, 2, 1, 1, 0
    args.gap = args.gap or (0.5 if args.engine == "scripted" else 4.0)
    base = Path(args.directory or tempfile.mkdtemp(prefix="chaos_"))
    clean, chaotic = base / "clean", base / "chaotic"

    # Both runs, then the audit of the second
    before = run(args, clean, faults=0, kills=0)
    after = run(args, chaotic, faults=args.faults, kills=args.kills)
    audit = check_audit(chaotic / "ledger.jsonl")
    records = FaultLog(chaotic / "faults.jsonl").records()
    times = recovery_times(records)
    table = []
    for kind, effect in EFFECTS.items():
        count = sum(record["kind"] == kind for record in records)
        seconds = times.get(kind, [])
        table.append(
            {
                "fault": kind,
                "count": count,
                "recovered": len(seconds),
                "median s": median(seconds) if seconds else None,
                "max s": max(seconds, default=None),
                "effect": effect,
            }
        )
    print_table("faults", table)
    print_result(
        {
            "engine": args.engine,
            "steps": args.steps,
            "faults": sum(row["count"] for row in table),
            "starts of the trainer": after["starts"],
            "groups acknowledged": len(audit.acknowledged),
            "groups expected": args.steps * args.prompts,
            "attempts": audit.attempts,
            "equal weights": same_weights(clean, chaotic),
            "rows with equal tokens": equal_rows(clean, chaotic),
            "seconds without faults": before["seconds"],
            "seconds with faults": after["seconds"],
        }
    )


if __name__ == "__main__":
    main()

"""One task, four ways: a tool of the environment, and agents that call an endpoint. Do they learn the same?

    python benchmarks/bench_agent_ways.py --seeds 0 1

Each run trains the built-in model on the calculator task with the recipe `rloo`, with equally many steps. The first way
is `ToolTransform`. The agents use the client of OpenAI, the Agents SDK, and a command, a new process for each
conversation. Runs that have finished in ``--directory`` are not repeated. The program fails if the rows of the first
step differ between tool and client, or if an accuracy is outside of another's 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import print_result, print_table

AGENT = "{_target_:torchrl_rloo.agents.AgentTransform,agent:torchrl_rloo.embedded.agents.%s%s}"
PARSER = (
    ",parser:{_target_:torchrl_rloo.envs.tools.parsers.RegexParser,"
    "pattern:'<tool>(?P<expression>[^<]*)</tool>',tool:calculator}"
)
WAYS = {
    "tool": [],
    "client": [AGENT % ("openai_agent", "")],
    "framework": [AGENT % ("framework_agent", PARSER)],
    "command": [AGENT % ("command_agent", "")],
}
COMMON = ["task=calculator", "eval.every=0", "log.loggers=[]", "log.samples=0", "check.mode=off"]


def train(way: str, seed: int, args: argparse.Namespace) -> Path:
    """Run the recipe, unless it has finished, and return its folder."""
    folder = (args.directory / f"{way}-{seed}").resolve()
    if not (folder / "report.html").exists():
        command = [sys.executable, "-m", "torchrl_rloo.cli.main", "run", "rloo", *COMMON, f"seed={seed}"]
        command += [f"environment.transforms=[{transform}]" for transform in WAYS[way]]
        command += [f"plan.steps={args.steps}", f"output_dir={folder}", f"data.eval_size={args.held_out}"]
        rows = ["rollouts.path=" + str(folder / "rows")] if way in ("tool", "client") else []
        subprocess.run([*command, *rows], check=True, stdout=subprocess.DEVNULL)
    return folder


def summarize(way: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return the figures of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(lines) if "eval/greedy" in line)
    seconds = sum(line.get("time/collect", 0.0) for line in times)
    row: dict[str, Any] = {"way": way, "seed": seed, "steps": last["step"], "before": lines[0]["eval/greedy"]}
    row |= {name: last[f"eval/{name}"] for name in ("greedy", "greedy_low", "greedy_high", "sampled")}
    return row | {"s of collection": seconds, "CPU s": times[-1]["cpu_seconds"]}


def equal_rows(first: Path, second: Path) -> int:
    """Return how many rows of the first step are equal token for token; exit if one differs."""
    import torch

    from torchrl_rloo.data import keys
    from torchrl_rloo.replay import RolloutFiles

    rows = [dict(RolloutFiles(folder / "rows").groups(step=1)) for folder in (first, second)]
    ours, theirs = ([row for group in found.values() for row in group.unbind(0)] for found in rows)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for key in (keys.TOKENS, keys.ACTION_MASK, keys.REWARD):
            if not torch.equal(one[key], other[key]):
                raise SystemExit(f"row {number} of {second} has another {key} than that of {first}")
    return len(ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="ways to run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="seeds of each way")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--held-out", type=int, default=128, help="held-out prompts")
    parser.add_argument("--directory", type=Path, default=Path("outputs/agent_ways"), help="folder of the runs")
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        for way in args.ways:
            rows.append(summarize(way, seed, train(way, seed, args)))
            print_result(rows[-1])
    print_table("The calculator task, by a tool and by agents", rows)
    for seed in args.seeds:
        if {"tool", "client"} <= set(args.ways):
            number = equal_rows(args.directory / f"tool-{seed}", args.directory / f"client-{seed}")
            print(f"seed {seed}: {number} rows of the first step are equal token for token, by tool and by client")
        same = [row for row in rows if row["seed"] == seed]
        for row in same:
            for other in same:
                if not other["greedy_low"] <= row["greedy"] <= other["greedy_high"]:
                    raise SystemExit(f"seed {seed}: greedy accuracy differs between {row['way']} and {other['way']}")


if __name__ == "__main__":
    main()

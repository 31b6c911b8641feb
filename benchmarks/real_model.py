"""Gemma 3 270M with torchrl_rloo and with TRL: the runs of ``bench_vs_trl.py --sizes gemma``."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import print_table, run_python

HERE = Path(__file__).resolve().parent
SHAPES = {  # prompts, tokens of a prompt, new tokens
    "long prompt": (8, 256, 8),
    "equal": (2, 64, 64),
    "long answer": (2, 16, 256),
}
SPEED = {"num_generations": 8, "micro_batch_size": 8, "reward": "id_sum", "learning_rate": 2e-6}
SPEED |= {"end": "<unused42>"}  # the model never samples it, so every completion has its full length
SIDES: dict[str, dict[str, Any]] = {"trl": {}, "ours": {"packing": "shared_prefix"}}
WORDS = "time year people way day man thing life child world school state family group country hand part place".split()

SUMS = {"num_prompts": 4, "num_generations": 8, "max_new_tokens": 6, "end": "\n", "reward": "first_number"}
SUMS |= {"learning_rate": 2e-6, "held_out_every": 4}


def write_prompts(path: Path, texts: Sequence[str], answers: Sequence[str]) -> str:
    rows = zip(texts, answers, strict=True)
    lines = (json.dumps({"prompt": [{"role": "user", "content": text}], "answer": answer}) for text, answer in rows)
    path.write_text("\n".join(lines))
    return str(path)


def run_side(side: str, run: dict[str, Any], path: Path) -> dict[str, Any]:
    """Execute a run in a separate process, or return its result from an earlier one."""
    if not path.exists():
        path.write_text(json.dumps(run_python(str(HERE / "loops.py"), side, json.dumps(run))))
    result = json.loads(path.read_text())
    took = f"{result['cpu_s_per_step']:.1f} CPU s a step, peak {result['peak_mb']:.0f} MB"
    print(f"{path.stem}: {took}", file=sys.stderr, flush=True)
    return result


def speed_run(shape: str, model: str, folder: Path) -> dict[str, Any]:
    """Return the run of both sides at a shape: one step, after one of warm-up."""
    count, length, new = SHAPES[shape]
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=length - 1)) for _ in range(2 * count)]  # a token each, after the first
    prompts = write_prompts(folder / f"{shape}.jsonl", texts, [""] * len(texts))
    run = {"model": model, "prompts": prompts, "steps": 2}
    return run | {"num_prompts": count, "max_new_tokens": new, **SPEED}


def compare_speed(shape: str, model: str, results: Path, folder: Path) -> list[dict[str, Any]]:
    """Execute one run of each side at a shape, and print a table."""
    table = []
    for side, settings in SIDES.items():
        result = run_side(side, speed_run(shape, model, folder) | settings, results / f"{shape}, {side}.json")
        step, tokens = result["cpu_s_per_step"], result["tokens_per_step"]
        table.append({"side": side, "CPU s/step": step, "tokens/CPU s": tokens / step, "MB peak": result["peak_mb"]})
    for row in table:
        row["ours / side, tokens/CPU s"] = table[-1]["tokens/CPU s"] / row["tokens/CPU s"]
        row["ours / side, MB"] = table[-1]["MB peak"] / row["MB peak"]
    count, length, new = SHAPES[shape]
    print_table(f"{shape}: {count} prompts of {length} tokens x 8 completions of {new} tokens", table)
    return table


def sums(path: Path, count: int, seed: int) -> str:
    """Write sums of a number below 60 and a digit, each after three examples."""
    rng = random.Random(seed)
    examples = "".join(f"{a} + {b} = {a + b}\n" for a, b in ((12, 5), (30, 8), (41, 6)))
    pairs = [(rng.randrange(60), rng.randrange(10)) for _ in range(count)]
    texts = [f"{examples}{a} + {b} =" for a, b in pairs]
    return write_prompts(path, texts, [str(a + b) for a, b in pairs])


def learning_run(model: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Return the run of both sides for a seed."""
    prompts = sums(folder / f"sums{seed}.jsonl", steps * SUMS["num_prompts"], seed)
    held_out = sums(folder / "sums.jsonl", 64, 99)
    return {"model": model, "prompts": prompts, "held_out": held_out, "seed": seed, "steps": steps, **SUMS}


def compare_learning(model: str, seeds: int, steps: int, results: Path, folder: Path) -> list[dict[str, Any]]:
    """Train both sides from the same start for each seed, print a table, and return the results."""
    done = []
    for seed in range(seeds):
        run = learning_run(model, seed, steps, folder)
        for side, settings in SIDES.items():
            done.append(run_side(side, run | settings, results / f"sums, {side}, {seed}.json"))
    table = [
        {"seed": result["run"]["seed"], "side": result["side"]}
        | {f"held out, batch {batch}": accuracy for batch, accuracy in result["held_out"]}
        | {"last 5 rewards": sum(result["rewards"][-5:]) / 5}
        | {"CPU s": result["cpu_s"], "MB peak": result["peak_mb"]}
        for result in done
    ]
    rows = f"{SUMS['num_prompts']} prompts x {SUMS['num_generations']} completions"
    print_table(f"Sums, {steps} batches of {rows}", table)
    return done

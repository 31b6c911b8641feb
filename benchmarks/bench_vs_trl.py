"""Comparison with TRL's RLOOTrainer: CPU time, memory and learning of the same run.

    python benchmarks/bench_vs_trl.py                          # speed and memory at two sizes
    python benchmarks/bench_vs_trl.py --mode learning          # batches to a training reward, three seeds
    python benchmarks/bench_vs_trl.py --sizes gemma            # a real model, see real_model.py; also with --mode

Each figure comes from a separate process with one thread. The sides alternate and ratios are computed pair by pair, so
that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import real_model
from common import print_result, print_table, run_python

HERE = Path(__file__).resolve().parent
LOOPS = str(HERE / "loops.py")

SIZES = {
    "small": {
        "vocab_size": 294,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "large": {
        "vocab_size": 32_000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
}
STEPS = {"small": 20, "large": 2}  # measured steps of a process, after one warm-up step
BATCH = {"num_prompts": 8, "num_generations": 8, "max_new_tokens": 64}

TASK = {"num_prompts": 16, "num_generations": 8, "max_new_tokens": 32, "learning_rate": 3e-4}
TASK |= {"warm_up_steps": 5, "final_share": 0.1, "reward": "boxed_accuracy"}
LEVELS = (0.8, 0.9)
WINDOW = 5  # batches over which a training reward is averaged


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def build(size: str, folder: str) -> None:
    """Save a start model and its tokenizer. A separate process runs it, which keeps this one small."""
    from common import qwen2, word_tokenizer

    tokenizer = word_tokenizer(SIZES[size]["vocab_size"])
    model = qwen2(tokenizer, **SIZES[size])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(json.dumps({"parameters": model.num_parameters()}))


def word_prompts(count: int) -> list[dict[str, Any]]:
    """Return chat messages of 16 to 32 random words that both vocabularies have."""
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(288)}" for _ in range(rng.randint(16, 32))) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": text}]} for text in texts]


def prepare_speed(size: str, measured: int, folder: Path) -> tuple[int, str]:
    """Build the model and the prompts, and return its number of parameters and the run of ``loops.py``."""
    model = folder / size
    built = run_python(__file__, "--build", size, str(model))
    steps = measured + 1
    prompts = write_lines(folder / f"{size}.jsonl", word_prompts(steps * BATCH["num_prompts"]))
    run = json.dumps(
        {"model": str(model), "prompts": prompts, "steps": steps, "learning_rate": 1e-4, "reward": "id_sum", **BATCH}
    )
    return built["parameters"], run


def compare_speed(size: str, pairs: int, folder: Path, against: Path | None = None) -> dict[str, Any]:
    """Run each side ``pairs`` times in alternation, and print a table.

    Args:
        size: name in ``SIZES``.
        pairs: runs per side.
        folder: folder of the model and the prompts.
        against: root of another checkout, whose package is a third side; None leaves it out.
    """
    parameters, run = prepare_speed(size, STEPS[size], folder)
    sides = {"trl": None, "ours": None} | ({} if against is None else {"ours, other checkout": against})
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for pair in range(pairs):
        for side, checkout in sides.items():
            done = run_python(LOOPS, side.partition(",")[0], run, checkout=checkout)
            results[side].append(done)
            took = f"{done['cpu_s_per_step']:.3f} CPU s a step, peak {done['peak_mb']:.0f} MB"
            print(f"{size}, pair {pair + 1} of {pairs}, {side}: {took}", file=sys.stderr, flush=True)
    figures: dict[str, Any] = {"parameters": parameters}
    for side, done in results.items():
        ratios = [t["cpu_s_per_step"] / o["cpu_s_per_step"] for t, o in zip(results["trl"], done, strict=True)]
        memory = median(o["peak_mb"] / t["peak_mb"] for t, o in zip(results["trl"], done, strict=True))
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        figures[side] = summary(done) | {"TRL / side": median(ratios), "range": spread, "MB, side / TRL": memory}
    print_table(
        f"{size}: {parameters:,} parameters, {BATCH['num_prompts']} prompts x {BATCH['num_generations']} "
        f"completions x {BATCH['max_new_tokens']} tokens; medians of {pairs} pairs of {STEPS[size]} steps",
        [{"side": side, **figures[side]} for side in results],
    )
    return figures


def summary(done: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return medians over the runs of one side."""
    step, tokens, loaded, peak = (
        median(r[k] for r in done) for k in ("cpu_s_per_step", "tokens_per_step", "loaded_mb", "peak_mb")
    )
    return {
        "CPU s/step": step,
        "tokens/step": tokens,
        "tokens/CPU s": tokens / step,
        "MB loaded": loaded,
        "MB peak": peak,
    }


def first_batch(rewards: Sequence[float], level: float) -> int | None:
    """Return the number of batches after which the mean reward of the last ``WINDOW`` reaches a level."""
    means = (sum(rewards[i - WINDOW : i]) / WINDOW for i in range(WINDOW, len(rewards) + 1))
    return next((i for i, mean in enumerate(means, WINDOW) if mean >= level), None)


def warm_start(seed: str) -> None:
    """Build the start model of the addition task if it is not cached."""
    from torchrl_rloo.embedded import warm_start

    print(json.dumps({"model": str(warm_start(int(seed)))}))


def addition_lines(split: str, seed: str, path: str) -> None:
    """Write the addition task's prompts in an order that depends on the seed."""
    from torchrl_rloo.embedded import addition_prompts

    rows = [{"prompt": r["query"], "answer": r["answer"]} for r in addition_prompts(split, seed=int(seed))]
    print(json.dumps({"path": write_lines(Path(path), rows)}))


def compare_learning(seeds: int, steps: int, folder: Path) -> dict[str, Any]:
    """Train every side on the addition task, from the same start for each seed, and print a table."""
    sides = ("trl", "ours")
    held_out = run_python(__file__, "--addition", "test", "0", str(folder / "test.jsonl"))["path"]
    table = []
    for seed in range(seeds):
        model = run_python(__file__, "--warm-start", str(seed))["model"]
        prompts = run_python(__file__, "--addition", "train", str(seed), str(folder / f"train{seed}.jsonl"))["path"]
        run = {"model": model, "prompts": prompts, "held_out": held_out, "seed": seed, "steps": steps, **TASK}
        for side in sides:
            result = run_python(LOOPS, side, json.dumps(run))
            reached = {f"batches to {level:.0%}": first_batch(result["rewards"], level) for level in LEVELS}
            last = sum(result["rewards"][-WINDOW:]) / WINDOW
            row = {"seed": seed, "side": side, **reached, "last training reward": last}
            table.append(row | {"held-out greedy": result["held_out"][-1][1], "CPU s": result["cpu_s"]})
            print(f"learning: {table[-1]}", file=sys.stderr, flush=True)
    print_table(f"Two-digit addition, {steps} batches of 16 prompts x 8 completions", table)
    return {"learning": table}


def real_model_figures(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare speed or learning of the real model."""
    results = args.results or folder
    if args.mode == "speed":
        return {x: real_model.compare_speed(x, args.gemma, results, folder) for x in real_model.SHAPES}
    return {"learning": real_model.compare_learning(args.gemma, args.seeds, args.batches, results, folder)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("speed", "learning"), default="speed")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, "gemma"], default=list(SIZES))
    parser.add_argument("--pairs", type=int, default=3, help="runs per side and size")
    parser.add_argument("--against", type=Path, help="root of another checkout whose package is measured as well")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=60, help="batches of a learning run")
    parser.add_argument("--gemma", default="gemma-3-270m", help="name or folder of the real model")
    parser.add_argument("--results", type=Path, help="folder of the real model's results; none is computed twice")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if "gemma" in args.sizes:
            figures = real_model_figures(args, Path(folder))
        elif args.mode == "speed":
            against = None if args.against is None else args.against.resolve()
            figures = {size: compare_speed(size, args.pairs, Path(folder), against) for size in args.sizes}
        else:
            figures = compare_learning(args.seeds, args.batches, Path(folder))
    print_result(figures)


HELPERS = {"--build": build, "--warm-start": warm_start, "--addition": addition_lines}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in HELPERS:
        HELPERS[sys.argv[1]](*sys.argv[2:])
    else:
        main()

"""RLOO on pictures, and its control: rows with the right answers and the pictures of other rows.

    python benchmarks/bench_images.py [--seeds 0 1 2] [--steps 120] [--only right wrong]

- ``right`` is the run of the ``shapes`` task with the built-in vision-language model.
- ``wrong`` trains and evaluates with each picture moved to another row. It must not exceed ``blind``, the accuracy of
  the best answer to each question for a policy that does not look.

Accuracies are on held-out rows. The times are those of the run, after the warm start. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from common import print_result, print_table, run_python

SCRIPT = Path(__file__).resolve().parents[1] / "sota_implementations" / "rloo" / "rloo.py"
QUIET = ["eval.every=1000", "log.loggers=[]", "log.samples_every=1000", "checkpoint.every=1000"]
EVAL_SIZE = 256


def write_wrong(folder: Path) -> list[str]:
    """Write the rows with each picture moved to another row, and return the settings that load them."""
    from torchrl_rloo.embedded import shapes_prompts

    for split, size in {"train": None, "test": EVAL_SIZE}.items():
        rows = shapes_prompts(split, size=size)
        pictures = [row["query"][0]["content"][0] for row in rows]
        for row, picture in zip(rows, pictures[1:] + pictures[:1], strict=True):
            row["query"][0]["content"][0] = picture
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [f"data.source={folder}/train.jsonl", f"data.eval_source={folder}/test.jsonl"]


def blind_accuracy() -> float:
    """Return the highest held-out accuracy of one answer per question, chosen with hindsight."""
    from torchrl_rloo.embedded import shapes_prompts

    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for row in shapes_prompts("test", size=EVAL_SIZE):
        answers[row["query"][0]["content"][1]["text"]][row["answer"]] += 1
    return sum(max(counts.values()) for counts in answers.values()) / EVAL_SIZE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--only", nargs="+", choices=("right", "wrong"), default=["right", "wrong"])
    args = parser.parse_args()
    runs, blind = [], blind_accuracy()
    with tempfile.TemporaryDirectory() as name:
        settings = {"right": [], "wrong": write_wrong(Path(name))}
        for pictures in args.only:
            for seed in args.seeds:
                output = f"output_dir={name}/{pictures}-{seed}"
                common = ["task=shapes", f"seed={seed}", f"plan.steps={args.steps}", f"data.eval_size={EVAL_SIZE}"]
                r = run_python(str(SCRIPT), *common, output, *QUIET, *settings[pictures])
                figures = {k: v for k, v in r.items() if k not in ("model", "report")}  # their directory is temporary
                runs.append({"pictures": pictures, "seed": seed, **figures})
    rows = [
        {
            **{name: r[name] for name in ("pictures", "seed")},
            **{
                f"{name} {when}": r[f"eval/{name}_{when}"]
                for name in ("greedy", "sampled")
                for when in ("before", "after")
            },
            "CPU s": r["cpu_seconds"],
        }
        for r in runs
    ]
    print_table(f"held-out accuracy; blind {blind:.3f}", rows)
    print_result({"benchmark": "images", "steps": args.steps, "blind": blind, "runs": runs})


if __name__ == "__main__":
    main()

"""Three figures of the small model in about a minute, of this checkout and of another one.

    python benchmarks/bench_quick.py                      # or: make bench-quick
    python benchmarks/bench_quick.py --against ../other   # two checkouts, in alternation

``floor`` is a training step over a bare loop (``bench_floor.py``). ``ms/row`` is the framework's CPU time of a row, in
batches of 128 (``bench_overhead.py``). ``TRL / ours`` compares the CPU time of a step (``bench_vs_trl.py``). The
scripts are those of this checkout. Only the package comes from the other one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from bench_vs_trl import HERE, LOOPS, prepare_speed
from common import print_result, print_table, run_python

THIS = HERE.parent


def measure(checkout: Path, run: str, trl: float) -> dict[str, float]:
    """Return the figures of one checkout; ``trl`` is TRL's CPU time of a step."""
    arguments = {"floor": ["--rounds", "8"], "overhead": ["--rows", "128", "--sides", "ours"]}
    floor, overhead = (
        run_python(str(HERE / f"bench_{name}.py"), *each, checkout=checkout) for name, each in arguments.items()
    )
    step = run_python(LOOPS, "ours", run, checkout=checkout)["cpu_s_per_step"]
    return {"floor": floor["ratio"], "ms/row": overhead["128"]["ours"]["sum of these"], "TRL / ours": trl / step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="root of another checkout to measure")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each checkout")
    args = parser.parse_args()
    checkouts = {"this": THIS} | ({} if args.against is None else {"against": args.against.resolve()})
    results: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        _, run = prepare_speed("small", 12, Path(folder))
        for round_ in range(args.rounds):
            trl = run_python(LOOPS, "trl", run)["cpu_s_per_step"]
            for name in sorted(checkouts, reverse=round_ % 2 == 1):
                results[name].append(measure(checkouts[name], run, trl))
    figures = {name: {key: median(r[key] for r in done) for key in done[0]} for name, done in results.items()}
    print_table(f"medians of {args.rounds} rounds", [{"checkout": name} | row for name, row in figures.items()])
    print_result(figures | {"rounds": results})


if __name__ == "__main__":
    main()

"""Time until the live page of a long run is complete: reading the files, and drawing in a browser.

``python benchmarks/bench_watch.py`` writes a run of 100,000 steps with 60 metrics. It times the server alone, then the
page in the headless browser that CHROME names or that is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import tempfile
import threading
import time
from pathlib import Path

from torchrl_rloo.diagnostics.watch import LiveServer
from torchrl_rloo.diagnostics.watch_page import LivePage

ROOT = Path(__file__).resolve().parents[1]
DRAWN = "document.querySelector('.chart canvas')"
DONE = "document.getElementById('status').textContent === 'live' && document.querySelector('.chart canvas')"


def write_run(folder: Path, steps: int, metrics: int) -> float:
    """Write the metrics and timings of a run, and return their megabytes."""
    rng, size = random.Random(0), 0
    names = ["reward", "entropy", "grad_norm", *(f"group/metric_{i}" for i in range(metrics - 3))]
    for kind, own in (("metrics", names), ("timings", ["time/step", "time/collect", "time/train", "cpu_seconds"])):
        with (folder / f"{kind}.jsonl").open("w") as file:
            for step in range(1, steps + 1):
                size += file.write(json.dumps({"step": step} | {name: rng.random() for name in own}) + "\n")
    return size / 1e6


def time_server(folder: Path) -> tuple[float, float, int]:
    """Return wall seconds and CPU seconds until all is read, and the characters of the largest answer."""
    page, wall, cpu, largest = LivePage([folder]), time.perf_counter(), time.process_time(), 0
    while True:
        answer = page.update()
        largest = max(largest, len(json.dumps(answer)))
        if not answer["pending"]:
            return time.perf_counter() - wall, time.process_time() - cpu, largest


def time_page(folder: Path, ready: str) -> float | None:
    """Return wall seconds from the request for the page until a condition holds in it; None without a browser."""
    spec = importlib.util.spec_from_file_location("browser", ROOT / "test/diagnostics/conftest.py")
    tools = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tools)
    program = os.environ.get("CHROME") or next(filter(None, map(shutil.which, tools.BROWSERS)), None)
    if program is None:
        return None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, LiveServer([folder]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = tools.Browser(program, Path(profile))
        try:
            start = time.perf_counter()
            browser.open(server.url, ready=ready)
            return time.perf_counter() - start
        finally:
            browser.close()
            server.shutdown()


def main() -> None:
    """Print the times of one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the run; default: 100000")
    parser.add_argument("--metrics", type=int, default=60, help="metrics of a step; default: 60")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_run(Path(folder), options.steps, options.metrics)
        wall, cpu, largest = time_server(Path(folder))
        print(f"{options.steps:,} steps, {options.metrics} metrics, {size:.0f} MB", flush=True)
        print(f"server: all read in {wall:.2f} s ({cpu:.2f} CPU s); largest answer {largest / 1e6:.2f} MB", flush=True)
        for what, ready in (("the curves, of a sample of all steps", DRAWN), ("every step", DONE)):
            seconds = time_page(Path(folder), ready)
            print("browser: none found" if seconds is None else f"browser: {what}, after {seconds:.2f} s")


if __name__ == "__main__":
    main()

"""Asynchronous RLOO on a Ray cluster of three nodes, one of which is killed, against one process that trains alone.

    python benchmarks/bench_cluster.py

The nodes are raylets on this machine, each with its own object store and processes. Custom resources place the parts:
the trainer on the head, an engine and a rollout worker on each of two other nodes. When the run has done a number of
steps, one of these nodes is killed. Another joins some steps later. The built-in model learns to call a calculator.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

from common import OFFLINE, ONE_THREAD, print_result, print_table

COMMAND = [sys.executable, "-m", "torchrl_rloo.cli.main", "run"]
PLACES = {"engine": 1, "worker": 1}  # resources of a sampling node, for one engine and one worker
ON_CLUSTER = [
    "inference.replicas=2",
    "inference.engine.resources={engine:1}",
    "ray.num_workers=2",
    "ray.worker_options={resources:{worker:1}}",
    "inference.pool.supervisor.probe_every=1",
]
TICKS = os.sysconf("SC_CLK_TCK")


class CpuMeter:
    """CPU seconds of all processes below this one, also of those that were killed; a thread reads them.

    Attributes:
        seconds: user and system time by process.
    """

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, str], float] = {}
        self._ended = Event()
        Thread(target=self._run, daemon=True).start()

    def total(self) -> float:
        """Return the CPU seconds so far."""
        return sum(self.seconds.values())

    def close(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(0.5):
            self._read()

    def _read(self) -> None:
        fields: dict[int, list[str]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
        below = {os.getpid()}
        while found := {pid for pid, stat in fields.items() if int(stat[1]) in below} - below:
            below |= found
        below |= fields.keys() & {pid for pid, _ in self.seconds}  # whose parent has ended
        for pid in below - {os.getpid()}:
            stat = fields[pid]
            key = (pid, stat[19])  # with its start
            if int(stat[1]) in below or key in self.seconds:
                self.seconds[key] = (int(stat[11]) + int(stat[12])) / TICKS


def steps_done(folder: Path) -> int:
    """Return the number of training steps in a run's log."""
    file = folder / "metrics.jsonl"
    return file.read_text().count('"staleness"') if file.exists() else 0


def train(recipe: str, folder: Path, settings: list[str], watch: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run a recipe in a process, call ``watch`` while it runs, and return its figures.

    Raises:
        RuntimeError: if the recipe fails, with the end of its output.
    """
    meter, began = CpuMeter(), time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("w+") as log:
        command = [*COMMAND, recipe, *settings, f"output_dir={folder}"]
        process = subprocess.Popen(command, env=os.environ | ONE_THREAD | OFFLINE, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                watch()
                time.sleep(0.1)
        finally:
            process.kill()
            meter.close()
        log.seek(0)
        text = log.read()
    if process.returncode:
        raise RuntimeError(f"{recipe} failed:\n{text[-3000:]}")
    result = json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("{")))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "greedy before": result["eval/greedy_before"],
        "greedy after": result["eval/greedy_after"],
        "sampled after": result["eval/sampled_after"],
        "CPU s": meter.total(),
        "wall s": time.monotonic() - began,
        "lines": [line for line in lines if "staleness" in line],
    }


class Faults:
    """Death of one sampling node after some steps, and a new node some steps later.

    Args:
        cluster: Ray's cluster of this machine.
        folder: output folder of the run.
        kill_at: step after which the node is killed.
        join_at: step after which another one joins.
    """

    def __init__(self, cluster: Any, folder: Path, kill_at: int, join_at: int):
        self.cluster, self.folder, self.kill_at, self.join_at = cluster, folder, kill_at, join_at
        self.events: list[dict[str, Any]] = []
        self._began = time.monotonic()

    def watch(self) -> None:
        """Do what is due."""
        done = steps_done(self.folder)
        if not self.events and done >= self.kill_at:
            self.cluster.remove_node(sorted(self.cluster.worker_nodes, key=id)[0], allow_graceful=False)
            self._note(done, "sampling node killed: raylet, engine, worker and its rows")
        elif len(self.events) == 1 and done >= self.join_at:
            self.cluster.add_node(num_cpus=4, resources=PLACES)
            self._note(done, "sampling node joined")

    def _note(self, step: int, event: str) -> None:
        self.events.append({"after step": step, "s": time.monotonic() - self._began, "event": event})


def train_on_cluster(folder: Path, settings: list[str], kill_at: int, join_at: int) -> dict[str, Any]:
    """Train on three nodes, with a death and a birth of a node."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=4, resources=PLACES)
        faults = Faults(cluster, folder, kill_at, join_at)
        settings = [*settings, *ON_CLUSTER, f"ray.address={cluster.address}"]
        figures = train("rloo", folder, settings, faults.watch)
    finally:
        cluster.shutdown()
    return figures | {"events": faults.events}


def audited(folder: Path) -> dict[str, Any]:
    """Replay the audit file of a run, and return what it says."""
    from torchrl_rloo.collectors import check_audit

    audit = check_audit(folder / "ledger.jsonl")
    states = Counter(json.loads(line)["state"] for line in (folder / "ledger.jsonl").read_text().splitlines())
    return {
        "groups drawn": len(audit.acknowledged) + len(audit.open),
        "trained on": len(audit.acknowledged),
        "open at the end": len(audit.open),
        "leases": audit.attempts,
        "drawn again": states["drawn"] - len(audit.acknowledged) - len(audit.open),
        "verdict": "no group lost or counted twice",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run; default: 60")
    parser.add_argument("--engine", choices=["ray_vllm", "ray_transformers"], default="ray_vllm", help="engines")
    parser.add_argument("--kill-at", type=int, default=15, help="step after which a node is killed; default: 15")
    parser.add_argument("--join-at", type=int, default=20, help="step after which another joins; default: 20")
    parser.add_argument("--folder", type=Path, help="folder of the runs; default: a temporary one")
    parser.add_argument("settings", nargs="*", metavar="setting=value", help="settings of both recipes")
    arguments = parser.parse_args()
    if not 0 < arguments.kill_at < arguments.join_at < arguments.steps:
        parser.error("--kill-at, --join-at and --steps must be above 0 and in this order")
    # Ray's files need a short path, and must not be those of another cluster of this machine
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        os.environ |= {"RAY_TMPDIR": temporary, "RAY_USAGE_STATS_ENABLED": "0"}
        root = arguments.folder or Path(temporary) / "runs"
        common = [f"plan.steps={arguments.steps}", "task=calculator", "log.loggers=[]", "log.samples=0"]
        common += [*arguments.settings, "eval.every=0"]
        cluster = train_on_cluster(
            root / "cluster", [*common, f"inference={arguments.engine}"], arguments.kill_at, arguments.join_at
        )
        alone = train("rloo", root / "alone", common)
        audit = audited(root / "cluster")
    figures = {"cluster": cluster, "one process": alone}
    hidden = ("lines", "events")
    print_table(
        f"Calculator task, {arguments.steps} steps",
        [{"run": name} | {k: v for k, v in run.items() if k not in hidden} for name, run in figures.items()],
    )
    print_table("What happened", cluster["events"])
    print_table("Ledger", [audit])
    counts = cluster["lines"][-1]
    shown = {
        name: value
        for name, value in counts.items()
        if name.startswith(("count/workers", "count/pool", "count/ledger"))
    }
    print_table("Counters at the end", [{"counter": name, "value": value} for name, value in sorted(shown.items())])
    rewards = [
        {"steps": f"{i + 1} to {i + 10}"}
        | {name: sum(line["reward"] for line in run["lines"][i : i + 10]) / 10 for name, run in figures.items()}
        | {"staleness": sum(line["staleness"] for line in cluster["lines"][i : i + 10]) / 10}
        for i in range(0, arguments.steps - 9, 10)
    ]
    print_table("Mean reward of the sampled rows", rewards)
    print_result({name: {k: v for k, v in run.items() if k not in hidden} for name, run in figures.items()} | audit)


if __name__ == "__main__":
    main()

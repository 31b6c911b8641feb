"""Asynchronous training on a Ray cluster of three nodes under faults of every kind, and the audit of its groups.

    python benchmarks/bench_ray_chaos.py              # 33 faults, three of each kind, at random instants
    python benchmarks/bench_ray_chaos.py --quick      # one of each kind

Two ranks train on rows that they fetch from the object store. Scripted engines and rollout workers run on two nodes.
This program kills and stops their processes, nodes and ranks, starts the trainer again, and joins new nodes. It ends
the run after the last fault, replays the ledger's audit file, and compares it with what the ranks recorded. It prints a
table of faults, effects and times until they were overcome, and ends with one line of JSON.
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
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
from common import OFFLINE, ONE_THREAD, print_result, print_table

HERE = Path(__file__).parent
REFUSE, LOSE = "refuse weights", "lose rows"
NODE_CPUS, STORE_BYTES = 3, 128 << 20
SMALL = 1024  # larger objects lie in the object store of a node, as rows of real models do
EFFECTS = {
    "worker killed": "its groups are drawn again under the same ids; another worker takes its place",
    "worker stopped": "it does not answer and is killed; then as above",
    "engine killed": "its requests go to the other engine with the same seeds; it is restarted and filled",
    "engine stopped": "it does not answer and is killed; then as above",
    "node killed": "workers, engines and rows on it are replaced, once another node has joined",
    REFUSE: "the other engine takes the version; this one is filled again before it samples",
    LOSE: "the ranks learn it before the step; the group is drawn again under the same id",
    "slow rank": "the other rank waits; sampling stops at max_staleness and continues afterwards",
    "rank killed": "all ranks end; the same command resumes from the checkpoint",
    "driver killed": "the ranks and all actors end; the same command resumes from the checkpoint",
    "trainer interrupted": "the run stops after the step; the same command resumes it",
}


class Fault(NamedTuple):
    """Injected fault.

    Attributes:
        kind: its kind.
        time: when it struck.
        start: number of the trainer's start.
        is_overcome: function of the status that tells whether its effect is over.
    """

    kind: str
    time: float
    start: int
    is_overcome: Callable[[dict[str, Any]], bool]


class Nodes:
    """Cluster of a head without CPUs and of nodes that can be killed.

    Args:
        folder: folder of Ray's files; a short path.
        number: number of nodes besides the head.
    """

    def __init__(self, folder: str, number: int):
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        common = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._head = self._cluster.add_node(num_cpus=0, temp_dir=folder, **common)
        self._common, self.nodes = common, []
        for _ in range(number):
            self.join()
        self.address = self._cluster.address

    def join(self) -> None:
        """Add a node, and wait until the cluster knows it."""
        self.nodes.append(self._cluster.add_node(num_cpus=NODE_CPUS, **self._common))

    def kill(self, node: Any) -> None:
        """Kill all processes of a node at once."""
        for process in node.all_processes.values():
            for info in process:
                with suppress(psutil.NoSuchProcess):
                    parent = psutil.Process(info.process.pid)
                    for one in (parent, *parent.children(recursive=True)):
                        one.kill()
        self._cluster.remove_node(node, allow_graceful=False)
        self.nodes.remove(node)

    def close(self) -> None:
        self._cluster.shutdown()


class Trainer:
    """Launcher of the ranks, which is started again until the run ends."""

    def __init__(self, folder: Path, address: str, settings: dict[str, Any]):
        self.folder, self.address, self.settings = folder, address, settings
        self.starts, self.process = 0, None
        self.start()

    def start(self) -> None:
        self.starts += 1
        rank = [str(HERE / "ray_chaos.py"), str(self.folder), self.address, json.dumps(self.settings)]
        code = "import sys; from torchrl_rloo.cli.ranks import launch; sys.exit(launch(sys.argv[1:], 2))"
        with (self.folder / f"trainer_{self.starts}.log").open("w") as log:
            self.process = subprocess.Popen([sys.executable, "-c", code, *rank], stdout=log, stderr=log)

    def rank(self, number: int) -> psutil.Process | None:
        """Return the process of a rank, if it lives."""
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                if child.environ().get("RANK") == str(number):
                    return child
        return None

    def status(self) -> dict[str, Any] | None:
        """Return the last status of this start; None before the first."""
        with suppress(FileNotFoundError):
            status = json.loads((self.folder / "status.json").read_text())
            if (main := self.rank(0)) is not None and main.pid == status["pid"]:
                return status
        return None


class Chaos:
    """Faults of one run, struck one after the other at random instants.

    Args:
        nodes: cluster.
        trainer: trainer.
        kinds: kinds of the faults, in their order.
        args: arguments of the command.
    """

    def __init__(self, nodes: Nodes, trainer: Trainer, kinds: list[str], args: argparse.Namespace):
        self.nodes, self.trainer, self.kinds, self.args = nodes, trainer, kinds, args
        self.rng = random.Random(args.seed + 1)
        self.pending: list[Fault] = []
        self.seconds: dict[str, list[float]] = {kind: [] for kind in EFFECTS}
        self.struck: Counter[str] = Counter()
        self._due = self._deadline = 0.0
        self._later: list[tuple[float, Callable[[], Any]]] = []
        self._may_end, self.most_objects = False, 0

    def run(self) -> None:
        """Make all faults, wait until the last one is overcome, and end the run."""
        self._plan()
        while self.kinds or self.pending or self._later:
            time.sleep(0.05)
            self._restart()
            for due, call in self._later.copy():
                if time.monotonic() >= due:
                    self._later.remove((due, call))
                    call()
            status = self.trainer.status()
            if status is not None:
                self._settle(status)
                self.most_objects = max(self.most_objects, status["objects"])
                if self.kinds and time.monotonic() > self._due and status["steps"] >= 1 and self._strike(status):
                    self._plan()
            if time.monotonic() > self._deadline:
                waiting = [fault.kind for fault in self.pending] or self.kinds[:1]
                raise RuntimeError(f"nothing happened for {self.args.limit:g} s; waiting for {waiting}")
        self.trainer.process.send_signal(signal.SIGTERM)
        if (code := self.trainer.process.wait(self.args.limit)) != 0:
            raise RuntimeError(f"the last start ended with code {code}")

    def _plan(self) -> None:
        self._due = time.monotonic() + self.rng.expovariate(1 / self.args.gap)
        self._deadline = time.monotonic() + self.args.limit

    def _restart(self) -> None:
        """Start the trainer again after a fault that ends it; no other may."""
        if (code := self.trainer.process.poll()) is None:
            return
        if not self._may_end:
            raise RuntimeError(f"start {self.trainer.starts} ended with code {code}, without a fault that ends it")
        self._may_end = False
        # Faults of this start that were not overcome have no time; orders that were not taken are given again
        for order in (REFUSE, LOSE):
            with suppress(FileNotFoundError):
                (self.trainer.folder / order).unlink()
                self.kinds.append(order)
                self.struck[order] -= 1
        self.pending = [fault for fault in self.pending if fault.start > self.trainer.starts]
        self.trainer.start()

    def _settle(self, status: dict[str, Any]) -> None:
        for fault in [fault for fault in self.pending if fault.is_overcome(status)]:
            self.pending.remove(fault)
            self.seconds[fault.kind].append(time.monotonic() - fault.time)
            self._deadline = time.monotonic() + self.args.limit
            print(f"{fault.kind}: overcome after {self.seconds[fault.kind][-1]:.1f} s", flush=True)

    def _strike(self, status: dict[str, Any]) -> bool:
        """Make the next fault; return False if there is no victim now."""
        kind = self.kinds[0]
        start = self.trainer.starts
        if (is_overcome := self._inject(kind, status)) is None:
            return False
        del self.kinds[0]
        self.struck[kind] += 1
        ends = kind in ("rank killed", "driver killed", "trainer interrupted")
        self._may_end = self._may_end or ends
        self.pending.append(Fault(kind, time.monotonic(), start + ends, is_overcome))
        print(f"{kind} at step {status['step']}", flush=True)
        return True

    def _inject(self, kind: str, status: dict[str, Any]) -> Callable[[dict[str, Any]], bool] | None:
        """Make a fault, and return the condition of its end; None if there is no victim."""
        if kind.startswith(("worker", "engine")):
            group = f"{kind.split()[0]}s"
            victims = [one for one in status[group] if one.get("state", "ready") == "ready"]
            if not victims:
                return None
            pid = self.rng.choice(victims)["pid"]
            try:
                os.kill(pid, signal.SIGKILL if kind.endswith("killed") else signal.SIGSTOP)
            except ProcessLookupError:
                return None
            return lambda now: self._is_whole(now, group) and pid not in [one["pid"] for one in now[group]]
        if kind == "node killed":
            return self._kill_node(status)
        if kind == REFUSE:
            (self.trainer.folder / REFUSE).touch()
            return lambda now: not (self.trainer.folder / REFUSE).exists() and self._is_filled(now)
        if kind == LOSE:
            (self.trainer.folder / LOSE).touch()
            lost = status["counts"].get("workers/lost_groups", 0)
            return lambda now: now["counts"].get("workers/lost_groups", 0) > lost
        rank = self.trainer.rank(1 if kind in ("rank killed", "slow rank") else 0)
        if rank is None or self._may_end:
            return None
        if kind == "slow rank":
            rank.suspend()
            self._later.append((time.monotonic() + self.args.stall, lambda: _resume(rank)))
            ends, step = time.monotonic() + self.args.stall, status["step"]
            return lambda now: time.monotonic() > ends and now["step"] > step + 1
        (rank.terminate if kind == "trainer interrupted" else rank.kill)()
        return lambda now: now["pid"] != status["pid"] and now["steps"] >= 1

    def _kill_node(self, status: dict[str, Any]) -> Callable[[dict[str, Any]], bool] | None:
        used = {one["node"] for group in ("workers", "engines") for one in status[group]}
        victims = [node for node in self.nodes.nodes if node.node_id in used]
        if not victims or len(self.nodes.nodes) < 2:
            return None
        node = self.rng.choice(victims)
        self.nodes.kill(node)
        self._later.append((time.monotonic() + self.args.absence, self.nodes.join))

        def is_overcome(now: dict[str, Any]) -> bool:
            places = {one["node"] for group in ("workers", "engines") for one in now[group]}
            whole = self._is_whole(now, "workers") and self._is_whole(now, "engines")
            return whole and node.node_id not in places and not self._later

        return is_overcome

    def _is_whole(self, status: dict[str, Any], group: str) -> bool:
        ready = [one for one in status[group] if one.get("state", "ready") == "ready"]
        return len(ready) == getattr(self.args, group)

    def _is_filled(self, status: dict[str, Any]) -> bool:
        return self._is_whole(status, "engines") and len({one["version"] for one in status["engines"]}) == 1


def _resume(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()


def check_run(folder: Path, max_staleness: int) -> dict[str, Any]:
    """Compare the ledger's audit with the rows that the ranks trained on in the final timeline.

    Raises:
        RuntimeError: if a group was lost, doubled, incomplete, or trained on beyond its staleness.
    """
    from torchrl_rloo.collectors import check_audit

    audit = check_audit(folder / "ledger.jsonl")
    final: dict[tuple[int, int], dict[str, Any]] = {}  # last record of each step and rank
    for path in folder.glob("trained_*.jsonl"):
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # the line of a rank that was killed while it wrote
                record = json.loads(line)
                final[record["step"], record["rank"]] = record
    steps = max(step for step, _ in final)
    rows = [tuple(row) for record in final.values() for row in record["rows"]]
    members = Counter(group for group, _ in rows)
    staleness: Counter[int] = Counter()
    for record in final.values():
        staleness.update(dict(enumerate(record["staleness"])))
    sizes = set(members.values())
    problems = {
        "rows trained on twice": len(rows) - len(set(rows)),
        "groups with missing rows": len(sizes) - 1,
        "acknowledged and not trained on": len(audit.acknowledged - members.keys()),
        "trained on and not acknowledged": len(members.keys() - audit.acknowledged),
        "tokens beyond max_staleness": sum(n for age, n in staleness.items() if age > max_staleness),
    }
    if any(problems.values()):
        raise RuntimeError(f"the audit of {folder} failed: {problems}")
    return {"steps": steps, "groups": len(members), "rows": len(rows), **problems} | {
        "attempts": audit.attempts,
        "open": len(audit.open),
        "restores": audit.restores,
        "tokens by staleness": [staleness[age] for age in range(max_staleness + 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=3, help="faults of each kind")
    parser.add_argument("--gap", type=float, default=4.0, help="mean seconds between two faults")
    parser.add_argument("--stall", type=float, default=5.0, help="seconds that a slow rank stops")
    parser.add_argument("--absence", type=float, default=2.0, help="seconds between the end of a node and the next one")
    parser.add_argument("--patience", type=float, default=5.0, help="seconds in which a worker or engine must answer")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a fault counts as not overcome")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--groups", type=int, default=4, help="groups per step")
    parser.add_argument("--members", type=int, default=4, help="conversations per group")
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--latency", type=float, default=0.2, help="mean seconds of a turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", default=None, help="directory of the run; a temporary one by default")
    parser.add_argument("--quick", action="store_true", help="one fault of each kind")
    args = parser.parse_args()
    kinds = list(EFFECTS) * (1 if args.quick else args.each)
    random.Random(args.seed).shuffle(kinds)
    folder = Path(args.directory or tempfile.mkdtemp(prefix="ray_chaos_"))
    folder.mkdir(parents=True, exist_ok=True)
    names = ("workers", "engines", "groups", "members", "max_staleness", "latency", "patience", "seed")
    settings = {name: getattr(args, name) for name in names} | {"checkpoint_every": 1, "rank_timeout": 120.0}
    path = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    os.environ |= ONE_THREAD | OFFLINE | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    os.environ |= {"RAY_max_direct_call_object_size": str(SMALL), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.pop("RAY_ADDRESS", None)

    # The run with its faults, then the audit
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        nodes = Nodes(ray_folder, 2)
        trainer = Trainer(folder, nodes.address, settings)
        chaos = Chaos(nodes, trainer, kinds, args)
        try:
            chaos.run()
        finally:
            trainer.process.kill()
            trainer.process.wait()
            nodes.close()
    result = check_run(folder, args.max_staleness)
    table = [
        {
            "fault": kind,
            "count": chaos.struck[kind],
            "overcome": len(seconds),
            "median s": median(seconds) if seconds else None,
            "max s": max(seconds, default=None),
            "effect": EFFECTS[kind],
        }
        for kind, seconds in chaos.seconds.items()
    ]
    print_table("faults", table)
    elapsed = time.monotonic() - began
    print_result(
        {"faults": chaos.struck.total(), "starts": trainer.starts, **result}
        | {"most groups in the store": chaos.most_objects, "seconds": elapsed}
    )


if __name__ == "__main__":
    main()

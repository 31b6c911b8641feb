"""Ranks as processes: calls, and the end of all when one fails, dies, stops or hangs.

Run as a script this file is one rank: ``test_ranks.py FAULT RANK PLACE``.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from support.fork_server import ForkedProcess
from support.processes import is_gone
from torchrl_rloo.runtime.ranks import EXIT_CODE, RankError, Ranks

SIZE = 3
STEPS = 4
LIMIT_S = 3.0  # the time-out of a rank; only faults that nothing else shows wait for it
END_S = 100.0  # far more than the ranks need on a busy machine


# ----------------------------------------------------------------------------------------------------------- a rank
def run_rank(fault: str = "", culprit: str = "", place: str = "") -> None:
    torch.set_num_threads(1)
    with Ranks.from_environment(timeout=LIMIT_S) as ranks:

        def reach(here: str) -> None:
            if here == place and culprit in ("all", str(ranks.rank)):
                cause(fault)

        check_values(ranks)
        for step in range(STEPS):

            def collect(step: int = step) -> torch.Tensor:
                reach(f"collect {step}")
                return torch.full((3,), float(step))

            rows = ranks.broadcast(collect, f"collect, step {step}")
            assert rows.tolist() == [step] * 3
            reach(f"advantage {step}")
            ranks.place = f"step {step}"
            with ranks.call("gradient"):
                distributed.all_reduce(rows)
                reach(f"gradient {step}")
                distributed.all_reduce(rows)
            assert rows.tolist() == [step * SIZE**2] * 3
            ranks.place = ""
            assert ranks.all_gather((ranks.rank, step), "metrics") == [(r, step) for r in range(SIZE)]
        print("done", flush=True)


def check_values(ranks: Ranks) -> None:
    """Send tensors of all kinds through both calls; an object that appears twice stays one object."""
    base = torch.arange(12.0)
    values = [torch.tensor(3), base[2:4], base.view(3, 4).T, torch.zeros(0, 2), torch.tensor([True]), base.bfloat16()]
    values += [values[1], base.clone().requires_grad_(), "text"]
    for told in (ranks.broadcast(lambda: values), ranks.all_gather(values)[-1]):
        assert told[6] is told[1] and told[7].requires_grad and told[8] == "text"
        for ours, theirs in zip(values[:8], told[:8], strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def cause(fault: str) -> None:
    if fault == "error":
        raise ValueError("bad value")
    if fault == "exit":
        sys.exit(3)
    if fault == "hang":
        time.sleep(1000)
    if fault in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, fault))


# ------------------------------------------------------------------------------------------------------------ tests
def environment_of(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that ``torchrun`` gives a rank."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return os.environ | {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def run(fork_server, tmp_path):
    """``run(*arguments, size=SIZE)``: start the ranks; all are killed after the test."""
    started: list[ForkedProcess] = []

    def start(*arguments: str, size: int = SIZE) -> list[ForkedProcess]:
        port = free_port()
        for rank in range(size):
            environment = environment_of(rank, size, port)
            started.append(fork_server.start(Path(__file__), arguments, cwd=tmp_path, environment=environment))
        return started

    yield start
    for process in started:
        process.kill()


def test_the_ranks_make_the_same_calls(run):
    ranks = run()
    assert [rank.wait(END_S) for rank in ranks] == [0] * SIZE
    assert [(rank.stdout, rank.stderr) for rank in ranks] == [("done\n", "")] * SIZE


@pytest.mark.parametrize(
    ("fault", "culprit", "place", "line"),
    [
        ("error", 2, "gradient 1", "rank 2 failed in gradient, step 1: ValueError: bad value"),
        ("error", 0, "collect 2", "rank 0 failed in collect, step 2: ValueError: bad value"),
        ("exit", 2, "advantage 1", "rank 2 failed after collect, step 1: SystemExit: 3"),
        ("SIGKILL", 1, "advantage 2", "Connection .*; missing: rank 1 \\(last call: collect, step 2\\)"),
        ("SIGSTOP", 0, "collect 1", "rank [12] waited 3 s in collect, step 1: .*recv"),
        (
            "hang",
            1,
            "advantage 1",
            "waited 3 s in gradient, step 1: .*; missing: rank 1 \\(last call: collect, step 1\\)",
        ),
    ],
)
def test_all_ranks_end_with_the_first_failure(run, fault, culprit, place, line):
    """The one that failed raises its error, and each other one prints one line about it."""
    ranks = run(fault, str(culprit), place)
    blamed = ranks[culprit]
    others = [rank for rank in ranks if rank is not blamed]
    assert [rank.wait(END_S) for rank in others] == [EXIT_CODE] * len(others)
    for rank in others:
        assert re.fullmatch(f"error: .*{line}.*\n", rank.stderr), rank.stderr
    if fault in ("SIGSTOP", "hang"):  # for the launcher to kill
        assert not is_gone(blamed.pid)
        blamed.kill()
    assert blamed.wait(END_S) == {"error": 1, "exit": 3}.get(fault, -signal.SIGKILL)
    if fault == "error":
        assert blamed.stderr.startswith("Traceback") and "ValueError: bad value" in blamed.stderr


UNCAUGHT = """
from torchrl_rloo.runtime.ranks import Ranks
with Ranks.from_environment(timeout=20) as ranks:
    ranks.all_gather(1)
    if ranks.rank == 1:
        raise KeyError("bad key")
    ranks.all_gather(2)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_of_two_never_starts(monkeypatch, rank):
    for name, value in environment_of(rank, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=f"rank {rank} waited 1 s for 2 ranks to start"):
        Ranks.from_environment(timeout=1.0)


def test_a_process_on_its_own(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Ranks.from_environment().group is None
    with Ranks.from_environment(group=True) as ranks:
        assert (ranks.rank, ranks.size, ranks.is_main) == (0, 1, True)
        assert distributed.get_world_size(ranks.group) == 1
        with ranks.call("gradient"):
            assert ranks.broadcast(lambda: 2) == 2 and ranks.all_gather(3) == [3]
        with pytest.raises(RuntimeError, match="not about ranks"), ranks.call("gradient"):
            raise RuntimeError("not about ranks")
    assert not distributed.is_initialized()
    with pytest.raises(ValueError, match="timeout=0 must be above 0"):
        Ranks.from_environment(timeout=0)


def test_torchrun_starts_the_ranks_and_ends_with_the_failed_one(tmp_path):
    (tmp_path / "uncaught.py").write_text(UNCAUGHT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "uncaught.py")], env=environment, capture_output=True, text=True, timeout=END_S
    )
    assert done.returncode == 1 and "KeyError: 'bad key'" in done.stderr


if __name__ == "__main__":
    run_rank(*sys.argv[1:])

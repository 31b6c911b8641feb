"""Ranks as processes: calls, and the end of all when one fails, dies, stops or hangs.

Run as a script this file is one rank: ``test_ranks.py FAULT RANK PLACE``.
"""

from __future__ import annotations

import os
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
from torchrl_rloo.runtime import ranks_watch
from torchrl_rloo.runtime.ranks import RankError, Ranks
from torchrl_rloo.runtime.ranks_watch import EXIT_CODE

SIZE = 3
STEPS = 4
LIMIT_S = 4.0  # the time-out of a rank; only faults that nothing else shows wait for it
END_S = 100.0  # far more than the ranks need on a busy machine


# ----------------------------------------------------------------------------------------------------------- a rank
def run_rank(fault: str = "", culprit: str = "", place: str = "") -> None:
    torch.set_num_threads(1)
    ranks_watch._GRACE_S = 1.0  # no rank needs time to end
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
    if fault == "slow":
        time.sleep(1.5 * LIMIT_S)
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


def test_the_ranks_wait_for_a_slow_rank_0_beyond_the_limit(run):
    ranks = run("slow", "0", "collect 1")
    assert [rank.wait(END_S) for rank in ranks] == [0] * SIZE
    assert [(rank.stdout, rank.stderr) for rank in ranks] == [("done\n", "")] * SIZE


@pytest.mark.parametrize(
    ("fault", "culprit", "place", "line"),
    [
        ("error", 1, "advantage 2", "rank 1 failed after collect, step 2: ValueError: bad value"),
        ("error", 2, "gradient 1", "rank 2 failed in gradient, step 1: ValueError: bad value"),
        ("error", 0, "collect 2", "rank 0 failed in collect, step 2: ValueError: bad value"),
        ("error", "all", "advantage 0", "rank 0 failed after collect, step 0: ValueError: bad value"),
        ("exit", 2, "advantage 1", "rank 2 failed after collect, step 1: SystemExit: 3"),
        ("SIGKILL", 1, "gradient 2", "rank 1 died; its last call was gradient, step 2"),
        ("SIGKILL", 0, "collect 0", "rank 0 died; its last call was all_gather"),
        ("SIGSTOP", 2, "advantage 1", "rank 2 gave no sign of life for 4 s; its last call was collect, step 1"),
        ("SIGSTOP", 0, "collect 1", "rank 0 gave no sign of life for 4 s; its last call was metrics"),
    ],
)
def test_all_ranks_end_with_the_first_failure(run, fault, culprit, place, line):
    """The one that failed prints its traceback once; each other one prints one line."""
    ranks = run(fault, str(culprit), place)
    blamed = ranks[0 if culprit == "all" else culprit]
    others = [rank for rank in ranks if rank is not blamed]
    assert [rank.wait(END_S) for rank in others] == [EXIT_CODE] * len(others)
    assert {rank.stderr for rank in others} == {f"error: {line}\n"}
    if fault == "SIGSTOP":
        assert not is_gone(blamed.pid)
        blamed.kill()
    expected = {"error": 1, "exit": 3, "SIGKILL": -signal.SIGKILL, "SIGSTOP": -signal.SIGKILL}
    assert blamed.wait(END_S) == expected[fault]
    if fault == "error":
        assert blamed.stderr.startswith("Traceback") and "ValueError: bad value" in blamed.stderr


def test_a_rank_that_computes_for_ever_is_named_by_those_that_wait(run):
    ranks = run("hang", "1", "advantage 1")
    assert [rank.wait(END_S) for rank in ranks] == [EXIT_CODE] * SIZE
    (line,) = {rank.stderr for rank in ranks}
    assert "waited 4 s in gradient, step 1" in line and "missing: rank 1 (in collect, step 1)" in line
    assert line.count("\n") == 1


ORDER = """
from torchrl_rloo.runtime.ranks import Ranks
with Ranks.from_environment(timeout=20) as ranks:
    with ranks.call("checkpoint" if ranks.rank == 1 else "evaluation"):
        pass
    ranks.all_gather(1)
"""
UNCAUGHT = """
from torchrl_rloo.runtime.ranks import Ranks
ranks = Ranks.from_environment(timeout=20)
ranks.all_gather(1)
if ranks.rank == 1:
    raise KeyError("without a context manager")
ranks.all_gather(2)
"""


def start_script(fork_server, source: str, size: int, folder: Path) -> list[ForkedProcess]:
    port = free_port()
    return [fork_server.start(source, cwd=folder, environment=environment_of(rank, size, port)) for rank in range(size)]


def test_ranks_in_different_calls_are_an_error(fork_server, tmp_path):
    ranks = start_script(fork_server, ORDER, 2, tmp_path)
    assert [rank.wait(END_S) for rank in ranks] == [EXIT_CODE] * 2
    assert {rank.stderr for rank in ranks} == {"error: rank 1 is in call 1, checkpoint, but rank 0 is in evaluation\n"}


@pytest.mark.parametrize(("rank", "awaited"), [(0, "2 ranks"), (1, "rank 0")])
def test_one_rank_of_two_never_starts(monkeypatch, capfd, rank, awaited):
    for name, value in environment_of(rank, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=f"rank {rank} waited 1 s for {awaited} to start"):
        Ranks.from_environment(timeout=1.0)
    assert not capfd.readouterr().err


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
    """In a new interpreter each, with and without a failure outside of a ``with`` block."""
    (tmp_path / "uncaught.py").write_text(UNCAUGHT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "uncaught.py")], env=environment, capture_output=True, text=True, timeout=END_S
    )
    assert done.returncode == 1
    assert "KeyError: 'without a context manager'" in done.stderr
    assert "error: rank 1 failed after all_gather: KeyError: 'without a context manager'" in done.stderr


if __name__ == "__main__":
    run_rank(*sys.argv[1:])

"""Launcher of local ranks: exit codes, signals, and no process left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from support.fork_server import ForkedProcess
from support.processes import descendants, wait_until_gone
from support.waiting import PATIENCE, wait_until
from torchrl_rloo.cli.main import main

LAUNCHER = """
import sys
from torchrl_rloo.cli.ranks import launch
raise SystemExit(launch(["-S", "-c", sys.argv[2]], int(sys.argv[1])))
"""
BEGIN = "import os, signal, sys, time; rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"


@pytest.fixture
def launched(fork_server, tmp_path):
    """``launched(source, size)``: launcher of ranks that run ``source``; killed after the test."""
    started: list[ForkedProcess] = []

    def start(source: str, size: int = 3) -> ForkedProcess:
        started.append(fork_server.start(LAUNCHER, [size, BEGIN + source], cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.mark.parametrize(
    ("source", "expected", "line"),
    [
        ("print(rank, size, os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])", 0, ""),
        # A rank that ends because of another one is stopped by the launcher, or has the code 75
        ("if rank == 2: sys.exit(4)\nif rank: signal.signal(15, signal.SIG_IGN)\ntime.sleep(6)\nsys.exit(75)", 4, ""),
        ("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(1000)", 137, "error: rank 1 was killed by SIGKILL\n"),
    ],
)
def test_the_exit_code_is_that_of_the_failed_rank_and_none_continues(launched, source, expected, line):
    process = launched(source)
    assert process.wait(PATIENCE) == expected
    assert process.stderr == line and not descendants(process.pid)
    if expected == 0:
        assert sorted(process.stdout.split("\n")[:-1]) == [f"{rank} 3 {rank} 3" for rank in range(3)]


STOPS = """
requests = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: requests.append(1))
print("ready", flush=True)
while len(requests) < {needed}:
    time.sleep(0.01)
print("saved", len(requests), flush=True)
"""


@pytest.mark.parametrize(("sent", "needed", "expected"), [(1, 1, 0), (2, 2, 0), (3, 9, 137)])
def test_two_stop_signals_reach_all_ranks_and_a_third_kills(launched, sent, needed, expected):
    process = launched(STOPS.format(needed=needed), size=2)
    wait_until(lambda: process.stdout.count("ready") == 2)
    for _ in range(sent):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)  # two pending signals of one kind are one
    assert process.wait(PATIENCE) == expected
    assert process.stdout.count(f"saved {needed}") == (0 if expected else 2)


def test_the_ranks_die_with_the_launcher(launched):
    process = launched("print('ready', flush=True); time.sleep(1000)", size=2)
    wait_until(lambda: process.stdout.count("ready") == 2)
    ranks = descendants(process.pid)
    assert len(ranks) == 2
    os.kill(process.pid, signal.SIGKILL)
    wait_until_gone(ranks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2", "rloo", "sed=1"], "unknown setting sed: did you mean seed?"),
        (["--ranks", "2", "reward_model"], "this recipe runs in one process and cannot use 2 ranks"),
        (["--ranks", "2", "rlo"], "unknown recipe rlo (did you mean 'rloo'"),
        (["--ranks", "0", "rloo"], "--ranks 0 must be at least 1"),
        (["rloo", "--ranks", "2"], "--ranks must stand before the recipe: torchrl-rloo run --ranks N rloo"),
        (["rloo", "--ranks=2"], "--ranks must stand before the recipe"),
    ],
)
def test_a_wrong_command_is_reported_once(capfd, tmp_path: Path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    out, err = capfd.readouterr()
    assert ended.value.code == 1 and not out
    assert message in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_ranks_cannot_be_started_twice(capfd, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main(["run", "--ranks", "2", "rloo"])
    assert "--ranks 2 cannot be combined with torchrun" in capfd.readouterr().err

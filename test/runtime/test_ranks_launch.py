"""Launcher of local ranks: exit codes, output, signals, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.processes import descendants, wait_until_gone
from support.waiting import PATIENCE, wait_until
from torchrl_rloo.cli.main import main

LAUNCHER = """
import sys
from torchrl_rloo.runtime import ranks_launch
ranks_launch._END_S = 1.0
raise SystemExit(ranks_launch.launch([sys.executable, "-S", "-c", sys.argv[2]], int(sys.argv[1])))
"""
BEGIN = "import os, signal, sys, time; rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"


@pytest.fixture
def launched():
    """``launched(source, size)``: launcher of ranks that run ``source``; killed after the test."""
    started: list[subprocess.Popen] = []

    def start(source: str, size: int = 3) -> subprocess.Popen:
        command = [sys.executable, "-c", LAUNCHER, str(size), BEGIN + source]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "bufsize": 1}
        started.append(subprocess.Popen(command, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def test_rank_0_has_the_terminal_and_the_lines_of_others_a_prefix(launched):
    source = """
print("out", rank, size, os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], "MASTER_PORT" in os.environ)
print("loading: 1%\\rloading: 100%", file=sys.stderr)
print("warning", rank, file=sys.stderr)
"""
    code, out, err = finish(launched(source))
    assert (code, out) == (0, "out 0 3 0 3 True\n")
    lines = err.split("\n")
    assert {"warning 0", "[rank 1] warning 1", "[rank 2] warning 2"} <= set(lines)
    assert not any(line.startswith("[rank") and "loading" in line for line in lines)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("sys.exit(4 if rank == 2 else 75)", 4),  # 75 is the code of a rank that ends because of another
        ("sys.exit(0 if rank else 3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(1000)", 137),
        ("sys.exit(75 if rank == 0 else 0)", 75),
        ("os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else sys.exit(75)", 75),
        ("time.sleep(1000 if rank == 1 else 0)", 75),  # rank 0 has ended, so no work is left
    ],
)
def test_the_exit_code_is_that_of_the_failed_rank_and_none_continues(launched, source, expected):
    process = launched(source)
    assert finish(process)[0] == expected
    assert not descendants(process.pid)


STOPS = """
requests = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: requests.append(1))
print("ready", flush=True)
while len(requests) < {needed}:
    time.sleep(0.01)
print("saved", len(requests), flush=True)
"""


@pytest.mark.parametrize("needed", [1, 2])
def test_stop_signals_go_to_rank_0(launched, needed):
    """The other rank gets none, and is killed after the end of rank 0."""
    process = launched(STOPS.format(needed=needed), size=2)
    assert process.stdout.readline() == "ready\n"
    for _ in range(needed):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)  # two pending signals of one kind are one
    code, out, err = finish(process)
    assert out == f"saved {needed}\n"
    assert code == 75 and "ranks [1] did not end within 1 s after rank 0" in err


def test_a_third_signal_kills(launched):
    process = launched(STOPS.format(needed=9), size=2)
    assert process.stdout.readline() == "ready\n"
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert finish(process)[:2] == (137, "")


def test_the_ranks_die_with_the_launcher(launched):
    process = launched("time.sleep(1000)", size=2)
    ranks = wait_until(lambda: len(found := descendants(process.pid)) == 2 and found)
    process.kill()
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

"""Launcher of ranks as Ray actors: variables, output, ends and signals of processes on a real cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import wait_until_gone
from support.waiting import PATIENCE, wait_until
from torchrl_rloo.cli.main import main
from torchrl_rloo.ray.ranks import Place, rank_variables

pytest.importorskip("ray")
pytestmark = pytest.mark.xdist_group("ray")

LAUNCHER = """
import sys
from torchrl_rloo.ray import ranks
from torchrl_rloo.ray.ranks import launch_on_ray
ranks._END_S = 1.0
raise SystemExit(launch_on_ray(["-c", sys.argv[1]], 2, resources={"CPU": 0.5}))
"""
# Ranks that train nothing: they meet, find the cluster, and one of them may fail
RECIPE = """
import os, sys
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.ray import ray_session

with Ranks.from_environment(timeout=120) as ranks:
    with ray_session("auto", ranks=ranks) as ray:
        found = ranks.all_gather((ranks.rank, os.getcwd(), ray.get_runtime_context().gcs_address))
    if "fails=true" in sys.argv and ranks.rank == 1:
        raise ValueError("this rank fails on purpose")
    ranks.log(f"met: {found}")
    ranks.all_gather(None)
"""


@pytest.fixture
def launched(ray_cluster):
    """``launched(*arguments)``: a process of this Python, which finds the session's cluster."""
    started: list[subprocess.Popen] = []

    def start(*arguments: str, cwd: Path | None = None) -> subprocess.Popen:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_ADDRESS": ray_cluster}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, *arguments], env=environment, cwd=cwd, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=2 * PATIENCE)
    return process.returncode, out, err


def test_ranks_in_actors_meet_and_a_failed_one_ends_both_with_its_traceback(launched, ray_cluster, tmp_path: Path):
    (tmp_path / "meet.py").write_text(RECIPE)
    command = ["-m", "torchrl_rloo.cli.main", "run", "--ranks", "2", "--on-ray", "meet.py"]
    meets, fails = launched(*command, cwd=tmp_path), launched(*command, "fails=true", cwd=tmp_path)
    code, out, err = finish(meets)
    assert code == 0, err
    assert out == f"met: {[(rank, str(tmp_path), ray_cluster) for rank in range(2)]}\n"
    code, out, err = finish(fails)
    assert code == 1
    assert err.count("Traceback") == 1 and "ValueError: this rank fails on purpose" in err
    assert "error: rank 1 failed after end of the Ray session: ValueError" in err


def test_output_variables_and_the_code_of_a_killed_rank(launched):
    source = """
import os, signal, sys
print("out", os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["WORLD_SIZE"])
print("loading: 1%\\rloading: 100%", file=sys.stderr)
print("warning", os.environ["RANK"], file=sys.stderr)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""
    code, out, err = finish(launched("-c", LAUNCHER, source))
    assert (code, out) == (128 + signal.SIGKILL, "out 0 2 2\n")
    lines = err.split("\n")
    assert {"warning 0", "[rank 1] warning 1"} <= set(lines)
    assert not any(line.startswith("[rank") and "loading" in line for line in lines)


def test_a_stop_signal_goes_to_rank_0_and_no_process_survives_the_launcher(launched, ray_cluster, tmp_path):
    source = f"""
import os, pathlib, signal
signal.signal(signal.SIGTERM, lambda *_: print("stops", flush=True))
pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(str(os.getpid()))
print("ready", flush=True)
while True:
    signal.pause()
"""
    process = launched("-c", LAUNCHER, source)
    assert process.stdout.readline() == "ready\n"
    files = [tmp_path / "0", tmp_path / "1"]
    pids = wait_until(lambda: all(f.exists() and f.read_text() for f in files) and [int(f.read_text()) for f in files])
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stops\n"
    process.kill()
    wait_until_gone(pids)


def test_ranks_of_a_node_see_all_of_its_gpus():
    places = [Place("a", "10.0.0.1", ["2"]), Place("a", "10.0.0.1", ["0"]), Place("b", "10.0.0.2", ["1"])]
    found = [(v["LOCAL_RANK"], v["LOCAL_WORLD_SIZE"], v["CUDA_VISIBLE_DEVICES"]) for v in rank_variables(places)]
    assert found == [(0, 2, "2,0"), (1, 2, "2,0"), (0, 1, "1")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on-ray", "rloo"], "--on-ray requires --ranks N"),
        (["--ranks", "2", "--resources", "GPU=1", "rloo"], "--resources requires --on-ray"),
        (["--ranks", "2", "--on-ray", "--resources", "GPU", "rloo"], "--resources GPU must be names and amounts"),
        (["--ranks", "2", "rloo", "--on-ray"], "--on-ray must stand before the recipe"),
    ],
)
def test_a_wrong_command_is_refused(capfd, monkeypatch, arguments, message):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        main(["run", *arguments])
    assert message in capfd.readouterr().err

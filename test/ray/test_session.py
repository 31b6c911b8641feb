"""Sessions of Ray in a plain shell, on a cluster that another process started."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.ray_cluster import RAY_GROUP
from support.waiting import wait_until
from torchrl_rloo.ray.session import require_ray

pytest.importorskip("ray")
pytestmark = pytest.mark.xdist_group(RAY_GROUP)

SESSION = """
from torchrl_rloo.cli.sampling_sections import RayConfig
from torchrl_rloo.ray import ray_session

config = RayConfig(address="auto")
config.prepare()
with ray_session(config.address, **config.local(1)) as ray:
    place = ray.remote(lambda: ray.get_runtime_context().gcs_address)
    print(ray.get(place.remote()), int(ray.cluster_resources()["started_by_hand"]))
"""


@pytest.fixture
def head() -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a cluster that ``ray start --head`` started, and the variables of another shell."""
    import psutil

    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:  # a short path
        shell = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"RAY_TMPDIR": folder}
        shell["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0", "--block"]
        command += ["--num-cpus=1", '--resources={"started_by_hand": 7}', "--include-dashboard=false"]
        command += ["--object-store-memory=100000000", "--disable-usage-stats"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, env=shell, start_new_session=True, **quiet) as process:
            try:
                current = Path(folder, "ray", "ray_current_cluster")
                wait_until(lambda: process.poll() is not None or (current.exists() and current.read_text().strip()))
                assert process.poll() is None, "ray start failed"
                yield current.read_text().strip(), shell
            finally:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()


def test_auto_finds_the_cluster_of_another_process(head) -> None:
    address, shell = head
    result = subprocess.run([sys.executable, "-c", SESSION], env=shell, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split() == [address, "7"]


def test_a_folder_named_ray_is_not_ray(tmp_path, monkeypatch) -> None:
    (tmp_path / "ray").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "ray")
    with pytest.raises(ImportError, match=r"torchrl_rloo\[ray\]"):
        require_ray()

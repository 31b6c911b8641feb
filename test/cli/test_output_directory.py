"""Output directory of a recipe: in use, read-only, full or hostile. One line of error, before anything is loaded."""

from __future__ import annotations

import fcntl
import json
import subprocess
from pathlib import Path

import pytest

from torchrl_rloo.cli.main import RECIPES, recipe_file


@pytest.fixture
def read_only(tmp_path):
    """Real read-only file system."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,ro", "none", disk], capture_output=True).returncode:
        pytest.skip("only root can mount a file system")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def refusal(fork_server, recipe: str, output: Path) -> str:
    """Run a recipe that must fail before it loads or prints anything, and return its error."""
    done = fork_server.run(recipe_file(recipe), [f"output_dir={output}"])
    assert done.returncode == 1 and done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    return line


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_directory_in_use_is_refused(fork_server, tmp_path, recipe):
    (tmp_path / ".lock").write_text(json.dumps({"pid": 1, "host": "node7", "since": "2026-01-02T03:04:05+00:00"}))
    with open(tmp_path / ".lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        line = refusal(fork_server, recipe, tmp_path)
    assert line.startswith(
        f"error: directory={tmp_path} is in use by process 1 on node7 since 2026-01-02T03:04:05+00:00"
    )
    assert "(output_dir)" in line and [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_read_only_disk_is_named(fork_server, read_only, recipe):
    line = refusal(fork_server, recipe, read_only / "run")
    assert f"error: cannot write {read_only / 'run'}: the file system is read-only; make it writable, or set" in line


def test_a_link_in_place_of_the_traceback_is_replaced(fork_server, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "traceback.txt").symlink_to("precious")
    done = fork_server.run(recipe_file("rloo"), [f"output_dir={tmp_path}", f"model.name={tmp_path}"])
    assert done.returncode == 1 and "traceback in" in done.stderr
    assert (tmp_path / "precious").read_text() == "precious" and not (tmp_path / "traceback.txt").is_symlink()

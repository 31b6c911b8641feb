"""Rooms that nothing below imports: without them, every other module is imported, and the rest passes its tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("ray", "agents", "sandbox")
# Fast tests through all floors of the rest: mathematics, rows, rewards, environment, policy, collector, buffer, loss
TESTS = (
    "functional/test_advantages.py",
    "replay/test_advantage.py",
    "rewards/test_runner.py",
    "envs/test_chat_env.py",
    "envs/test_tool_transform.py",
    "collectors/test_rows.py",
    "collectors/test_ledger.py",
    "objectives/test_rloo.py",
)
IMPORT_ALL = """
import importlib, pkgutil, torchrl_rloo
rooms = {rooms!r}
for module in pkgutil.walk_packages(torchrl_rloo.__path__, "torchrl_rloo."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        known = module.name in {users!r} and any(f"torchrl_rloo.{{room}}" in str(error) for room in rooms)
        assert known, f"{{module.name}}: {{error}}"
"""
USERS = ("torchrl_rloo.embedded.agents",)  # examples of a room's use, loaded by name alone


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository without the rooms."""
    copy = tmp_path_factory.mktemp("house")
    skipped = shutil.ignore_patterns("__pycache__")
    for folder in ("torchrl_rloo", "test"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=skipped)
        for room in ROOMS:
            shutil.rmtree(copy / folder / room)
    for name in ("pyproject.toml", "sota_implementations", "tutorials", "benchmarks"):
        (copy / name).symlink_to(ROOT / name)
    return copy


def run(house: Path, *command: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(house), str(house / "test")))}
    return subprocess.run([sys.executable, *command], cwd=house, env=environment, capture_output=True, text=True)


def test_every_other_module_is_imported(house: Path) -> None:
    result = run(house, "-c", IMPORT_ALL.format(rooms=ROOMS, users=USERS))
    assert result.returncode == 0, result.stderr


def test_the_rest_passes_its_tests(house: Path) -> None:
    tests = [f"test/{name}" for name in TESTS]
    result = run(house, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]

"""Benchmarks start: each script prints its help, and all that they import is in the environment of the tests."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = sorted([*FOLDER.glob("bench_*.py"), FOLDER / "simulate_cluster.py"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_starts(script: Path, fork_server):
    done = fork_server.run(script, ["--help"])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("usage: ")


def test_what_benchmarks_import_is_installed():
    """Also inside functions; files of the folder and of ``test/`` import each other."""
    pytest.importorskip("vllm")  # has no build for some machines
    files = {file.stem for file in FOLDER.glob("*.py")} | {"support"}
    nodes = [node for file in FOLDER.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    packages = {name.partition(".")[0] for name in names} - files
    assert {"torch", "ray", "trl"} <= packages
    assert [name for name in sorted(packages) if find_spec(name) is None] == []

"""Benchmarks start: each script prints its help, and all that they import is in the environment of the tests."""

from __future__ import annotations

import ast
import subprocess
import threading
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = sorted([*FOLDER.glob("bench_*.py"), FOLDER / "house.py", FOLDER / "simulate_cluster.py"])


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


def test_the_house_is_measured(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    house = import_module("house")
    files = {
        "torchrl_rloo/data/__init__.py": '__all__ = ["known", "hidden"]\n',
        "torchrl_rloo/collectors/a.py": "def a(b):\n    b()\n    b()\n",
        "torchrl_rloo/collectors/b.py": (
            'class C:\n    """One.\n\n    Args:\n        n: a number.\n    """\n\n'
            "    def __init__(self, n, m):\n        call(n=n, m=1)\n\n\ndef b():\n    pass\n"
        ),
        "docs/page.md": "`known` is not `hidden_too`.\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)

    sizes = {row["room"]: (row["lines"], row["files"]) for row in house.rooms(tmp_path)}
    assert sizes["collectors"] == (16, 2) and sizes["data"] == (1, 1) and sizes["envs"] == (0, 0)
    names = house.public_names(tmp_path)
    assert names == ["known", "hidden"] and house.unused(names, tmp_path) == ["hidden"]
    # n: docstring, parameter, passed on
    assert house.places(tmp_path, "C", ("collectors",)) == {"n": 3, "m": 1}

    calls: dict = {}
    for name in ("a", "b"):
        path = tmp_path / "torchrl_rloo" / "collectors" / f"{name}.py"
        exec(compile(path.read_text(), str(path), "exec"), calls)
    tracer = house.Tracer(tmp_path / "torchrl_rloo")
    with tracer():

        def work():
            calls["a"](calls["b"])
            thread = threading.Thread(target=calls["a"], args=(calls["b"],))
            thread.start()
            thread.join()

        trace = tracer.trace(work)
    assert {path.name for path in trace.files} == {"a.py", "b.py"} and trace.changes == 2  # from a to b in each thread

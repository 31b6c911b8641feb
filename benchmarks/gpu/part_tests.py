"""Part ``tests``: all tests with the mark ``gpu``, which skip without a CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from measure import Setup

ROOT = Path(__file__).resolve().parents[2]


def outcomes(report: Path) -> dict[str, str]:
    """Return the outcome of each test in a JUnit report, with the message of failures."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = "passed" if problem is None else f"{problem.tag}: {problem.get('message', '')[:300]}"
    return found


def run(setup: Setup) -> dict[str, Any]:
    """Run the files that have such tests, and return the outcomes by test."""
    files = [str(p) for p in sorted((ROOT / "test").rglob("test_*.py")) if "\n@needs_gpu" in p.read_text()]
    files = setup.pick(files, files[:1])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *files]
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | paths)
        tests = outcomes(report) if report.exists() else {}
    counts = {
        kind: sum(o.startswith(kind) for o in tests.values()) for kind in ("passed", "skipped", "failure", "error")
    }
    return {"exit_code": done.returncode, **counts, "tests": tests, "output": done.stdout[-3000:] + done.stderr[-1000:]}

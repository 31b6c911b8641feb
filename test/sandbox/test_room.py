"""The room as a whole: the package without it, and what it exports."""

from __future__ import annotations

import subprocess
import sys

WITHOUT = """
import sys
sys.modules["torchrl_rloo.sandbox"] = None  # as if the folder were deleted
import torchrl_rloo.cli, torchrl_rloo.collectors, torchrl_rloo.envs, torchrl_rloo.rewards
from torchrl_rloo.envs.tools import PythonInterpreter, Workspace
from torchrl_rloo.envs.transforms.repository import RepositoryTransform
from torchrl_rloo.rewards import CodeTests, NumericMatch
for part in (CodeTests, PythonInterpreter, Workspace, RepositoryTransform):
    try:
        part()
    except ImportError as error:
        print(error)
print(NumericMatch()(["?"], ["#### 4"], [[1]], answer=["4"]))
"""


def test_the_package_works_without_the_room():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    *errors, last = done.stdout.splitlines() or [done.stderr]
    names = ["CodeTests", "PythonInterpreter", "Workspace", "Workspace"]
    assert errors == [f"{name} requires the folder torchrl_rloo/sandbox: reinstall torchrl_rloo" for name in names]
    assert last == "[1.0]"

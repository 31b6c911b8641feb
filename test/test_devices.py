"""Training, scoring and sampling keep their tensors on the device of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_no_operation_mixes_the_cpu_with_another_device() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "support.device_cases"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) > 10 and not {name: fault for name, fault in results.items() if fault}

"""GPU suite: tests, kernels, decoding, training, memory and a comparison with TRL, in one JSON file.

    python benchmarks/gpu/run.py --out results.json
    python benchmarks/gpu/run.py --out results.json --wheels FOLDER --parts training trl --seconds 500

Each part is a separate process, so that one that fails or takes too long leaves the results of the others. A later
run with other parts adds to the same file. It needs no network: ``make_wheels.py`` makes a folder of the packages that
a machine with PyTorch and transformers lacks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# In the order of a run, with the seconds that each may take
PARTS = {"tests": 300, "training": 420, "trl": 420, "decoding": 300, "head": 300, "attention": 180, "memory": 300}


def missing_wheels(folder: Path) -> list[str]:
    """Return the wheels of a folder whose package is not installed."""
    wheels = []
    for wheel in sorted(folder.glob("*.whl")):
        try:
            version(wheel.name.split("-")[0])
        except PackageNotFoundError:
            wheels.append(str(wheel))
    return wheels


def install(folder: Path, target: str) -> None:
    """Install the missing packages of a folder of wheels into another folder, without a network.

    Raises:
        RuntimeError: if pip fails, with the end of its output.
    """
    if not (wheels := missing_wheels(folder)):
        return
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", target]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"wheels={folder} cannot be installed: {done.stderr[-2000:]}")


def run_part(name: str, device: str, tiny: bool, seconds: float, site: str) -> dict[str, Any]:
    """Run a part in a process, and return its result with its time, or its error."""
    paths = [str(ROOT), str(ROOT / "test"), *filter(None, (site, os.environ.get("PYTHONPATH")))]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    settings |= {"TRANSFORMERS_VERBOSITY": "error", "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        settings |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, __file__, "--child", name, "--device", device, "--out", str(result)]
        with log.open("w") as output:
            process = subprocess.Popen(
                command + ["--tiny"] * tiny,
                env=os.environ | settings,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
        if result.exists():
            found = json.loads(result.read_text())
        else:
            reason = f"took more than {seconds:.0f} s" if code is None else f"ended with exit code {code}"
            found = {"error": f"part {name} {reason}", "output": log.read_text(errors="replace")[-3000:]}
    return found | {"seconds": round(time.perf_counter() - begin, 1)}


def child(name: str, device: str, tiny: bool, out: Path) -> None:
    """Run one part in this process and write its result."""
    from measure import Setup, environment

    result = importlib.import_module(f"part_{name}").run(Setup(device, tiny))
    out.write_text(json.dumps({"environment": environment(device), "result": result}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file; results of other parts in it are kept")
    parser.add_argument("--wheels", type=Path, help="folder of make_wheels.py")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="limit of the whole run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU; they show only that the parts run")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child, args.device, args.tiny, args.out)

    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as site:
        if args.wheels:
            install(args.wheels, site)
        for name in args.parts:
            seconds = min(PARTS[name], end - time.monotonic())
            if seconds < 1:
                print(f"{name}: left out, since seconds={args.seconds:.0f} are over", flush=True)
                continue
            results[name] = run_part(name, args.device, args.tiny, seconds, site) | {"tiny": args.tiny}
            # Write after each part, in case the run itself is stopped
            args.out.write_text(json.dumps(results, indent=1))
            print(f"{name}: {results[name]['seconds']} s {results[name].get('error', '')}", flush=True)
            print(json.dumps(results[name].get("result", results[name].get("output")))[:2500], flush=True)


if __name__ == "__main__":
    main()

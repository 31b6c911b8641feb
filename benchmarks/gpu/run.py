"""GPU suite: tests, kernels, decoding, training, memory and comparisons with peers, in one JSON file.

    python benchmarks/gpu/run.py --wheels FOLDER
    python benchmarks/gpu/run.py --parts training trl --minutes 5
    python benchmarks/gpu/run.py --dry-run  # tiny sizes on a CPU, which show only that the parts run

A run names the parts that fit its minutes, and leaves out the rest. Each part is a separate process, so that one that
fails or takes too long leaves the results of the others. A later run with other parts adds to the same file. It needs
no network: ``make_wheels.py`` makes a folder of the packages that a machine with PyTorch and transformers lacks.
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
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from common import OFFLINE, print_table  # noqa: E402

# In the order of a run, with the seconds that each is expected to take on an H100; none has been measured
PARTS = {"training": 60, "long_rows": 130, "trl": 105, "memory": 45, "decoding": 65}
PARTS |= {"tests": 50, "head": 40, "attention": 25}
SPARE = 2  # times as many seconds as expected, after which a part is stopped


def fitting(parts: Sequence[str], seconds: float) -> list[str]:
    """Return the parts that fit the seconds, in order; a later one may fit where an earlier one does not."""
    fit: list[str] = []
    for name in parts:
        if sum(PARTS[n] for n in [*fit, name]) <= seconds:
            fit.append(name)
    return fit


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


def run_part(name: str, seconds: float, site: str, result: Path) -> dict[str, Any]:
    """Run a part in a process, and return its result with its time, and its error.

    Until its end, ``result`` holds what it has measured so far, also if this process is stopped with it.
    """
    paths = [str(ROOT), str(ROOT / "test"), *filter(None, (site, os.environ.get("PYTHONPATH")))]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    begin, found = time.perf_counter(), {}
    result.unlink(missing_ok=True)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        command = [sys.executable, __file__, "--child", name, "--out", str(result)]
        process = subprocess.Popen(
            command, env=os.environ | OFFLINE | settings, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        if result.exists():
            found = json.loads(result.read_text())
            result.unlink()
        if code != 0:
            log.seek(0)
            reason = f"took more than {seconds:.0f} s" if code is None else f"ended with exit code {code}"
            found |= {"error": f"part {name} {reason}", "output": log.read()[-3000:]}
    return found | {"seconds": round(time.perf_counter() - begin, 1)}


def measure_part(name: str, device: str, tiny: bool, out: Path) -> None:
    """Run one part in this process, and write its result after each of its measurements."""
    from measure import Setup, environment

    versions = environment(device)

    def keep(result: dict[str, Any]) -> None:
        write(out, {"environment": versions, "result": result})

    keep(importlib.import_module(f"part_{name}").run(Setup(device, tiny, keep)))


def write(out: Path, results: dict[str, Any]) -> None:
    """Write a JSON file at once, so that a run that is stopped leaves the old one or the new one."""
    new = out.with_name(out.name + ".new")
    new.write_text(json.dumps(results, indent=1))
    new.replace(out)


def dry_run(name: str) -> dict[str, Any]:
    """Run one part with tiny sizes on the CPU, in this process."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        measure_part(name, "cpu", True, out := Path(folder) / "result.json")
        return json.loads(out.read_text()) | {"tiny": True, "seconds": round(time.perf_counter() - begin, 1)}


def show(name: str, found: dict[str, Any]) -> None:
    """Print the result of a part: its table, or the beginning of its JSON."""
    result = found.get("result", {})
    print(f"\n{name}: {found['seconds']} s {found.get('error', '')}", flush=True)
    if table := result.get("table"):
        print_table(f"{name}, of peak {result['peak_flops']:.3g} FLOP/s", table)
    else:
        print(json.dumps(result or found.get("output"))[:2500], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="results; those of other parts are kept")
    parser.add_argument("--wheels", type=Path, help="folder of make_wheels.py")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=9.0, help="limit of the whole run")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, without a limit")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return measure_part(args.child, "cuda", False, args.out)

    end = float("inf") if args.dry_run else time.monotonic() + 60 * args.minutes
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    with tempfile.TemporaryDirectory() as site:
        if args.wheels:
            install(args.wheels, site)
        sys.path[:0] = [str(ROOT), site]
        fit = fitting(args.parts, end - time.monotonic())
        late = [name for name in args.parts if name not in fit]
        for title, names in (("fits", fit), ("left out, unless others are faster", late)):
            print(f"{title}: " + (", ".join(f"{n} ({PARTS[n]} s)" for n in names) or "none"), flush=True)
        for name in args.parts:
            if not fitting([name], left := end - time.monotonic()):
                print(f"left out: {name}, which takes about {PARTS[name]} s of the {left:.0f} s left", flush=True)
                continue
            if args.dry_run:
                results[name] = dry_run(name)
            else:
                partial = args.out.with_name(f"{args.out.stem}.{name}.json")
                results[name] = run_part(name, min(SPARE * PARTS[name], left), site, partial)
            write(args.out, results)  # after each part, in case the run itself is stopped
            show(name, results[name])


if __name__ == "__main__":
    main()

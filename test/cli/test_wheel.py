"""Contents of the wheel without a checkout: recipes, settings, the command, and a recipe that runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from torchrl_rloo.cli.main import main; main()"]  # like the script of an installation


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that holds only the contents of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("torchrl_rloo", "sota_implementations"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import setuptools.build_meta as b; print(b.build_wheel('..'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(folder / done.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(folder / "site")
    shutil.rmtree(source)
    return folder / "site"


def run(site: Path, cwd: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_wheel_has_the_files_of_the_checkout(site):
    recipes = ROOT / "sota_implementations"
    files = {f.relative_to(recipes) for f in recipes.rglob("*") if f.suffix in (".py", ".yaml")}
    packed = {f.relative_to(site / "torchrl_rloo" / "recipes") for f in (site / "torchrl_rloo/recipes").rglob("*.*")}
    assert files == packed
    assert (site / "torchrl_rloo" / "py.typed").is_file()
    (entry_points,) = site.glob("*.dist-info/entry_points.txt")
    assert "torchrl-rloo = torchrl_rloo.cli.main:main" in entry_points.read_text()


@pytest.mark.slow
def test_a_copied_recipe_runs_in_an_empty_folder(site, tmp_path, warm_model):
    assert "rloo_tools" in run(site, tmp_path, *COMMAND, "ls")
    settings = [f"model.name={warm_model()}", "data.eval_size=8", "plan.steps=1", "plan.prompts_per_step=2"]
    run(site, tmp_path, *COMMAND, "cp", "rloo", "mine.py", *settings)
    assert '"eval/greedy_after"' in run(site, tmp_path, sys.executable, "mine.py", "task=addition")
    assert (tmp_path / "outputs" / "mine" / "addition" / "seed0" / "model").is_dir()

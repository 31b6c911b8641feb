"""Remedies speak settings: those that code names exist, and arguments of Python code become settings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import torchrl_rloo
from support.setting_names import CONFIGS, SETTINGS, exists
from torchrl_rloo.cli.arguments import FREE, RENAMED, SECTIONS, in_settings
from torchrl_rloo.cli.recipe import RECIPES, error_line
from torchrl_rloo.replay import MCAdvantage

PACKAGE = Path(torchrl_rloo.__file__).parent


def strings(file: Path) -> list[str]:
    """Return the strings of a file that are no docstrings."""
    tree = ast.parse(file.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and is_text(node.body[0])}
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [node.value for node in found if id(node) not in docs]


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_every_setting_that_a_remedy_or_an_error_names_exists():
    sections = {name.partition(".")[0] for name in SETTINGS if "." in name} | {"loss", "advantage"}
    dotted = re.compile(rf"(?<![\w./@:])(?:{'|'.join(sections)})(?:\.[a-z_]\w*)+(?![\w(/]|\.\w)")
    files = {"health.jsonl", "model.config.pad_token_id", "model.safetensors.index.json"}  # no settings
    named = {
        n for folder in (PACKAGE, RECIPES) for f in folder.rglob("*.py") for s in strings(f) for n in dotted.findall(s)
    }
    assert len(named) > 100 and [name for name in sorted(named - files) if not exists(name)] == []


def test_the_table_of_arguments_names_files_and_settings_that_exist():
    for start, sections in SECTIONS.items():
        assert (PACKAGE / start).is_dir() or (PACKAGE / f"{start}.py").is_file(), start
        assert all(not s or any(name.startswith(f"{s}.") for name in SETTINGS) or s in FREE for s in sections), start
    assert all(exists(f"{section}.{key}") for section, keys in FREE.items() for key in keys)
    assert all(exists(setting) for settings in RENAMED.values() for setting in settings)
    assert FREE.keys() <= SETTINGS


@pytest.mark.parametrize(
    ("module", "message", "words"),
    [
        (
            "modules.loading",
            "device='cuda' requires CUDA; set device='cpu'",
            "model.device=cuda requires CUDA; set model.device=cpu",
        ),
        (
            "diagnostics.plan",
            "Lower max_new_tokens, set max_tokens=256",
            "Lower generate.max_new_tokens, set environment.max_tokens=256",
        ),
        ("data.prompts", "set column_map={'a': 'b'} or columns", "set data.column_map={'a': 'b'} or columns"),
        (
            "rewards.runner",
            "max_consecutive_failures=0 must be 1; use None",
            "reward.max_consecutive_failures=0 must be 1; use null",
        ),
        ("collectors.conversation", "raise max_consecutive_failures=9", "raise collector.max_consecutive_failures=9"),
        (
            "training.optimizers",
            "set train.precision=bfloat16 for lr=1e-9",
            "set train.precision=bfloat16 for optimizer.lr=1e-9",
        ),
        ("rewards.remote", "timeout=0 must be above 0", "timeout=0 must be above 0"),  # no setting of the recipe
    ],
)
def test_an_error_of_python_code_speaks_settings(module: str, message: str, words: str):
    assert in_settings(message, f"torchrl_rloo.{module}", CONFIGS["rloo"]) == words


def test_an_error_is_told_by_the_code_that_raised_it():
    with pytest.raises(ValueError) as raised:
        MCAdvantage(1)
    line = error_line(raised.value, CONFIGS["rloo"])
    assert line.startswith("plan.num_generations=1: advantage.estimator=rloo compares")
    assert "set advantage.estimator=reinforce" in line
    assert "num_generations=1: estimator='rloo'" in str(raised.value)  # in Python it stays

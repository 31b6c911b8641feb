"""Remedies speak settings: those that code names exist, and arguments of Python code become settings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import torchrl_rloo
from support.recipes import settings
from support.setting_names import SETTINGS, exists
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


def plan(cfg) -> None:
    sizes = {"train_prompts": 100, "eval_prompts": 9, "max_new_tokens": cfg.generate.max_new_tokens}
    cfg.plan.make(**sizes, max_prompt_tokens=9, context_length=32)


@pytest.mark.parametrize(
    ("given", "call", "words"),
    [
        ("plan.minibatches=3", plan, "plan.minibatches=3 must divide the rows per step"),
        ("generate.max_new_tokens=30", plan, "Lower generate.max_new_tokens, set environment.max_tokens=32"),
        ("optimizer.name=sgd optimizer.betas=[0.9,0.9]", lambda c: c.check_optimizer(9), "optimizer.betas=(0.9, 0.9)"),
        ("schedule.warmup_steps=99", lambda c: c.check_optimizer(9), "schedule.warmup_steps=99 must be between 0 and"),
        ("environment.max_turns=3", lambda c: c.environment.make(c.make_task(), 9), "environment.max_turns=3 is"),
    ],
)  # fmt: skip
def test_an_error_of_python_code_speaks_settings(given: str, call, words: str):
    cfg = settings("rloo", *given.split())
    with pytest.raises(ValueError) as raised:
        call(cfg)
    assert words in error_line(raised.value, cfg)


def test_an_error_is_told_by_the_object_that_raised_it():
    cfg = settings("rloo", "plan.num_generations=1")
    with pytest.raises(ValueError) as raised:
        MCAdvantage(1)
    line = error_line(raised.value, cfg)
    assert line.startswith("plan.num_generations=1: advantage.estimator=rloo compares")
    assert "set advantage.estimator=reinforce" in line
    assert "num_generations=1: estimator='rloo'" in str(raised.value)  # in Python it stays


def test_arguments_of_other_objects_stay():
    """An argument without a setting, or with another value than the setting of this name, is not renamed."""
    cfg = settings("rloo", "reward.executor.timeout=9")
    message = "timeout=0 must be above 0; url='a' and workers=3 are wrong"
    assert error_line(ValueError(message), cfg) == message

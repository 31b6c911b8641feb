"""Recipes as modules, with their settings from a command line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torchrl_rloo.cli.main import recipe_file
from torchrl_rloo.cli.recipe import import_recipe, parse_args


def load_recipe(name: str) -> ModuleType:
    """Import a recipe's file under another name than ``__main__``, so that nothing runs."""
    file = recipe_file(name)
    module_name = f"recipe_{file.stem}"
    if module_name not in sys.modules:
        import_recipe(file, module_name)
    return sys.modules[module_name]


def settings(name: str, *overrides: str) -> Any:
    """Return the typed configuration of a command line; raise on invalid settings."""
    module = load_recipe(name)
    return parse_args(module.Config, Path(module.__file__), module.__doc__, ["--traceback", *overrides])


def run_recipe_here(name: str, *overrides: str) -> None:
    """Run a recipe in this process and raise its errors."""
    load_recipe(name).main(settings(name, *overrides))

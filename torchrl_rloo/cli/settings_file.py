"""A file of all settings of a recipe, to edit: a line each, with its comment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from torchrl_rloo.cli.schema import describe

HEADER = """\
# Settings of {name}. Those of the command line win over these, and these over those of the task and the engine below.

defaults:
  - schema{groups}
  - _self_
"""


def settings_file(
    config: type, cfg: DictConfig, name: str, choices: Mapping[str, str], from_groups: Sequence[str]
) -> str:
    """Return the text of a YAML file with the settings of a composed configuration.

    Sections of groups are left to the files chosen. What a chosen file may set elsewhere is commented out, so that
    another choice still has its effect.

    Args:
        config: dataclass with all settings.
        cfg: their values.
        name: of the recipe.
        choices: file chosen of each group.
        from_groups: dotted names of settings that some file of a group sets.
    """
    values = OmegaConf.to_container(cfg, resolve=False)
    groups = "".join(f"\n  - override {group}: {file}" for group, file in choices.items())
    lines = [HEADER.format(name=name, groups=groups)]
    for setting, default, comment in describe(config):
        *sections, leaf = setting.split(".")
        if (sections or [leaf])[0] in choices:
            continue
        if default:
            text = f"{leaf}: {_flow(_find(values, setting))}"
            if setting in from_groups:
                text, comment = f"# {text}", f"{comment}; commented out: as the task has it".lstrip("; ")
        else:  # a section
            text = f"{leaf}:" if sections else f"\n{leaf}:"
        lines.append("  " * len(sections) + text + (f" # {comment}" if comment else ""))
    return "\n".join(lines) + "\n"


def _find(values: Any, setting: str) -> Any:
    for part in setting.split("."):
        values = values[part]
    return values


def _flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).removesuffix("...\n").strip()

"""Writer of a YAML file with all settings of a recipe, one commented line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from torchrl_rloo.cli.fields import iter_settings

HEADER = """\
# Settings of {name}. The command line overrides them; they override those of the task and the engine chosen below.

defaults:
  - schema{groups}
  - _self_
"""


def settings_file(
    config: type, cfg: DictConfig, name: str, choices: Mapping[str, str], from_groups: Sequence[str]
) -> str:
    """Return the text of a YAML file with the settings of a composed configuration.

    Sections of groups are left to the chosen files. Settings that such a file may change elsewhere are commented out,
    so another choice still has its effect.
    """
    values = OmegaConf.to_container(cfg, resolve=False)
    groups = "".join(f"\n  - override {group}: {file}" for group, file in choices.items())
    lines = [HEADER.format(name=name, groups=groups)]
    for setting in iter_settings(config):
        *sections, leaf = setting.name.split(".")
        comment = setting.comment
        if (sections or [leaf])[0] in choices:
            continue
        if setting.default:
            text = f"{leaf}: {_flow(_find(values, setting.name))}"
            if setting.name in from_groups:
                text, comment = f"# {text}", f"{comment}; commented out: set by the task or engine".lstrip("; ")
        else:  # a section
            text = f"{leaf}:" if sections else f"\n{leaf}:"
        lines.append("  " * len(sections) + text + (f" # {comment}" if comment else ""))
    return "\n".join(lines) + "\n"


def _find(values: Any, setting: str) -> Any:
    for part in setting.split("."):
        values = values[part]
    return values


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.dump(value, Dumper=_OneLine, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()


class _OneLine(yaml.SafeDumper):
    """Dumper that escapes line breaks."""


_OneLine.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None),
)

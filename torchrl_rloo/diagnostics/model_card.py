"""Model card of a trained model: what it was trained from, on what and how, and what came of it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from torchrl_rloo import __version__
from torchrl_rloo.diagnostics.report import describe_settings, package_versions
from torchrl_rloo.envs.tasks.registry import TASKS
from torchrl_rloo.objectives import PRESETS
from torchrl_rloo.runtime.files import write_text
from torchrl_rloo.runtime.masking import mask_settings

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NOT_SHOWN = ("output_dir", "resume", "stop_after", "log.", "checkpoint.", "check.", "health.", "threads")


def write_model_card(
    folder: Path,
    *,
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    summary: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    command: str,
) -> Path:
    """Write the card of a saved model: it states only what the run recorded, without secrets and local folders."""
    facts, steps = describe_settings(settings), history[-1]["step"] if history else 0
    model, task, method = (facts.get(name) for name in ("Model", "Task", "Algorithm"))
    base, data = _hub_id(model), _hub_id(facts.get("Prompts") or getattr(TASKS.get(task), "dataset", {}).get("source"))
    paper = PRESETS[method].paper if method in PRESETS else None
    words = [word for word in shlex.split(command) if word != "run"]  # torchrl-rloo run RECIPE, or python FILE
    recipe, adapter = Path(words[1] if len(words) > 1 else command).stem, (folder / "adapter_config.json").is_file()
    front = {"base_model": base, "datasets": data and [data], "library_name": "peft" if adapter else "transformers"}
    front["tags"] = ["torchrl_rloo", *([method] if method else [])]
    start = base or ("the built-in model" if model == "embedded" else _shown(model or "not recorded"))
    lines = [f"# {f'{method} on {_shown(task)}' if method and task else recipe}", ""]
    lines += [f"- Base model: {start}{', which the adapter needs' if adapter else ''}"]
    lines += [f"- Training: {steps:,} steps of the recipe `{recipe}` with torchrl_rloo {__version__}"]
    lines += [f"- Method: `{method}`{f' ({paper})' if paper else ''}"] if method else []
    lines += ([f"- Task: `{_shown(task)}`"] if task else []) + ([f"- Data: {data}"] if data else [])
    if rows := list(_results(summary, history)):
        lines += ["", "## Results", "", "| Metric | Before | After | 95 % interval |", "| --- " * 4 + "|", *rows]
    lines += ["", "## Settings that differ from the defaults", "", "| Setting | Value |", "| --- | --- |"]
    lines += [f"| `{n}` | {_cell(value)} |" for n, value in _differences(mask_settings(settings), defaults)]
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    lines += ["", "## Versions", "", versions, "", "## Citation", ""] + ([f"Method: {paper}.", ""] if paper else [])
    citation = f"title = {{torchrl_rloo}}, author = {{The torchrl_rloo authors}}, version = {{{__version__}}}"
    lines += ["```bibtex", f"@software{{torchrl_rloo, {citation}}}", "```", ""]
    header = yaml.safe_dump({k: v for k, v in front.items() if v}, sort_keys=False)
    return write_text(folder / "README.md", f"---\n{header}---\n\n" + "\n".join(lines))


def _hub_id(name: str | None) -> str | None:
    """Return a name if it is an id of the hub, and no local path."""
    return name if name and _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def _results(summary: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for name in [key.removesuffix("_before") for key in summary if key.endswith("_before")]:
        bounds = next((h for h in reversed(history) if f"{name}_low" in h), None)
        interval = "" if bounds is None else f"{bounds[f'{name}_low']:.4g} to {bounds[f'{name}_high']:.4g}"
        before, after = summary[f"{name}_before"], summary[f"{name}_after"]
        if math.isfinite(after):  # NaN was never logged
            yield f"| `{name}` | {before:.4g} | {after:.4g} | {interval} |"


def _differences(settings: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> Iterator[tuple]:
    """Yield name and value of each setting that differs from its default and concerns the model."""
    for key, value in settings.items():
        default, name = defaults.get(key), f"{prefix}{key}"
        if isinstance(value, Mapping) and isinstance(default, Mapping) and default:
            yield from _differences(value, default, f"{name}.")
        elif value != default and not name.startswith(_NOT_SHOWN):
            yield name, value


def _shown(value: Any) -> Any:
    """Return a value with the last name in place of each absolute path."""
    if isinstance(value, Mapping):
        return {key: _shown(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def _cell(value: Any) -> str:
    return "`" + str(_shown(value)).replace("\n", " ").replace("|", "\\|").replace("`", "'") + "`"

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
from torchrl_rloo.runtime.files import write_text
from torchrl_rloo.runtime.masking import mask_settings

CARD = "README.md"
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
    """Write the card of a saved model: it states only what the run recorded, without secrets and local folders.

    Args:
        folder: folder of the model.
        settings: settings of the run.
        defaults: default settings; the card lists those that differ.
        summary: figures by name; ``<metric>_before`` and ``<metric>_after`` become rows of the results.
        history: metrics of the steps, for confidence intervals.
        command: command line of the run, of which the card names the recipe.
    """
    facts, steps = describe_settings(settings), history[-1]["step"] if history else 0
    task, method = facts.get("Task"), facts.get("Algorithm")
    base, data = _hub_id(facts.get("Model")), _hub_id(facts.get("Prompts") or _published(task))
    words = [word for word in shlex.split(command) if word != "run"]  # torchrl-rloo run RECIPE, or python FILE
    paper, recipe = _paper(method), Path(words[1] if len(words) > 1 else command).stem
    adapter = (folder / "adapter_config.json").is_file()
    front = {"base_model": base, "datasets": data and [data], "library_name": "peft" if adapter else "transformers"}
    front["tags"] = ["torchrl_rloo", *([method] if method else [])]
    built_in = facts.get("Model") == "embedded"
    start = base or ("the built-in model" if built_in else _shown(facts.get("Model", "not recorded")))
    lines = [
        f"# {f'{method} on {_shown(task)}' if method and task else recipe}",
        "",
        f"- Base model: {start}{', which the adapter needs' if adapter else ''}",
        f"- Training: {steps:,} steps of the recipe `{recipe}` with torchrl_rloo {__version__}",
    ]
    lines += [f"- Method: `{method}`{f' ({paper})' if paper else ''}"] if method else []
    lines += [f"- Task: `{_shown(task)}`"] if task else []
    lines += [f"- Data: {data}"] if data else []
    rows = list(_results(summary, history))
    if rows:
        header = ["| Metric | Before | After | 95 % interval |", "| --- | --- | --- | --- |"]
        lines += ["", "## Results", "", *header, *rows]
    changed = dict(_differences(mask_settings(settings), defaults))
    lines += ["", "## Settings that differ from the defaults", "", "| Setting | Value |", "| --- | --- |"]
    lines += [f"| `{name}` | {_cell(value)} |" for name, value in changed.items()]
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    lines += ["", "## Versions", "", versions, "", "## Citation", ""]
    lines += [f"Method: {paper}.", ""] if paper else []
    citation = f"title = {{torchrl_rloo}}, author = {{The torchrl_rloo authors}}, version = {{{__version__}}}"
    lines += ["```bibtex", f"@software{{torchrl_rloo, {citation}}}", "```", ""]
    header = yaml.safe_dump({k: v for k, v in front.items() if v}, sort_keys=False)
    return write_text(folder / CARD, f"---\n{header}---\n\n" + "\n".join(lines))


def _hub_id(name: str | None) -> str | None:
    """Return a name if it is an id of the hub: no local path, and no task's own data."""
    return name if name and _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def _published(task: str | None) -> str | None:
    """Return the data set that a built-in task loads by default."""
    from torchrl_rloo.envs.tasks.registry import TASKS

    return getattr(TASKS.get(task), "dataset", {}).get("source")


def _paper(method: str | None) -> str | None:
    from torchrl_rloo.objectives import PRESETS

    return PRESETS[method].paper if method in PRESETS else None


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
    text = str(_shown(value)).replace("\n", " ").replace("|", "\\|").replace("`", "'")
    return f"`{text}`"

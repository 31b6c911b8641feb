"""Facts of a run for the head of a page: what was trained, by which command, for how long."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_rloo.diagnostics.watch_series import Series
from torchrl_rloo.runtime.files import make_folder, write_text
from torchrl_rloo.runtime.masking import mask_command

LAUNCH_FILE = "launch.json"
_PACKAGES = ("torchrl_rloo", "torch", "torchrl", "tensordict", "transformers", "vllm", "ray", "peft")
_RECENT = 20  # steps of which the speed is the median


def describe_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return task, model, algorithm and more of a run's settings, for those that it has.

    Example:
        >>> describe_settings({"task": {"name": "addition"}, "model": {"name": "embedded"}, "algorithm": "rloo"})
        {'Task': 'addition', 'Model': 'embedded', 'Algorithm': 'rloo'}
    """
    mixture = _at(settings, "task", "mixture")
    found = {
        "Task": ", ".join(map(str, mixture)) if isinstance(mixture, Mapping) else _at(settings, "task", "name"),
        "Prompts": _at(settings, "data", "source"),
        "Model": _at(settings, "model", "name"),
        "Algorithm": _at(settings, "algorithm"),
        "Evaluation": _at(settings, "label"),
    }
    return {name: value for name, value in found.items() if isinstance(value, str) and value}


def total_steps(settings: Mapping[str, Any]) -> int | None:
    """Return the number of steps that a run's settings plan; None if unknown."""
    steps = _at(settings, "plan", "steps") or _at(settings, "train", "steps")
    return steps if type(steps) is int and steps > 0 else None


def headline(settings: Mapping[str, Any], default: str = "RLOO run") -> str:
    """Return a title with algorithm, model and task, for example ``rloo on addition (embedded)``."""
    facts = describe_settings(settings)
    model, task, algorithm = (facts.get(name, "") for name in ("Model", "Task", "Algorithm"))
    if not (task and algorithm):
        return default
    return f"{algorithm} on {task}" + (f" ({model})" if model else "")


def measure(series: Series) -> dict[str, float]:
    """Return wall and CPU seconds, tokens and speeds of a run, for those that were logged.

    ``wall`` is the sum over the steps, without start-up and checkpoints. ``rate`` is the median of the sampled tokens
    per second of collection, and ``step`` the median seconds of a step, over the last 20 steps.
    """
    seconds, tokens, cpu = (series.column(n)[1] for n in ("time/step", "num_tokens", "cpu_seconds"))
    found = {"wall": seconds.sum(), "step": np.median(seconds[-_RECENT:])} if len(seconds) else {}
    found |= {"cpu": cpu[-1]} if len(cpu) else {}
    found |= {"tokens": tokens[-1]} if len(tokens) else {}
    rate = series.last("tokens_per_second", _RECENT)
    return {name: float(value) for name, value in (found | ({"rate": np.median(rate)} if rate else {})).items()}


def run_facts(
    series: Series, settings: Mapping[str, Any], command: str | None = None, versions: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the facts of a run as texts by title."""
    found, measured = describe_settings(settings), measure(series)
    if command:
        found["Command"] = mask_command(command)
    if series.steps is not None:
        planned = total_steps(settings)
        found["Steps"] = f"{series.steps[1]:,}" + (f" of {planned:,}" if planned else "")
    if "wall" in measured:
        found["Time"] = f"{duration(measured['wall'])} of steps"
        found["Time"] += f", {duration(measured['cpu'])} of CPU" if "cpu" in measured else ""
    if "tokens" in measured:
        found["Tokens"] = f"{measured['tokens']:,.0f} with prompts"
    if "rate" in measured:
        found["Sampling"] = f"{measured['rate']:,.0f} tokens/s (median of the last steps)"
    if versions:
        found["Versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return found


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that this process has loaded."""
    found = {"Python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        if name in sys.modules:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:  # a checkout on the path
                found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found


def write_launch(directory: str | Path, command: str) -> Path:
    """Write command and versions of a run to :data:`LAUNCH_FILE`, for pages that show it while it trains.

    Args:
        directory: directory of the run, created if missing.
        command: command line; its secrets are masked.

    Returns:
        The file.
    """
    directory = Path(directory)
    make_folder(directory)
    record = {"command": mask_command(command), "versions": package_versions()}
    return write_text(directory / LAUNCH_FILE, json.dumps(record, indent=1) + "\n")


def duration(seconds: float) -> str:
    """Return seconds as text.

    Example:
        >>> duration(8.34), duration(754), duration(93_784)
        ('8.3 s', '12 min 34 s', '26 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def _at(settings: Any, *names: str) -> Any:
    for name in names:
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings

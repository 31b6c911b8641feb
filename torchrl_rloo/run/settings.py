"""Comparison of a run's settings with those of its checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchrl_rloo.run.checkpoint import saved_steps
from torchrl_rloo.runtime.files import make_folder, write_text
from torchrl_rloo.runtime.masking import mask_settings

_log = logging.getLogger(__name__)

FILE = "settings.json"
RESUME = ("auto", "extend", "never")
IGNORED_SETTINGS = (
    "output_dir",
    "resume",
    "stop_after",
    "log",
    "check",
    "checkpoint",
    "health",
    "train.rank_timeout",
    "train.load_shards",
    "rollouts.path",
    "rollouts.max_gb",
)  # may differ: they do not change results, or health.jsonl records what they did
_RANKS = ("parallel", "shard_size", "reduce", "tensor_parallel", "context_parallel", "offload")  # these change rounding
EXTENDABLE = (  # may differ with "extend"
    *("plan.steps", "plan.epochs", "train.steps", "train.epochs", "inference", "eval", "threads", "model.device"),
    *(f"train.{name}" for name in _RANKS),
)


def differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield ``(name, saved, current)`` of each setting that differs between two nested configurations."""
    for key in sorted({*saved, *current}, key=str):
        old, new = saved.get(key), current.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}", old, new


def check_resume(resume: Any) -> None:
    """Raise unless ``resume`` is one of :data:`RESUME` or the number of a step."""
    if resume not in RESUME and not (type(resume) is int and resume >= 0):
        raise ValueError(f"resume={resume!r} must be one of {list(RESUME)} or the step of a checkpoint, at least 0")


def write_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a run to :data:`FILE` in its directory, for :func:`check_resumable` and for people.

    Secrets are masked: a resumed run takes them from its own settings, which may have new ones.
    """
    make_folder(directory)
    write_text(directory / FILE, json.dumps(mask_settings(settings), indent=1, default=str))


def check_resumable(
    directory: str | Path, *, settings: Mapping[str, Any], defaults: Mapping[str, Any], resume: str | int, **_: Any
) -> None:
    """Refuse to continue a run with other settings, or from a missing step, before anything is loaded.

    It takes the arguments of :class:`~torchrl_rloo.run.Run`, and ignores those that it does not name.

    Raises:
        ValueError: if settings differ. The message names them and the fix.
        FileNotFoundError: if ``resume`` is a number and there is no checkpoint of that step.
    """
    directory = Path(directory)
    if isinstance(resume, int) and resume not in (steps := saved_steps(directory / "checkpoints")):
        raise FileNotFoundError(f"resume={resume} must be one of the checkpoints {steps} in {directory}; or use auto")
    if resume == "never" or not (directory / FILE).is_file() or not any((directory / "checkpoints").glob("step_*")):
        return
    try:
        saved = json.loads((directory / FILE).read_text(encoding="utf-8"))
        if not isinstance(saved, dict):
            raise ValueError(f"it has a {type(saved).__name__} instead of settings")
    except (ValueError, RecursionError) as error:
        _log.warning("cannot read %s, the settings in the checkpoint are compared instead: %s", directory / FILE, error)
        return
    current, plain_defaults = json.loads(json.dumps([settings, defaults], default=str))
    check_same_settings(saved, current, plain_defaults, extend=resume == "extend", where=directory)


def check_same_settings(
    saved: Mapping[str, Any], current: Mapping[str, Any], defaults: Mapping[str, Any], *, extend: bool, where: Path
) -> None:
    """Refuse to continue a run with other settings, except for secrets, which are masked and may differ.

    Settings that the checkpoint lacks have their defaults. With ``extend``, those in :data:`EXTENDABLE` may differ.
    """
    free = IGNORED_SETTINGS + EXTENDABLE if extend else IGNORED_SETTINGS
    saved, current = mask_settings(_with_defaults(saved, defaults)), mask_settings(current)
    found = [
        (name, old, new)
        for name, old, new in differences(saved, current)
        if not any(name == f or name.startswith(f"{f}.") for f in free)
    ]
    if not found:
        return
    extendable = all(any(name == e or name.startswith(f"{e}.") for e in EXTENDABLE) for name, _, _ in found)
    remedy = "Set resume=extend to continue with the new ones" if extendable else "Restore them"
    changes = "; ".join(f"{name}: {old} -> {new}" for name, old, new in found)
    raise ValueError(
        f"the checkpoint in {where} has other settings: {changes}. {remedy}, set another output_dir, or set "
        "resume=never to start over"
    )


def _with_defaults(saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``saved`` with defaults for the settings that it lacks."""
    filled = dict(saved)
    for key, value in defaults.items():
        if key not in filled:
            filled[key] = value
        elif isinstance(value, Mapping) and isinstance(filled[key], Mapping):
            filled[key] = _with_defaults(filled[key], value)
    return filled

"""Comparison of a run's settings with those of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RESUME = ("auto", "extend", "never")
FREE = ("output_dir", "resume", "log", "checkpoint")  # change no result
EXTENDABLE = ("plan.steps", "train.steps", "inference", "eval", "threads", "model.device")  # with resume=extend


def differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield ``(name, saved, current)`` of each setting that differs between two nested configurations.

    Example:
        >>> list(differences({"optim": {"lr": 0.1}}, {"optim": {"lr": 0.2}}))
        [('optim.lr', 0.1, 0.2)]
    """
    for key in sorted({*saved, *current}, key=str):
        old, new = saved.get(key), current.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}", old, new


def check_same_settings(
    saved: Mapping[str, Any], current: Mapping[str, Any], defaults: Mapping[str, Any], *, extend: bool, where: Path
) -> None:
    """Refuse to continue a run with other settings.

    Args:
        saved: of the checkpoint; a setting that it lacks had its default.
        current: of this process.
        defaults: of all settings.
        extend: whether those in :data:`EXTENDABLE` may differ.
        where: the run's directory, for the message.

    Raises:
        ValueError: naming each setting that differs, and the remedy.
    """
    free = FREE + EXTENDABLE if extend else FREE
    found = [
        (name, old, new)
        for name, old, new in differences(_filled(saved, defaults), current)
        if not any(name == f or name.startswith(f"{f}.") for f in free)
    ]
    if not found:
        return
    extendable = all(any(name == e or name.startswith(f"{e}.") for e in EXTENDABLE) for name, _, _ in found)
    remedy = "Set resume=extend to continue with the new ones" if extendable else "Restore them"
    changes = "; ".join(f"{name}: {old} -> {new}" for name, old, new in found)
    raise ValueError(
        f"the checkpoint in {where} is of a run with other settings: {changes}. {remedy}, give the new run its own "
        "output_dir, or set resume=never to start over"
    )


def _filled(saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``saved`` with the settings that it lacks, at their defaults."""
    filled = dict(saved)
    for key, value in defaults.items():
        if key not in filled:
            filled[key] = value
        elif isinstance(value, Mapping) and isinstance(filled[key], Mapping):
            filled[key] = _filled(filled[key], value)
    return filled

"""Everything a run is, as one checkpoint: what stands in it, and going on from it exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchrl_rloo.run.checkpoint import gather_state, restore_state, rng_state, set_rng_state

FREE_SETTINGS = ("output_dir", "resume", "log", "checkpoint")  # may differ in a resumed run: they change no result


def gather(step: int, cpu_seconds: float, settings: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a run after a step.

    Args:
        step: the last finished step.
        cpu_seconds: spent so far, earlier processes of the run included.
        settings: the run's configuration, plain values.
        parts: objects with a ``state_dict``, by name.
    """
    return {
        "step": step,
        "cpu_seconds": cpu_seconds,
        "settings": dict(settings),
        "rng": rng_state(),
        "parts": gather_state(**parts),
    }


def restore(state: Mapping[str, Any], settings: Mapping[str, Any], parts: Mapping[str, Any]) -> tuple[int, float]:
    """Puts every part and every random generator back to a state of :func:`gather`.

    Returns:
        ``(step, cpu_seconds)`` of the state.

    Raises:
        ValueError: if the settings differ from the state's in anything but :data:`FREE_SETTINGS`.
    """
    fixed = [{k: v for k, v in s.items() if k not in FREE_SETTINGS} for s in (state["settings"], settings)]
    _check_same_config(*fixed, settings.get("output_dir"))
    restore_state(state["parts"], **parts)
    set_rng_state(state["rng"])
    return state["step"], state["cpu_seconds"]


def config_differences(saved: Mapping[str, Any], current: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """One line for each setting that differs between two nested configurations.

    Example:
        >>> list(config_differences({"optim": {"lr": 0.1}}, {"optim": {"lr": 0.2}}))
        ['optim.lr: 0.1 -> 0.2']
    """
    for key in sorted({*saved, *current}, key=str):
        old, new = saved.get(key), current.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from config_differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}: {old} -> {new}"


def _check_same_config(saved: Mapping[str, Any], current: Mapping[str, Any], directory: Any) -> None:
    """Refuses to go on with a run under other settings.

    Raises:
        ValueError: naming every setting that differs.
    """
    if differences := list(config_differences(saved, current)):
        raise ValueError(
            f"the checkpoint in {directory} is of a run with other settings: {'; '.join(differences)}. Give the new "
            "run its own output_dir, set resume=never to start over in this one, or go back to the old settings"
        )

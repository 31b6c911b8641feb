"""Start of Ray actors that several processes share, and calls of their methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_rloo.ray_session import require_ray


def start_actor(
    cls: type,
    args: tuple[Any, ...],
    remote_config: Mapping[str, Any] | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Start an actor, or return the handle of the one with this name.

    Args:
        cls: class of the actor.
        args: positional arguments of the class.
        remote_config: resources and options of the actor, see ``ray.remote``. None reserves no CPU.
        name: name in the cluster's namespace. A named actor ends with the process that started it. None starts a new
            actor, which ends with its last handle.
        settings: settings that a named actor must have; it stores them.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if the actor of this name has other settings.
    """
    ray = require_ray()
    options = {"num_cpus": 0, **(remote_config or {})}
    if name is None:
        return ray.remote(cls).options(**options).remote(*args)
    described = _describe(settings or {})
    named = type(cls.__name__, (_Named, cls), {})
    actor = ray.remote(named).options(**options, name=name, get_if_exists=True).remote(described, *args)
    if (found := call(actor.settings.remote())) != described:
        raise ValueError(f"actor_name={name!r} has the settings ({found}), not ({described}); use another name")
    return actor


def call(reference: Any) -> Any:
    """Return the result of an actor's method, or raise the exception that it raised.

    Raises:
        ray.exceptions.RayActorError: if the actor died.
    """
    ray = require_ray()
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise (error if error.cause is None else error.cause) from None


class _Named:
    def __init__(self, described: str, *args: Any):
        super().__init__(*args)
        self._described = described

    def settings(self) -> str:
        return self._described


def _describe(settings: Mapping[str, Any]) -> str:
    """Return settings as text that is equal in all processes."""
    named = {k: getattr(v, "__qualname__", None) or repr(v) for k, v in settings.items() if v is not None}
    return ", ".join(f"{name}={value}" for name, value in sorted(named.items()))

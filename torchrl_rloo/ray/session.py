"""Connection of a process to a Ray cluster, and actors that several processes share."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, Protocol

from torchrl_rloo.runtime.ranks import Ranks


class Connected(Protocol):
    """Object whose threads call Ray, which ends the process if that happens after its shutdown."""

    def disconnect(self) -> None:
        """End all calls of Ray, for good."""


_CONNECTED: weakref.WeakSet[Connected] = weakref.WeakSet()


def note_connected(connected: Connected) -> None:
    """Note an object to disconnect before the session of :func:`ray_session` ends."""
    _CONNECTED.add(connected)


def require_ray() -> ModuleType:
    """Return the module ``ray``, or raise ImportError with the name of the extra."""
    try:
        import ray
    except ImportError:
        ray = None
    if getattr(ray, "__file__", None) is None:  # a folder of this name in the working directory is not Ray
        raise ImportError("a cluster requires Ray; install it with: pip install 'torchrl_rloo[ray]'")
    return ray


@contextmanager
def ray_session(address: str | None = None, *, ranks: Ranks | None = None, **init: Any) -> Iterator[ModuleType]:
    """Connect this process to a Ray cluster within the context.

    A process that is connected already stays connected, also after the context.

    Args:
        address: address of a running cluster: ``"auto"`` finds the one of this machine or job, ``"host:port"`` is that
            of its head. None starts a local cluster, which ends with the context, unless ``RAY_ADDRESS`` names a
            running one, as in a job that ``ray job submit`` started.
        ranks: ranks that connect to one cluster, which rank 0 may start. None connects this process alone.
        **init: further arguments of ``ray.init``, such as ``num_cpus`` of a local cluster.

    Yields:
        The module ``ray``.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if ``init`` has arguments of a local cluster, but ``address`` names a running one.
        ConnectionError: if there is no cluster at the address.
    """
    ray = require_ray()
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS")
    if address and (local := {"num_cpus", "num_gpus", "object_store_memory"} & init.keys()):
        raise ValueError(f"{sorted(local)} cannot be combined with address={address!r}, whose cluster runs already")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ranks = Ranks.single() if ranks is None else ranks

    def connect() -> str:
        ray.init(address or "local", **{"logging_level": "warning"} | init)
        return ray.get_runtime_context().gcs_address

    joined = ranks.broadcast(connect, "connection to Ray")
    if not ray.is_initialized():
        ray.init(joined, logging_level="warning", log_to_driver=False)
    try:
        yield ray
        # A rank that is still connected when rank 0 ends a local cluster would be ended as well
        if not ranks.is_main:
            _disconnect(ray)
        ranks.all_gather(None, "end of the Ray session")
    finally:
        _disconnect(ray)


def _disconnect(ray: ModuleType) -> None:
    for connected in list(_CONNECTED):
        with suppress(Exception):
            connected.disconnect()
    _CONNECTED.clear()
    ray.shutdown()


def start_actor(
    cls: type,
    args: tuple[Any, ...],
    remote_config: Mapping[str, Any] | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Start an actor, or return the handle of the one with this ``name``, which must have equal ``settings``.

    A named actor ends with the process that started it, another one with its last handle.
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
    """Return the result of an actor's method, or raise what it raised, or ``RayActorError`` if the actor died."""
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

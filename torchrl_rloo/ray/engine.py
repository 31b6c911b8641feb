"""RayEngine: an engine in a Ray actor, on any node of a cluster."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import Any, TypeVar

from torchrl_rloo.engines.base import Engine, EngineDeadError, EngineError, EngineTimeoutError, InFlight, WeightStep
from torchrl_rloo.engines.vllm_base import CLOSED, NOT_RESTARTED
from torchrl_rloo.ray.engine_actor import CallResult, EngineActor, EngineFacts
from torchrl_rloo.ray.engine_client import EngineHandle, RayEngineClient
from torchrl_rloo.ray.session import require_ray

E = TypeVar("E", bound=Engine)

_CALLS = 4096  # calls in progress in the actor: a stream per client, and batches of requests
_END_S = 15.0  # time for an engine to end by itself
_NUMBERS = count()


class RayEngine(RayEngineClient):
    """Engine in a Ray actor, which this process starts, restarts and closes.

    Pickled to another process of the cluster it becomes a
    :class:`~torchrl_rloo.ray.engine_client.RayEngineClient`, which samples with the same actor. Ray never restarts the
    actor by itself, since it would come back without weights; :meth:`restart` or the supervisor of an ``EnginePool``
    does. Ray must be initialized.

    Args:
        make_engine: function without arguments that returns an engine. The actor calls it, so it must be picklable,
            such as ``partial(AsyncVLLMEngine, "Qwen/Qwen2.5-0.5B-Instruct")``. An engine on several GPUs takes
            ``tensor_parallel_size``. Each data-parallel replica is a separate engine of one ``EnginePool``.
        num_cpus: CPUs that the actor reserves.
        num_gpus: GPUs that the actor reserves, all on one node.
        resources: further resources of the actor, by name.
        variables: environment variables of the actor's process, which are set before it imports torch.
        name: name in messages and in the prefix of log lines; None numbers the engines.
        request_timeout: seconds of sampling that a request may take; time in a pause does not count.
        start_timeout: maximum duration of the start in seconds, with the wait for resources.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if an argument is out of range, or contradicts one of ``make_engine``.
        EngineTimeoutError: if the engine does not start in time.
        EngineError: if the engine does not start, with its error.

    Example::

        with ray_session():
            make_engine = partial(AsyncVLLMEngine, "Qwen/Qwen2.5-0.5B-Instruct", tensor_parallel_size=2)
            with RayEngine(make_engine, num_gpus=2) as engine:
                (sample,) = engine.generate([Request(prompt=[1, 2, 3], limit=16, seed=0)])
    """

    _stays = True

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        variables: Mapping[str, str] | None = None,
        name: str | None = None,
        request_timeout: float = 600.0,
        start_timeout: float = 600.0,
    ):
        require_ray()
        super(RayEngineClient, self).__init__(request_timeout)
        if start_timeout <= 0:
            raise ValueError(f"start_timeout={start_timeout} must be above 0 seconds")
        self.name = name or f"RayEngine {next(_NUMBERS)}"
        self.start_timeout = start_timeout
        self._make_engine, self._arguments = make_engine, getattr(make_engine, "keywords", {})
        _check_resources(num_cpus, num_gpus, self._arguments)
        self._options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": dict(resources or {})}
        if variables:
            self._options["runtime_env"] = {"env_vars": dict(variables)}
        self._closing = Lock()  # held to close the engine, or to replace its actor
        self._start(0)

    def _start(self, start_count: int) -> None:
        with self._closing:
            self._check_open()
            options = {"max_concurrency": _CALLS, "max_restarts": 0, "max_task_retries": 0} | self._options
            actor = require_ray().remote(EngineActor).options(**options).remote(self.name)
            self._finalizer = weakref.finalize(self, _kill, actor)
        try:
            facts = self._first_call(actor)
        except BaseException:
            self._finalizer()
            raise
        self._connect(EngineHandle(actor, self.name, start_count, 0, self.request_timeout, facts))

    def _first_call(self, actor: Any) -> EngineFacts:
        """Make the engine in its actor."""
        ray = require_ray()
        try:
            result: CallResult = ray.get(actor.start.remote(self._make_engine), timeout=self.start_timeout)
        except ray.exceptions.GetTimeoutError as error:
            needed = {"CPU": self._options["num_cpus"], "GPU": self._options["num_gpus"]} | self._options["resources"]
            raise EngineTimeoutError(
                f"{self.name} did not start within start_timeout={self.start_timeout:g} s; it needs {_text(needed)}, "
                f"and the cluster has {_text(ray.available_resources())} free; see `ray status`, or raise start_timeout"
            ) from error
        except ray.exceptions.RayError as error:
            self._check_open()
            raise EngineError(f"{self.name} does not start: {type(error).__name__}: {error}") from error
        if result.failure is not None:
            raise result.failure.error()
        return result.value

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError(f"this {type(self).__name__} is closed")

    @property
    def reads_object_store(self) -> bool:
        """True unless vLLM may start processes on several nodes, whose object stores they would not share."""
        return self._arguments.get("distributed_executor_backend") != "ray"

    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        self._check()
        connection, content = self._connection, dict(info or {})
        return connection.result(
            lambda: connection.handle.update_weights.remote(step, content, timeout=timeout),
            timeout,
            f"{step} of an update",
        )

    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        self._check()
        self._connection.call("pause", in_flight, limit=timeout, timeout=timeout)

    def resume(self) -> None:
        self._check()
        self._connection.call("resume", limit=self.request_timeout)

    def sleep(self) -> None:
        self._check()
        self._connection.call("sleep", limit=self.request_timeout)

    def wake(self) -> None:
        self._check()
        self._connection.call("wake", limit=self.request_timeout)

    def restart(self) -> None:
        """Kill the actor and its processes, even if they hang, and start a new one from the checkpoint."""
        self._check_open()
        paused = self.paused
        self._finalizer()
        self._connection.lose(EngineDeadError(*NOT_RESTARTED.args))
        self._start(self.start_count + 1)
        if paused:  # a pause continues, since its caller will end it
            self.pause("abort", timeout=self.request_timeout)

    def close(self) -> None:
        """Close the engine and end the actor, also during a :meth:`restart`, which then fails."""
        with self._closing:
            was_closed, self.closed = self.closed, True
        if was_closed:
            return
        connection = getattr(self, "_connection", None)
        if connection is not None:
            connection.close(CLOSED)
            if connection.death is None:
                with suppress(EngineError):  # it is killed in any case
                    connection.result(connection.handle.close.remote, _END_S, "close()")
        self._finalizer()


def start_together(starts: Sequence[Callable[[], E]]) -> list[E]:
    """Start several engines at the same time, since each may take minutes.

    Args:
        starts: functions that start one engine each, such as ``partial(RayEngine, make_engine)``.

    Returns:
        The engines, in the order of ``starts``. If one does not start, the others are closed.

    Example:
        >>> from torchrl_rloo.engines import ScriptedEngine
        >>> [type(engine).__name__ for engine in start_together([lambda: ScriptedEngine([])] * 2)]
        ['ScriptedEngine', 'ScriptedEngine']
    """
    with ThreadPoolExecutor(max(len(starts), 1)) as threads:
        futures = [threads.submit(start) for start in starts]
    failures = [error for future in futures if (error := future.exception()) is not None]
    if failures:
        for future in futures:
            if future.exception() is None:
                future.result().close()
        raise failures[0]
    return [future.result() for future in futures]


def _check_resources(num_cpus: float, num_gpus: float, arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if resources are out of range, or contradict the arguments of a vLLM engine."""
    for name, value in {"num_cpus": num_cpus, "num_gpus": num_gpus}.items():
        if value < 0:
            raise ValueError(f"{name}={value} must be at least 0")
    if (replicas := arguments.get("data_parallel_size") or 1) != 1:
        raise ValueError(
            f"data_parallel_size={replicas} must be 1; make one RayEngine per replica and put them in an EnginePool"
        )
    gpus = (arguments.get("tensor_parallel_size") or 1) * (arguments.get("pipeline_parallel_size") or 1)
    if num_gpus and gpus > 1 and num_gpus != gpus:
        raise ValueError(f"num_gpus={num_gpus:g} must be {gpus}, since the engine runs on {gpus} GPUs")
    if num_gpus and arguments.get("devices") is not None:
        raise ValueError(f"devices={arguments['devices']!r} must be None, since Ray chooses the num_gpus GPUs")


def _kill(actor: Any) -> None:
    """Kill an actor with its processes."""
    ray = require_ray()
    if ray.is_initialized():
        ray.kill(actor, no_restart=True)


def _text(resources: Mapping[str, float]) -> str:
    hidden = ("node:", "object_", "memory")
    shown = {name: resources[name] for name in sorted(resources) if resources[name] and not name.startswith(hidden)}
    return ", ".join(f"{name}={value:g}" for name, value in shown.items()) or "nothing"

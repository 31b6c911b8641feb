"""Engine around vLLM in a child process, which samples while the trainer trains."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import weakref
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import wait
from itertools import count
from multiprocessing import connection
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, TypeVar

import torch

from torchrl_rloo.engines.base import EngineDeadError, EngineError, EngineLoad, EngineTimeoutError, Request, Sample
from torchrl_rloo.engines.vllm_api import (
    ERROR_LOG,
    UNIPROC,
    adapter_request,
    engine_arguments,
    model_stop_ids,
    prompt_arguments,
    prompt_scores,
    require_vllm,
    sample_from_output,
    sampling_arguments,
    sampling_params,
    vllm_environment,
)
from torchrl_rloo.engines.vllm_base import CLOSED, NOT_RESTARTED, LoopEngine, LoopThread
from torchrl_rloo.runtime.processes import Guard, kill_tree

T = TypeVar("T")

_START_LOCK = Lock()  # a start changes the environment, and must recognize the processes that it started
_START_POLL_S = 0.1  # time between two looks for the child of a start
_LOG_TAIL_LINES = 12  # lines of the log that an error quotes
_EXIT_TIMEOUT_S = 10.0  # time for a failed process to write its last log lines and exit
_GRACE_S = 5.0  # time for a process to end by itself when its engine is closed


class AsyncVLLMEngine(LoopEngine):
    """Engine that samples with vLLM's ``AsyncLLM``, whose engine core is a child process.

    The child imports the main module, as in ``multiprocessing``, so a script requires ``if __name__ == "__main__":``.
    The child ends when this process ends, even if it is killed, or when the last reference to the engine is deleted.

    Args:
        model: local directory or hub id, in Hugging Face format.
        threads: number of OpenMP threads of the child; None leaves it to torch.
        devices: GPUs of the child, as in ``CUDA_VISIBLE_DEVICES``: ``"1"`` leaves the first GPU to the trainer. None
            uses the GPUs of this process.
        request_timeout: seconds of sampling that a request may take; time in a pause does not count.
        start_timeout: maximum duration of the start, in seconds.
        **arguments: arguments of ``vllm.AsyncEngineArgs``, e.g. ``dtype``, ``max_model_len``,
            ``tensor_parallel_size``, ``enable_lora``, and ``enable_sleep_mode`` for :meth:`sleep` on a GPU.

    Raises:
        ImportError: if vLLM is not installed.
        ValueError: if the toolkit sets an argument itself, or if a time is not above 0.
        EngineTimeoutError: if vLLM takes too long to start.
        EngineError: if vLLM does not start, with its error.

    Example::

        with AsyncVLLMEngine("Qwen/Qwen2.5-0.5B-Instruct", dtype="bfloat16", devices="1") as engine:
            future = engine.submit(Request(prompt=[1, 2, 3], limit=16, seed=0))
            sample = future.result()  # up to 16 tokens, log_probs and versions
    """

    def __init__(
        self,
        model: str | PathLike,
        *,
        threads: int | None = 1,
        devices: str | None = None,
        request_timeout: float = 600.0,
        start_timeout: float = 300.0,
        **arguments: Any,
    ):
        super().__init__(request_timeout)
        if start_timeout <= 0:
            raise ValueError(f"start_timeout={start_timeout} must be above 0 seconds")
        variables = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
        self._make_core = lambda: Core(model, arguments, threads, variables, start_timeout)
        self._ids = count()
        self._closing = Lock()  # held to close the engine, or to replace its core
        self._core: Core | None = None
        self._next_core: Core | None = None  # the one that starts
        self._start()

    def _start(self) -> None:
        # Let close() and the end of this process end a start
        with self._closing:
            self._check()
            self._next_core = core = self._make_core()
            self._finalizer = weakref.finalize(self, core.close, CLOSED)
        try:
            core.start()
        except BaseException:
            self._finalizer.detach()
            raise
        finally:
            self._next_core = None
        self._core, self._loop = core, core.loop
        config = core.llm.model_config
        self.stop_ids, self.context_length = model_stop_ids(config), config.max_model_len
        self.vocab_size = config.get_vocab_size()
        self._stamp(0, timeout=60.0)

    @property
    def world_size(self) -> int:
        return self._core.llm.vllm_config.parallel_config.world_size

    def check_health(self, timeout: float = 10.0) -> None:
        self._check_alive()
        super().check_health(timeout)

    def load(self) -> EngineLoad:
        """Return vLLM's last statistics. It sends them with the tokens of each step."""
        self._check_alive()
        return self._core.llm.logger_manager.stat_loggers[0].load()

    def _check_alive(self) -> None:
        self._check()
        if self._core.is_dead():
            raise self._core.death()

    def close(self) -> None:
        """Stop the engine for good, also during a :meth:`restart`, which then fails."""
        with self._closing:
            self.closed = True
            starting = self._next_core
        if starting is not None:
            starting.close(CLOSED)
        self._end(CLOSED)

    def restart(self) -> None:
        """Kill vLLM's processes, even if they hang, and start again from the checkpoint."""
        self._check()
        self._end(NOT_RESTARTED, grace=0.0)
        self._start()
        self._finish_restart()

    def _end(self, error: EngineError, **options: float) -> None:
        self._finalizer.detach()  # otherwise it would keep the dead core
        self._core.close(error, **options)

    async def _sample(self, request: Request) -> Sample:
        prompt = await asyncio.to_thread(prompt_arguments, request) if request.images else prompt_arguments(request)
        return sample_from_output(request, await self._complete(prompt, sampling_arguments(request)))

    async def _score(self, row: Sequence[int], arguments: dict[str, Any]) -> list[float]:
        output = await self._complete({"prompt_token_ids": list(row)}, arguments)
        return prompt_scores(row, output.prompt_logprobs)

    async def _complete(self, prompt: dict[str, Any], arguments: dict[str, Any]) -> Any:
        return await self._core.ask(self._core.complete(prompt, arguments, str(next(self._ids)), self._adapter))

    async def _pause_engine(self, mode: str) -> None:
        await self._core.ask(self._core.llm.pause_generation(mode=mode, clear_cache=True))

    async def _resume_engine(self) -> None:
        await self._core.ask(self._core.llm.resume_generation())

    async def _collective(self, method: str, args: tuple, timeout: float) -> list:
        return await self._core.ask(self._core.llm.collective_rpc(method, timeout, args))

    async def _name_weights(self, version: int) -> None:
        await self._core.ask(self._core.llm.update_weight_version(str(version)))
        if not await self._core.ask(self._core.llm.reset_prefix_cache(reset_running_requests=True)):
            raise EngineError("vLLM did not drop its prefix cache, so samples may be of old weights; call restart()")

    async def _sleep_engine(self) -> None:
        if torch.cuda.is_available() and not self.asleep:  # vLLM cannot release memory on CPU
            await self._core.ask(self._core.llm.sleep(level=1, mode="wait"))

    async def _wake_engine(self) -> None:
        if torch.cuda.is_available() and self.asleep:
            await self._core.ask(self._core.llm.wake_up())

    async def _load(self, path: str) -> None:
        await self._core.ask(self._core.llm.add_lora(adapter_request(path, new=True)))

    def _load_adapter(self, path: str, version: int, timeout: float) -> None:
        self._loop.call(self._load(path), timeout, "loading an adapter")
        self._adapter = adapter_request(path, new=False)


class Core:
    """``AsyncLLM`` with its loop and its child process. It can be closed from any thread, even during :meth:`start`."""

    def __init__(
        self,
        model: str | PathLike,
        arguments: Mapping[str, Any],
        threads: int | None,
        variables: Mapping[str, str],
        timeout: float,
    ):
        self.loop, self.llm = LoopThread("vllm"), None
        self._model, self._arguments, self._threads, self._timeout = model, dict(arguments), threads, timeout
        self._folder = TemporaryDirectory(prefix="torchrl_rloo_vllm_")
        self._log = Path(self._folder.name) / "errors.log"
        self._variables = {**variables, ERROR_LOG: str(self._log)}
        self._guard, self._processes = Guard.shared(), []
        self._closing = False
        self._death: str | None = None

    def start(self) -> None:
        """Start vLLM, or raise an ``EngineError`` if it does not start in time or is closed."""
        try:
            # Start one engine at a time, since a start changes the environment of this process
            with _START_LOCK, vllm_environment(own_process=True, threads=self._threads, **self._variables):
                require_vllm()
                if not torch.cuda.is_available() and self._arguments.get("tensor_parallel_size", 1) == 1:
                    self._arguments.setdefault("distributed_executor_backend", UNIPROC)
                self.llm = self._started(engine_arguments(self._model, self._arguments))
            if self._closing:  # close() was called at the last moment
                raise EngineError(*CLOSED.args)
        except BaseException:
            self.close(CLOSED)
            raise
        # End all requests if a process of the engine dies, also those that wait for resume()
        Thread(target=self._watch, name="vllm-watch", daemon=True).start()

    def _started(self, settings: dict[str, Any]) -> Any:
        """Make vLLM's engine on the loop, which it then uses."""

        async def make() -> Any:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            arguments = AsyncEngineArgs(**settings)
            return AsyncLLM.from_engine_args(arguments, stat_loggers=[_load_logger(arguments.disable_log_stats)])

        earlier = set(multiprocessing.active_children())
        deadline, is_late = monotonic() + self._timeout, False
        start = self.loop.start(make())
        while not wait({start}, _START_POLL_S).done and monotonic() < deadline + _EXIT_TIMEOUT_S:
            # From its first moment on, the child ends with this process, whose death leaves it waiting for ever
            for process in set(multiprocessing.active_children()) - earlier - set(self._processes):
                if process.name.startswith("EngineCore"):
                    self._processes.append(process)
                    self._guard.watch(process.pid)
            # Without its child, vLLM's start fails
            is_late = monotonic() > deadline
            if is_late or self._closing:
                self._kill()
        if self._closing:
            raise EngineError(*CLOSED.args)
        if is_late:
            raise EngineTimeoutError(f"starting vLLM took longer than timeout={self._timeout} s")
        if (error := start.exception()) is None:
            return start.result()
        reason = f"{type(error).__name__}: {error}{self._log_tail()}"
        raise EngineError(f"vLLM does not start with model={os.fspath(self._model)!r}: {reason}") from error

    async def complete(self, prompt: dict[str, Any], arguments: dict[str, Any], name: str, adapter: Any) -> Any:
        """Return the finished ``RequestOutput`` of a prompt and of arguments of ``SamplingParams``."""
        from vllm.sampling_params import RequestOutputKind

        params = sampling_params(arguments, output_kind=RequestOutputKind.FINAL_ONLY)
        async for output in self.llm.generate(prompt, params, name, lora_request=adapter):
            last = output
        return last

    async def ask(self, work: Awaitable[T]) -> T:
        """Await an answer of vLLM, and convert its errors to an ``EngineError``."""
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMDeadError
        from vllm.v1.engine.exceptions import EngineGenerateError

        try:
            return await work
        except EngineError:
            raise
        except Exception as error:
            if isinstance(error, VLLMDeadError) or self.is_dead():
                raise self.death() from error
            cause = error.__cause__ if isinstance(error, EngineGenerateError) and error.__cause__ else error
            raise EngineError(f"vLLM: {type(cause).__name__}: {cause}") from error

    def is_dead(self) -> bool:
        """Return whether vLLM or one of its processes has stopped."""
        return self.llm is None or self.llm.errored or not all(p.is_alive() for p in self._processes)

    def death(self) -> EngineDeadError:
        """Return the error of a dead engine."""
        # Describe the death once, since all requests in flight raise it
        if self._death is None:
            deadline = monotonic() + _EXIT_TIMEOUT_S
            while any(process.exitcode is None for process in self._processes) and monotonic() < deadline:
                sleep(0.01)
            ended = [process for process in self._processes if process.exitcode is not None]
            ends = [f"{p.name} (pid {p.pid}) ended with exit code {p.exitcode}" for p in ended]
            reason = ", ".join(ends) or "its engine core stopped"
            self._death = f"vLLM is dead: {reason}; call restart(){self._log_tail()}"
        return EngineDeadError(self._death)

    def close(self, error: EngineError, *, grace: float = _GRACE_S) -> None:
        """Stop the engine. Requests in flight and later ones fail with ``error``. It may be called again.

        The processes have ``grace`` seconds to end by themselves; 0 kills them at once.
        """
        self._closing = True
        if self.llm is None or not grace:
            self._kill()  # a start in progress then fails
        self.loop.end(error, final=True)
        if (llm := self.llm) is not None:
            self.llm = None
            if llm.output_handler is not None:
                self.loop.call_soon(llm.output_handler.cancel)  # otherwise it would log the end as a failure
            llm.shutdown(timeout=grace)
        # Kill what has not ended
        self._kill()
        for process in self._processes:
            process.join(timeout=_GRACE_S)
            self._guard.unwatch(process.pid)
        self.loop.close(error)
        self._folder.cleanup()

    def _kill(self) -> None:
        """Kill the engine's processes and those that they started, even stopped ones."""
        for process in self._processes:
            if process.is_alive():
                kill_tree(process.pid)

    def _watch(self) -> None:
        connection.wait([process.sentinel for process in self._processes])
        if not self._closing:
            self.loop.end(self.death())

    def _log_tail(self) -> str:
        """Return the last errors that the child logged, since vLLM reports few to the parent."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(["; its log ends with:", *lines[-_LOG_TAIL_LINES:]]) if lines else ""


def _load_logger(only: bool) -> type:
    """Return a class of stat loggers that keep the last load: the only one, or one in addition to those of vLLM."""
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger

    class LoadLogger(AggregateStatLoggerBase):
        """Stat logger of one engine core."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int]):
            self._scheduler: Any = None
            self._tokens = self._preemptions = 0

        def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
            """Take the statistics of one step."""
            if scheduler_stats is not None:
                self._scheduler = scheduler_stats
            if iteration_stats is not None:
                self._tokens += iteration_stats.num_generation_tokens
                self._preemptions += iteration_stats.num_preempted_reqs

        def load(self) -> EngineLoad:
            """Return the load after the last step."""
            if (s := self._scheduler) is None:
                return EngineLoad()
            waiting = s.num_waiting_reqs + s.num_skipped_waiting_reqs
            return EngineLoad(s.num_running_reqs, waiting, s.kv_cache_usage, self._preemptions, self._tokens)

        def _ignore(self, *args: Any, **kwargs: Any) -> None:
            """Ignore what else vLLM would log or record."""

        log = log_engine_initialized = record_sleep_state = record_admission_rejection = _ignore

    class OnlyLoadLogger(LoadLogger, PrometheusStatLogger):
        """Stat logger in place of vLLM's for Prometheus, which costs time in each step."""

    return OnlyLoadLogger if only else LoadLogger

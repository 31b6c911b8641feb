"""Engine around vLLM in a child process, which samples while the trainer trains."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import weakref
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from multiprocessing import connection
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, TypeVar

import torch

from torchrl_rloo.engines.base import EngineDeadError, EngineError, EngineTimeoutError, Request, Sample
from torchrl_rloo.engines.vllm_api import (
    CHILD_WORKER,
    SILENCED_WARNINGS,
    TRAINER_PID,
    UNIPROC,
    adapter_request,
    engine_arguments,
    model_stop_ids,
    require_vllm,
    sample_from_output,
    sampling_arguments,
    vllm_environment,
)
from torchrl_rloo.engines.vllm_loop import CLOSED, NOT_RESTARTED, LoopEngine, LoopThread

T = TypeVar("T")

_START_LOCK = Lock()  # a start changes the environment, and must recognize the processes that it started
_LOG = "errors.log"
_LOG_TAIL_LINES = 12  # lines of the log that an error quotes
_EXIT_TIMEOUT_S = 10.0  # time for a failed process to write its last log lines and exit


class AsyncVLLMEngine(LoopEngine):
    """Engine that samples with vLLM's ``AsyncLLM``, whose engine core is a child process.

    The child imports the main module, as in ``multiprocessing``, so a script requires ``if __name__ == "__main__":``.
    The child ends when this process ends, even if it is killed, or when the last reference to the engine is deleted.

    Args:
        model: local directory or hub id, in Hugging Face format.
        threads: number of OpenMP threads of the child; None leaves it to torch.
        devices: GPUs of the child, as in ``CUDA_VISIBLE_DEVICES``: ``"1"`` leaves the first GPU to the trainer. None
            uses the GPUs of this process.
        request_timeout: maximum duration of a :meth:`generate` call, in seconds.
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
        variables = {TRAINER_PID: str(os.getpid())}
        if devices is not None:
            variables["CUDA_VISIBLE_DEVICES"] = devices
        self._start_core = lambda: _Core(model, arguments, threads, variables, start_timeout)
        self._ids = count()
        self._start()

    def _start(self) -> None:
        self._core = self._start_core()
        self._loop = self._core.loop
        self._finalizer = weakref.finalize(self, self._core.close, CLOSED)  # also runs at exit
        self.stop_ids = model_stop_ids(self._core.llm.model_config)
        self.context_length = self._core.llm.model_config.max_model_len
        self._stamp(0, timeout=60.0)

    @property
    def world_size(self) -> int:
        return self._core.llm.vllm_config.parallel_config.world_size

    def check_health(self) -> None:
        self._check()
        if self._core.dead():
            raise self._core.death()

    def close(self) -> None:
        self.closed = True
        self._end(CLOSED)

    def restart(self) -> None:
        self._end(NOT_RESTARTED)
        self._start()
        self._finish_restart()

    def _end(self, error: EngineError) -> None:
        self._finalizer.detach()  # otherwise it would keep the dead core
        self._core.close(error)

    async def _sample(self, request: Request) -> Sample:
        output = await self._core.ask(self._core.complete(request, str(next(self._ids)), self._adapter))
        return sample_from_output(request, output)

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


class _Core:
    """A started ``AsyncLLM`` with its loop and its processes."""

    def __init__(
        self,
        model: str | PathLike,
        arguments: Mapping[str, Any],
        threads: int | None,
        variables: Mapping[str, str],
        timeout: float,
    ):
        self.loop = LoopThread("vllm")
        self._folder = TemporaryDirectory(prefix="torchrl_rloo_vllm_")
        self._processes: list[Any] = []
        self._shared: set[str] = set()
        self._closing = False
        self._death: str | None = None
        self._log_read = 0
        # Start one engine at a time, since a start changes the environment of this process
        try:
            with _START_LOCK, vllm_environment(own_process=True, threads=threads, **variables):
                require_vllm()
                with self._child_logs():
                    self._start(model, dict(arguments), timeout)
        except BaseException:
            self.close(CLOSED)
            raise
        # End all requests if a process of the engine dies
        Thread(target=self._watch, name="vllm-watch", daemon=True).start()

    def _start(self, model: str | PathLike, arguments: dict[str, Any], timeout: float) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if not torch.cuda.is_available() and arguments.get("tensor_parallel_size", 1) == 1:
            arguments.setdefault("distributed_executor_backend", UNIPROC)
        settings = engine_arguments(model, arguments) | {"worker_extension_cls": CHILD_WORKER}
        settings["log_config_file"] = os.environ["VLLM_LOGGING_CONFIG_PATH"]  # vLLM may have read the variable before

        async def start() -> Any:  # runs on the loop, which vLLM then uses
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))

        # Kill the processes of a failed start, which vLLM may leave running
        earlier_processes = set(multiprocessing.active_children())
        try:
            self.llm = self.loop.call(start(), timeout, "starting vLLM")
        except BaseException as error:
            for process in set(multiprocessing.active_children()) - earlier_processes:
                if process.name.startswith("EngineCore"):
                    process.kill()
            if isinstance(error, EngineTimeoutError) or not isinstance(error, Exception):
                raise
            raise EngineError(
                f"vLLM does not start with model={os.fspath(model)!r}: {type(error).__name__}: {error}{self._log()}"
            ) from error
        self._processes = list(self.llm.engine_core.resources.engine_manager.processes)
        self._shared = _shared_files([process.pid for process in self._processes])

    async def complete(self, request: Request, name: str, adapter: Any) -> Any:
        """Return the finished ``CompletionOutput`` of a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**sampling_arguments(request), output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = {"prompt_token_ids": list(request.prompt)}
        async for output in self.llm.generate(prompt, params, name, lora_request=adapter):
            last = output
        return last.outputs[0]

    async def ask(self, work: Awaitable[T]) -> T:
        """Await an answer of vLLM, and convert its errors to an ``EngineError``."""
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMDeadError
        from vllm.v1.engine.exceptions import EngineGenerateError

        try:
            return await work
        except EngineError:
            raise
        except VLLMDeadError as error:
            raise self.death() from error
        except Exception as error:
            if self.dead():
                raise self.death() from error
            self._log_read = self._log_size()  # keep later errors from repeating these lines
            cause = error.__cause__ if isinstance(error, EngineGenerateError) and error.__cause__ else error
            raise EngineError(f"vLLM: {type(cause).__name__}: {cause}") from error

    def dead(self) -> bool:
        """Return whether vLLM or one of its processes has stopped."""
        return not hasattr(self, "llm") or self.llm.errored or not all(p.is_alive() for p in self._processes)

    def death(self) -> EngineDeadError:
        """Return the error of a dead engine."""
        # Describe the death once, since all requests in flight raise it
        if self._death is None:
            deadline = monotonic() + _EXIT_TIMEOUT_S
            while any(process.exitcode is None for process in self._processes) and monotonic() < deadline:
                sleep(0.01)
            ended = [process for process in self._processes if process.exitcode is not None]
            ends = [f"{p.name} (pid {p.pid}) ended with exit code {p.exitcode}" for p in ended]
            self._death = f"vLLM is dead: {', '.join(ends) or 'its engine core stopped'}"
            self._log_read = 0  # an earlier error may have quoted the last lines; quote them again
            self._death += f"; call restart(){self._log()}"
        return EngineDeadError(self._death)

    def close(self, error: EngineError) -> None:
        """Stop the engine. Requests in flight and later ones fail with ``error``. It may be called again."""
        self._closing = True
        if hasattr(self, "llm"):
            self.loop.end(error, final=True)
            if (handler := self.llm.output_handler) is not None:
                self.loop.loop.call_soon_threadsafe(handler.cancel)  # otherwise it would log the end as a failure
            self.llm.shutdown(timeout=5.0)
            del self.llm  # otherwise its finalizer would fail at Python's exit
        # Kill processes that do not end, and remove the shared memory that killed ones leave
        for process in self._processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join(timeout=5.0)
        for path in self._shared:
            Path(path).unlink(missing_ok=True)
        self.loop.close(error)
        self._folder.cleanup()

    def _watch(self) -> None:
        connection.wait([process.sentinel for process in self._processes])
        if not self._closing:
            self.loop.end(self.death())

    @contextmanager
    def _child_logs(self) -> Iterator[None]:
        """Log errors of processes started within the context to a file, since vLLM reports few to the parent."""
        if "VLLM_LOGGING_CONFIG_PATH" in os.environ:
            yield
            return
        # Log to the console as before, and errors also to the file
        folder = Path(self._folder.name)
        level, stream = os.environ["VLLM_LOGGING_LEVEL"], os.environ["VLLM_LOGGING_STREAM"]
        line = "%(levelname)s %(asctime)s [%(processName)s %(filename)s:%(lineno)d] %(message)s"
        console = {"class": "logging.StreamHandler", "level": level, "stream": stream, "formatter": "line"}
        file = {"class": "logging.FileHandler", "level": "ERROR", "filename": str(folder / _LOG), "formatter": "line"}
        settings = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"format": line}},
            "handlers": {"console": console, "file": file},
            "loggers": {"vllm": {"handlers": ["console", "file"], "level": level, "propagate": False}}
            | {name: {"level": "ERROR"} for name in SILENCED_WARNINGS},
        }
        (folder / "logging.json").write_text(json.dumps(settings))
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(folder / "logging.json")
        try:
            yield
        finally:
            # Remove the file's handler from this process, which vLLM also configured
            del os.environ["VLLM_LOGGING_CONFIG_PATH"]
            logger = logging.getLogger("vllm")
            for handler in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
                if Path(handler.baseFilename).parent == folder:
                    logger.removeHandler(handler)
                    handler.close()

    def _log_size(self) -> int:
        path = Path(self._folder.name) / _LOG
        return path.stat().st_size if path.exists() else 0

    def _log(self) -> str:
        if self._log_size() <= self._log_read:
            return ""
        lines = (Path(self._folder.name) / _LOG).read_bytes()[self._log_read :].decode(errors="replace").splitlines()
        return "\n".join(["; its log ends with:", *lines[-_LOG_TAIL_LINES:]])


def _shared_files(pids: list[int]) -> set[str]:
    """Return the named shared memory of processes and their descendants, except semaphores, which Python releases."""
    if not sys.platform.startswith("linux"):
        return set()
    import psutil  # vLLM depends on it

    roots = [psutil.Process(pid) for pid in pids]
    processes = roots + [child for root in roots for child in root.children(recursive=True)]
    paths = {region.path for process in processes for region in process.memory_maps()}
    return {path for path in paths if path.startswith("/dev/shm/") and not path.startswith("/dev/shm/sem.")}

"""Child process of AsyncVLLMEngine: its start, its errors, its load and its end."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import connection
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, TypeVar

import torch

from torchrl_rloo.engines.base import EngineDeadError, EngineError, EngineLoad, EngineTimeoutError, Request
from torchrl_rloo.engines.vllm_api import (
    CHILD_WORKER,
    SILENCED_WARNINGS,
    UNIPROC,
    engine_arguments,
    require_vllm,
    sampling_arguments,
    vllm_environment,
)
from torchrl_rloo.engines.vllm_loop import CLOSED, LoopThread
from torchrl_rloo.runtime.processes import Guard

T = TypeVar("T")

_START_LOCK = Lock()  # a start changes the environment, and must recognize the processes that it started
_LOG = "errors.log"
_LOG_TAIL_LINES = 12  # lines of the log that an error quotes
_EXIT_TIMEOUT_S = 10.0  # time for a failed process to write its last log lines and exit
_GRACE_S = 5.0  # time for a process to end by itself when its engine is closed


class Core:
    """``AsyncLLM`` with its loop and its processes. It can be closed from any thread, even during :meth:`start`.

    Args:
        model: local directory or hub id.
        arguments: arguments of ``vllm.AsyncEngineArgs``.
        threads: number of OpenMP threads of the child; None leaves it to torch.
        variables: environment variables of the child.
        timeout: maximum duration of the start, in seconds.
    """

    def __init__(
        self,
        model: str | PathLike,
        arguments: Mapping[str, Any],
        threads: int | None,
        variables: Mapping[str, str],
        timeout: float,
    ):
        self.loop = LoopThread("vllm")
        self._model, self._arguments, self._threads, self._variables = model, dict(arguments), threads, variables
        self._timeout = timeout
        self._earlier_processes: set[Any] | None = None  # set during the start
        self._folder = TemporaryDirectory(prefix="torchrl_rloo_vllm_")
        self._processes: list[Any] = []
        self._shared: set[str] = set()
        self._closing = False
        self._death: str | None = None
        self._log_read = 0

    def start(self) -> None:
        """Start vLLM.

        Raises:
            EngineTimeoutError: if it takes too long.
            EngineError: if it does not start, or is closed.
        """
        # Start one engine at a time, since a start changes the environment of this process
        try:
            with _START_LOCK, vllm_environment(own_process=True, threads=self._threads, **self._variables):
                require_vllm()
                with self._child_logs():
                    self._start(self._model, self._arguments, self._timeout)
            if self._closing:  # close() was called at the last moment
                raise EngineError(*CLOSED.args)
        except BaseException:
            self.close(CLOSED)
            raise
        # End all requests if a process of the engine dies
        Thread(target=self._watch, name="vllm-watch", daemon=True).start()

    def _start(self, model: str | PathLike, arguments: dict[str, Any], timeout: float) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from torchrl_rloo.engines.vllm_load import load_logger

        if not torch.cuda.is_available() and arguments.get("tensor_parallel_size", 1) == 1:
            arguments.setdefault("distributed_executor_backend", UNIPROC)
        settings = engine_arguments(model, arguments) | {"worker_extension_cls": CHILD_WORKER}
        settings["log_config_file"] = os.environ["VLLM_LOGGING_CONFIG_PATH"]  # vLLM may have read the variable before

        async def start() -> Any:  # runs on the loop, which vLLM then uses
            arguments = AsyncEngineArgs(**settings)
            return AsyncLLM.from_engine_args(arguments, stat_loggers=[load_logger(arguments.disable_log_stats)])

        # Kill the processes of a failed start, which vLLM may leave running
        self._earlier_processes = set(multiprocessing.active_children())
        try:
            if self._closing:
                raise CLOSED
            self.llm = self.loop.call(start(), timeout, "starting vLLM")
        except BaseException as error:
            self._kill_new_processes()
            self._earlier_processes = None
            if self._closing:
                raise EngineError(*CLOSED.args) from error
            if isinstance(error, EngineTimeoutError) or not isinstance(error, Exception):
                raise
            raise EngineError(
                f"vLLM does not start with model={os.fspath(model)!r}: {type(error).__name__}: {error}{self._log()}"
            ) from error
        self._earlier_processes = None
        self._processes = list(self.llm.engine_core.resources.engine_manager.processes)
        self._shared = _shared_files([process.pid for process in self._processes])
        # A stopped process cannot notice the end of this one
        self._guard = Guard.shared()
        for process in self._processes:
            self._guard.watch(process.pid)

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

    def load(self) -> EngineLoad:
        """Return vLLM's last statistics. It sends them with the tokens of each step."""
        return self.llm.logger_manager.stat_loggers[0].load()

    def close(self, error: EngineError, *, grace: float = _GRACE_S) -> None:
        """Stop the engine. Requests in flight and later ones fail with ``error``. It may be called again.

        Args:
            error: error of the requests.
            grace: seconds for the processes to end by themselves; 0 kills them at once.
        """
        self._closing = True
        self._kill_new_processes()  # a start in progress then fails
        if hasattr(self, "llm"):
            self.loop.end(error, final=True)
            if not grace:
                self._kill()
            if (handler := self.llm.output_handler) is not None:
                self.loop.loop.call_soon_threadsafe(handler.cancel)  # otherwise it would log the end as a failure
            self.llm.shutdown(timeout=grace)
            del self.llm  # otherwise its finalizer would fail at Python's exit
        # Kill processes that do not end, and remove the shared memory that killed ones leave
        for process in self._processes:
            process.join(timeout=grace)
            if process.is_alive():
                process.kill()
                process.join(timeout=_GRACE_S)
            self._guard.unwatch(process.pid)
        for path in self._shared:
            Path(path).unlink(missing_ok=True)
        self.loop.close(error)
        self._folder.cleanup()

    def _kill(self) -> None:
        """Kill the engine's processes and those that they started, even stopped ones."""
        import psutil  # vLLM depends on it

        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()

    def _kill_new_processes(self) -> None:
        if (earlier := self._earlier_processes) is None:  # no start is in progress
            return
        for process in set(multiprocessing.active_children()) - earlier:
            if process.name.startswith("EngineCore"):
                process.kill()

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

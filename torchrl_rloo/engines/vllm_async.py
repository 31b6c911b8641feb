"""Engine around vLLM in a child process, which samples while the trainer trains."""

from __future__ import annotations

import os
import weakref
from itertools import count
from os import PathLike
from threading import Lock
from typing import Any

import torch

from torchrl_rloo.engines.base import EngineError, EngineLoad, Request, Sample
from torchrl_rloo.engines.vllm_api import TRAINER_PID, adapter_request, model_stop_ids, sample_from_output
from torchrl_rloo.engines.vllm_core import Core
from torchrl_rloo.engines.vllm_loop import CLOSED, NOT_RESTARTED, LoopEngine


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
        variables = {TRAINER_PID: str(os.getpid())}
        if devices is not None:
            variables["CUDA_VISIBLE_DEVICES"] = devices
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
        self.stop_ids = model_stop_ids(self._core.llm.model_config)
        self.context_length = self._core.llm.model_config.max_model_len
        self.vocab_size = self._core.llm.model_config.get_vocab_size()
        self._stamp(0, timeout=60.0)

    @property
    def world_size(self) -> int:
        return self._core.llm.vllm_config.parallel_config.world_size

    def check_health(self, timeout: float = 10.0) -> None:
        self._check()
        if self._core.dead():
            raise self._core.death()
        super().check_health(timeout)

    def load(self) -> EngineLoad:
        self._check()
        if self._core.dead():
            raise self._core.death()
        return self._core.load()

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

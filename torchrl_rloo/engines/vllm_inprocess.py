"""Engine around vLLM in the calling process, with weights passed by reference."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from threading import Condition, get_ident
from typing import Any

import torch

from torchrl_rloo.engines.base import (
    EngineDeadError,
    EngineError,
    EngineTimeoutError,
    InFlight,
    Request,
    Sample,
    check_in_flight,
)
from torchrl_rloo.engines.vllm_api import (
    adapter_request,
    engine_arguments,
    model_stop_ids,
    preserve_random_states,
    prompt_arguments,
    prompt_scores,
    require_vllm,
    sample_from_output,
    sampling_arguments,
    sampling_params,
    scoring_arguments,
    vllm_environment,
)
from torchrl_rloo.engines.vllm_base import VLLMEngineBase

RESUME_TIMEOUT_S = 600.0  # seconds that generate waits for resume()


class VLLMEngine(VLLMEngineBase):
    """Engine that samples with vLLM in this process, e.g. on the GPU that trains, or inside an actor.

    A process can have one live engine, because vLLM keeps its parallel state in globals. Calls from several threads run
    one after the other, so :meth:`pause` waits for a running :meth:`generate` for any ``in_flight``.

    Args:
        model: local directory or hub id, in Hugging Face format.
        **arguments: arguments of ``vllm.LLM``, e.g. ``dtype``, ``max_model_len``, ``gpu_memory_utilization``,
            ``enable_lora``, and ``enable_sleep_mode`` for :meth:`sleep` on a GPU.

    Raises:
        ImportError: if vLLM is not installed.
        ValueError: if the toolkit sets an argument itself.
        EngineError: if vLLM does not start, with its error.

    Example::

        with VLLMEngine("Qwen/Qwen2.5-0.5B-Instruct", dtype="bfloat16") as engine:
            (sample,) = engine.generate([Request(prompt=[1, 2, 3], limit=16, seed=0)])
    """

    in_process = True

    def __init__(self, model: str | PathLike, **arguments: Any):
        self._model, self._arguments = os.fspath(model), arguments
        self._turn = Condition()  # held by the thread that uses the engine
        self._paused_by: int | None = None  # ident of the thread that paused the engine
        self._start()

    def _start(self) -> None:
        # Restore torch.set_num_threads, which vLLM's CPU worker disables for the whole process
        set_num_threads = torch.set_num_threads
        with vllm_environment(own_process=False):
            require_vllm()
            from vllm import LLM

            arguments = engine_arguments(self._model, self._arguments)
            try:
                with preserve_random_states():
                    self.llm = LLM(**arguments)
            except Exception as error:
                raise EngineError(f"vLLM does not start with model={self._model!r}: {_text(error)}") from error
            finally:
                torch.set_num_threads = set_num_threads
        self._death: str | None = None
        self.stop_ids = model_stop_ids(self.llm.model_config)
        self.context_length = self.llm.model_config.max_model_len
        self.vocab_size = self.llm.model_config.get_vocab_size()
        self._stamp(0, timeout=60.0)

    @property
    def world_size(self) -> int:
        return self.llm.llm_engine.vllm_config.parallel_config.world_size

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        outputs = self._run(lambda: [(prompt_arguments(r), sampling_arguments(r)) for r in requests])
        return [sample_from_output(r, o) for r, o in zip(requests, outputs, strict=True)]

    def score(self, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        prompts = lambda: [({"prompt_token_ids": list(row)}, scoring_arguments(temperature)) for row in rows]  # noqa: E731
        return [prompt_scores(row, o.prompt_logprobs) for row, o in zip(rows, self._run(prompts), strict=True)]

    def _run(self, make: Callable[[], list[tuple[dict[str, Any], dict[str, Any]]]]) -> list[Any]:
        """Return vLLM's outputs for prompts and the arguments of their sampling parameters."""
        with self._turn:
            self._wait_until_resumed()
            self._check(ready=True)
            try:
                made = make()
                params = [sampling_params(arguments) for _, arguments in made]
                with preserve_random_states():
                    return self.llm.generate(
                        [prompt for prompt, _ in made], params, use_tqdm=False, lora_request=self._adapter
                    )
            except BaseException as error:
                # An engine that stopped between two steps cannot continue
                if self.llm.llm_engine.has_unfinished_requests():
                    self._death = _text(error)
                if isinstance(error, EngineError) or not isinstance(error, Exception):
                    raise
                kind, verb = (EngineDeadError, "failed when sampling") if self._death else (EngineError, "refused")
                raise kind(f"vLLM {verb}: {_text(error)}") from error

    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        check_in_flight(in_flight)
        with self._taken(timeout, "pause"):
            self._check()
            self._paused_by = get_ident()
            self._reset_cache()

    def resume(self) -> None:
        with self._turn:
            self._paused_by = None
            self._turn.notify_all()

    def sleep(self) -> None:
        with self._turn:
            self._check()
            if torch.cuda.is_available() and not self.asleep:  # vLLM cannot release memory on CPU
                self._try("sleep", self.llm.sleep, level=1)
            self.asleep = True

    def wake(self) -> None:
        with self._turn:
            self._check()
            if torch.cuda.is_available() and self.asleep:
                self._try("wake", self.llm.wake_up)
            self.asleep = False

    def check_health(self, timeout: float = 10.0) -> None:
        """Raise an ``EngineDeadError`` if sampling stopped between two steps, without waiting for a running batch."""
        self._check()

    def close(self) -> None:
        with self._turn:
            self.closed = True
            self._end()
            self._turn.notify_all()

    def restart(self) -> None:
        with self._turn:
            self._end()
            self._death = "restart() stopped it and has not started it yet"
            self._start()
            self.closed = False
            self._reset_to_checkpoint()

    def _end(self) -> None:
        if hasattr(self, "llm"):
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
            gc.collect()  # vLLM's model is part of reference cycles

    def _rpc(self, method: str, *args: Any, timeout: float) -> list:
        with self._taken(timeout, method):
            self._check()
            return self._try(method, self.llm.collective_rpc, method, args=args)

    def _stamp(self, version: int, timeout: float) -> None:
        with self._taken(timeout, "naming the weights"):
            self.llm.llm_engine.set_weight_version(str(version))
            self._reset_cache()

    def _load_adapter(self, path: str, version: int, timeout: float) -> None:
        with self._taken(timeout, "loading an adapter"):
            self._check()
            self._try("add_lora", self.llm.llm_engine.add_lora, adapter_request(path, new=True))
            self._adapter = adapter_request(path, new=False)

    def _reset_cache(self) -> None:
        self.llm.llm_engine.reset_encoder_cache()  # of images; in the other engines, a pause drops it
        if not self.llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not drop its prefix cache, so samples may be of old weights; call restart()")

    def _refusal(self, ready: bool) -> EngineError | None:
        if self._death is not None and not self.closed:
            return EngineDeadError(f"vLLM is dead: {self._death}; call restart()")
        return super()._refusal(ready)

    @contextmanager
    def _taken(self, timeout: float, what: str) -> Iterator[None]:
        if not self._turn.acquire(timeout=timeout):
            raise EngineTimeoutError(f"{what}: the engine was busy for longer than timeout={timeout} s")
        try:
            yield
        finally:
            self._turn.release()

    def _wait_until_resumed(self) -> None:
        if self._paused_by == get_ident():
            raise EngineError("this thread paused the engine and would wait for itself; call resume() first")
        if not self._turn.wait_for(lambda: self._paused_by is None or self.closed, timeout=RESUME_TIMEOUT_S):
            raise EngineTimeoutError(f"the engine has been paused for {RESUME_TIMEOUT_S} s; call resume()")

    def _try(self, what: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            raise EngineError(f"{what} failed in vLLM: {_text(error)}") from error


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

"""Settings, requests and outputs of vLLM, and VLLMEngineBase: the one place that knows vLLM's names."""

from __future__ import annotations

import logging
import os
import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np
import torch

from torchrl_rloo.engines.base import (
    Engine,
    EngineDeadError,
    EngineError,
    EngineTimeoutError,
    InFlight,
    Request,
    Sample,
    WeightStep,
)

WORKER = "torchrl_rloo.engines.vllm_worker.WeightWorker"
CHILD_WORKER = "torchrl_rloo.engines.vllm_child.ChildWorker"
BACKEND = "torchrl_rloo"
TRAINER_PID = "TORCHRL_RLOO_TRAINER_PID"  # an environment variable for the processes that an engine starts
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # by its name, "uni", it starts one more process on CPU
SERVER_VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
PAUSE_MODES: dict[InFlight, str] = {"finish": "wait", "abort": "abort", "continue": "keep"}

# Warnings of vLLM without meaning here, by logger: of layers that have no weights, at each update; of a thread count
# that does not change.
NOISE = {
    "vllm.model_executor.model_loader.reload.layerwise": "Failed to load weights",
    "vllm.v1.worker.cpu_worker": "torch.set_num_threads",
}

MIN_TEMPERATURE = 0.01  # vLLM's, above 0

_SET_HERE = {"logprobs_mode", "worker_extension_cls", "weight_transfer_config"}
_FINISH = {"stop": "stop", "length": "length", "abort": "abort", "error": "abort"}

# Environment variables that vLLM reads at import and when it starts a process. A user's own values win.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
_ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads bound to cores starve when several engines share them
    "TORCHDYNAMO_DISABLE": "1",  # a compiled function of the sampler costs 20 s at the first call, and gains nothing
}


def process_variables(own_process: bool, threads: int | None = None) -> dict[str, str]:
    """Return the environment variables that vLLM requires and that are not set.

    Args:
        own_process: whether the engine runs in its own process.
        threads: OpenMP threads of that process, overriding the current value; None leaves it to torch.
    """
    wanted = _ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_process))}
    if not torch.cuda.is_available():
        wanted |= _ON_CPU
    if own_process:
        wanted |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # a fork of a process with threads may hang
    wanted = {name: value for name, value in wanted.items() if name not in os.environ}
    if own_process and threads is not None:
        wanted["OMP_NUM_THREADS"] = str(threads)
    return wanted


@contextmanager
def vllm_environment(own_process: bool, threads: int | None = None, **more: str) -> Iterator[None]:
    """Set :func:`process_variables` and ``more`` while vLLM is imported or starts its processes."""
    wanted = process_variables(own_process, threads) | more
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def silence_noise() -> None:
    """Drop the messages of :data:`NOISE` in this process."""
    for name, words in NOISE.items():
        logger = logging.getLogger(name)
        if not logger.filters:
            logger.addFilter(lambda record, words=words: words not in record.msg)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch afterwards: vLLM seeds and uses them."""
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def require_vllm() -> None:
    """Import vLLM; call it within :func:`vllm_environment`.

    Raises:
        ImportError: with the extra to install.
    """
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "this engine needs vllm: pip install 'torchrl_rloo[vllm]' for GPUs; the README says how on CPU"
        ) from error


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the arguments of a vLLM engine: log-probs of the sampled distribution, and weights from an updater.

    Raises:
        ValueError: for an argument that the toolkit sets itself.
    """
    if clash := sorted(_SET_HERE & set(arguments)):
        raise ValueError(f"{clash[0]} is set by the toolkit and cannot be {arguments[clash[0]]!r}: remove it")
    defaults = {
        "logprobs_mode": "processed_logprobs",  # of the sampled distribution, not of the plain softmax
        "worker_extension_cls": WORKER,
        "weight_transfer_config": {"backend": BACKEND},
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if not torch.cuda.is_available():
        defaults |= {
            "enforce_eager": True,
            "block_size": 32,
            "kv_cache_memory_bytes": 256 << 20,
            "enable_chunked_prefill": False,  # it kills the engine for a seeded request: a CPU generator cannot rewind
        }
    return defaults | dict(arguments)


def engine_arguments(model: str | PathLike, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return :func:`plain_arguments` as vLLM's classes take them.

    Raises:
        ValueError: for an argument that the toolkit sets itself.
    """
    from vllm.config import WeightTransferConfig

    plain = plain_arguments(arguments)
    return plain | {
        "model": os.fspath(model),
        "weight_transfer_config": WeightTransferConfig(**plain["weight_transfer_config"]),
    }


def stop_ids_of(model_config: Any) -> tuple[int, ...]:
    """Return the ids that end a turn according to the model's generation config."""
    ids = model_config.try_get_generation_config().get("eos_token_id")
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def adapter_request(path: str, new: bool) -> Any:
    """Return vLLM's name of the engine's LoRA adapter.

    There is one adapter under one name, replaced in place, so that frozen requests go on with the new one. The caller
    drops everything cached of the old one.

    Args:
        path: directory of the adapter.
        new: whether to load it now; False to sample with it.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, path, load_inplace=new)


def sampling_arguments(request: Request) -> dict[str, Any]:
    """Return a request as arguments of vLLM's ``SamplingParams``, also accepted by its server.

    Raises:
        EngineError: for distributions that vLLM samples differently from the scorer: min-p with top-p, which it applies
            in the other order, and a temperature below 0.01, which it raises to 0.01.
    """
    d = request.distribution
    if 0 < d.temperature < MIN_TEMPERATURE:
        raise EngineError(f"temperature={d.temperature} would be raised to {MIN_TEMPERATURE} by vLLM: set 0 for greedy")
    if d.min_p > 0 and d.top_p < 1:
        raise EngineError(
            f"vLLM truncates by min_p={d.min_p} before top_p={d.top_p}, the scorer after it: set only one of the two"
        )
    return {
        "max_tokens": request.limit,
        "seed": request.seed,
        "temperature": d.temperature,
        "top_k": d.top_k or 0,
        "top_p": d.top_p,
        "min_p": d.min_p,
        "repetition_penalty": d.repetition_penalty,
        "stop_token_ids": list(request.stop_ids),
        "stop": list(request.stop_strings),
        "ignore_eos": True,  # the ids that end a turn are all in stop_token_ids
        "detokenize": bool(request.stop_strings),
        "skip_special_tokens": False,  # a stop string may be one
        "spaces_between_special_tokens": False,
        "logprobs": 0,  # of the sampled token only
    }


def sample_of(request: Request, output: Any) -> Sample:
    """Convert a finished ``CompletionOutput`` of vLLM."""
    tokens = list(output.token_ids)
    log_probs = [entry[token].logprob for entry, token in zip(output.logprobs or (), tokens, strict=True)]
    spans = [(s.version, s.start, s.end) for s in output.weight_versions or ()]
    return _sample(request, tokens, log_probs, output.finish_reason, spans)


def sample_of_reply(request: Request, choice: Mapping[str, Any]) -> Sample:
    """Convert a choice in the reply of vLLM's server."""
    log_probs = [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or ()]
    spans = [(s["version"], s["start"], s["end"]) for s in choice["weight_versions"] or ()]
    return _sample(request, choice["token_ids"] or [], log_probs, choice["finish_reason"], spans)


def _sample(
    request: Request, tokens: list[int], log_probs: list[float], finish: str, spans: list[tuple[str, int, int]]
) -> Sample:
    if request.distribution.temperature == 0:
        log_probs = [0.0] * len(tokens)  # vLLM's are of the softmax at temperature 1 there
    unknown = [name for name, _, _ in spans if not name.isdecimal()]
    if unknown:
        raise EngineDeadError(f"the engine was restarted: its weights are {unknown[0]!r}, not of a policy version")
    versions = [int(name) for name, start, end in spans for _ in range(start, end)]
    if not len(tokens) == len(log_probs) == len(versions):
        raise EngineError(
            f"vLLM returned {len(tokens)} tokens with {len(log_probs)} log-probs and {len(versions)} versions"
        )
    return Sample(tokens, log_probs, _FINISH[finish], versions)


class VLLMEngineBase(Engine):
    """Common part of vLLM engines: weight updates as calls of their workers."""

    _staged = True
    _adapter_failed = False  # if failed_version is set: whether only the adapter is in doubt, and the weights are whole
    _adapter: Any = None  # names the adapter in requests; None samples with the weights only

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of workers of the engine; each takes part in an update."""

    @abstractmethod
    def _rpc(self, method: str, *args: Any, timeout: float) -> list:
        """Call a method of every worker, and return the results."""

    @abstractmethod
    def _stamp(self, version: int, timeout: float) -> None:
        """Name the current weights in further outputs, and drop everything cached of other weights."""

    @abstractmethod
    def _load_adapter(self, path: str, version: int, timeout: float) -> None:
        """Load a LoRA adapter, and sample with it from now on."""

    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        info = dict(info or {})
        if self.asleep and step != "abort":  # writing to freed GPU memory would end the process
            raise self._refusal(ready=True)
        if step == "connect":
            self._staged = info["staged"]
            return self._rpc("init_weight_transfer_engine", info, timeout=timeout)
        if step == "start":
            if not self._staged:
                self.failed_version, self._adapter_failed = info["version"], False
            return self._rpc("start_weight_update", timeout=timeout)
        if step == "bucket":
            return self._rpc("update_weights", info, timeout=timeout)
        if step == "abort":
            return self._rpc("abort_weight_update", timeout=timeout)
        if step == "adapter":
            self._take_adapter(info, timeout)
            return [{"version": self.version, "checksums": [info["checksum"]]}]
        self.failed_version, self._adapter_failed = info["version"], False
        self._rpc("finish_weight_update", timeout=timeout)
        reports = self._rpc("weight_report", timeout=timeout)
        if wrong := [report for report in reports if report["version"] != info["version"]]:
            raise EngineError(f"a worker was sent version {wrong[0]['version']}, but finish is of {info['version']}")
        self._adapter = None  # a reload of the weights drops all adapters
        self._stamp(info["version"], timeout)
        self.version, self.failed_version = info["version"], None
        return reports

    def _take_adapter(self, info: Mapping[str, Any], timeout: float) -> None:
        if self.failed_version is not None and not self._adapter_failed:  # an adapter does not repair the weights
            raise self._refusal(ready=True)
        self._rpc("check_adapter", info["path"], info["checksum"], timeout=timeout)
        before = self.failed_version
        self.failed_version, self._adapter_failed = info["version"], True
        try:
            self._load_adapter(info["path"], info["version"], timeout)
        except EngineError as error:
            if not isinstance(error, EngineTimeoutError):  # a late one may still replace the old one
                self.failed_version = before
            raise
        self._stamp(info["version"], timeout)
        self.version, self.failed_version = info["version"], None

    def _reset_to_checkpoint(self) -> None:
        """Count a restart, and forget everything sent before it."""
        self.start_count += 1
        self.version, self.failed_version, self._adapter, self._staged = 0, None, None, True
        self.asleep = False

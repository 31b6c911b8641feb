"""The one place that knows vLLM's names: settings, requests, outputs."""

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

from torchrl_rloo.modules.engines.base import (
    Engine,
    EngineDeadError,
    EngineError,
    EngineTimeoutError,
    InFlight,
    Request,
    Sample,
    WeightStep,
)

RECEIVER = "torchrl_rloo.modules.engines.weight_worker.WeightReceiver"
CHILD_RECEIVER = "torchrl_rloo.modules.engines.vllm_child.ChildReceiver"
BACKEND = "torchrl_rloo"
TRAINER_PID = "TORCHRL_RLOO_TRAINER_PID"  # an environment variable for the processes that an engine starts
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # by its name, "uni", it starts one more process on CPU
SERVER_VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
PAUSE_MODES: dict[InFlight, str] = {"finish": "wait", "abort": "abort", "continue": "keep"}

# Loggers of vLLM whose warnings say nothing, and the words of them: of layers that have no weights, at each update;
# of a thread count that stays as it is.
NOISE = {
    "vllm.model_executor.model_loader.reload.layerwise": "Failed to load weights",
    "vllm.v1.worker.cpu_worker": "torch.set_num_threads",
}

MIN_TEMPERATURE = 0.01  # vLLM's, above 0

_SET_HERE = {"logprobs_mode", "worker_extension_cls", "weight_transfer_config"}
_FINISH = {"stop": "stop", "length": "length", "abort": "abort", "error": "abort"}

# What vLLM reads from the environment when it is imported or starts a process. A user's own values stay.
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
    """Environment variables that vLLM wants and that have no value yet.

    Args:
        own_process: whether the engine runs in a process of its own.
        threads: OpenMP threads of that process, whatever the present value; None leaves it to torch.
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
    """:func:`process_variables`, and ``more``, while vLLM is imported or starts its processes; then as before."""
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
    """Drops :data:`NOISE` in this process."""
    for name, words in NOISE.items():
        logger = logging.getLogger(name)
        if not logger.filters:
            logger.addFilter(lambda record, words=words: words not in record.msg)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Gives the generators of Python, NumPy and torch their states back: vLLM seeds them, and draws from them."""
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def require_vllm() -> None:
    """Imports vLLM, within :func:`vllm_environment`.

    Raises:
        ImportError: that names the extra to install.
    """
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "this engine needs vllm: pip install 'torchrl_rloo[vllm]' for GPUs; the README says how on CPU"
        ) from error


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a vLLM engine whose log-probs are of what it samples, and that takes weights from an updater.

    Raises:
        ValueError: for an argument that the toolkit sets itself.
    """
    if clash := sorted(_SET_HERE & set(arguments)):
        raise ValueError(f"{clash[0]} is set by the toolkit and cannot be {arguments[clash[0]]!r}: leave it out")
    defaults = {
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled, not of the plain softmax
        "worker_extension_cls": RECEIVER,
        "weight_transfer_config": {"backend": BACKEND},
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if not torch.cuda.is_available():
        defaults |= {
            "enforce_eager": True,
            "block_size": 32,
            "kv_cache_memory_bytes": 256 << 20,
            "enable_chunked_prefill": False,  # of a seeded request it ends the engine: a CPU's generator cannot go back
        }
    return defaults | dict(arguments)


def engine_arguments(model: str | PathLike, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """:func:`plain_arguments` as vLLM's classes take them.

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
    """Ids that end a turn by the model's generation config."""
    ids = model_config.try_get_generation_config().get("eos_token_id")
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def adapter_request(path: str, new: bool) -> Any:
    """What names the engine's LoRA adapter to vLLM.

    It is one adapter under one name, replaced in place, so that requests that a pause froze go on with the new one.
    What is cached of the old one has to be dropped.

    Args:
        path: its directory.
        new: whether to load it now; to sample with, it is not.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, path, load_inplace=new)


def sampling_arguments(request: Request) -> dict[str, Any]:
    """A request as the arguments of vLLM's ``SamplingParams``, which its server takes too.

    Raises:
        EngineError: for what vLLM would sample from otherwise than the scorer: min-p together with top-p, which it
            applies in the other order, and a temperature below 0.01, which it raises.
    """
    d = request.distribution
    if 0 < d.temperature < MIN_TEMPERATURE:
        raise EngineError(f"temperature={d.temperature} would be raised to {MIN_TEMPERATURE} by vLLM: set 0 for greedy")
    if d.min_p > 0 and d.top_p < 1:
        raise EngineError(
            f"vLLM truncates by min_p={d.min_p} before top_p={d.top_p}, the scorer after it: leave one of the two out"
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
        "logprobs": 0,  # of the sampled token alone
    }


def sample_of(request: Request, output: Any) -> Sample:
    """A finished ``CompletionOutput`` of vLLM as a :class:`Sample`."""
    tokens = list(output.token_ids)
    log_probs = [entry[token].logprob for entry, token in zip(output.logprobs or (), tokens, strict=True)]
    spans = [(s.version, s.start, s.end) for s in output.weight_versions or ()]
    return _sample(request, tokens, log_probs, output.finish_reason, spans)


def sample_of_reply(request: Request, choice: Mapping[str, Any]) -> Sample:
    """A choice in the reply of vLLM's server as a :class:`Sample`."""
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
        raise EngineDeadError(f"the engine was started anew: its weights are {unknown[0]!r}, not of a policy version")
    versions = [int(name) for name, start, end in spans for _ in range(start, end)]
    if not len(tokens) == len(log_probs) == len(versions):
        raise EngineError(
            f"vLLM returned {len(tokens)} tokens with {len(log_probs)} log-probs and {len(versions)} versions"
        )
    return Sample(tokens, log_probs, _FINISH[finish], versions)


class VLLMEngineBase(Engine):
    """What vLLM engines share, wherever they run: readiness, and weight updates as calls of their workers."""

    _staged = True
    _torn_by_adapter = False  # if it is torn: whether its weights are whole, and the adapter is one or the other
    _adapter: Any = None  # what requests name to be sampled with the adapter; None samples with the weights alone

    @property
    @abstractmethod
    def world_size(self) -> int:
        """How many workers the engine has: each takes part in an update."""

    @abstractmethod
    def _rpc(self, method: str, *args: Any, timeout: float) -> list:
        """Calls a method of every worker, and returns their results."""

    @abstractmethod
    def _stamp(self, version: int, timeout: float) -> None:
        """Names the weights in force, for the outputs to come, and drops what is cached of other weights."""

    @abstractmethod
    def _load_adapter(self, path: str, version: int, timeout: float) -> None:
        """Loads a LoRA adapter and samples with it from now on."""

    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        info = dict(info or {})
        if self.asleep and step != "abort":  # a GPU's memory is gone then, and writing to it ends the process
            raise self._refusal(ready=True)
        if step == "connect":
            self._staged = info["staged"]
            return self._rpc("init_weight_transfer_engine", info, timeout=timeout)
        if step == "start":
            if not self._staged:
                self.torn, self._torn_by_adapter = info["version"], False
            return self._rpc("start_weight_update", timeout=timeout)
        if step == "bucket":
            return self._rpc("update_weights", info, timeout=timeout)
        if step == "abort":
            return self._rpc("abort_weight_update", timeout=timeout)
        if step == "adapter":
            self._take_adapter(info, timeout)
            return [{"version": self.version, "checksums": [info["checksum"]]}]
        self.torn, self._torn_by_adapter = info["version"], False
        self._rpc("finish_weight_update", timeout=timeout)
        reports = self._rpc("weight_report", timeout=timeout)
        if wrong := [report for report in reports if report["version"] != info["version"]]:
            raise EngineError(f"a worker was sent version {wrong[0]['version']}, but finish is of {info['version']}")
        self._adapter = None  # a reload of the weights drops all adapters
        self._stamp(info["version"], timeout)
        self.version, self.torn = info["version"], None
        return reports

    def _take_adapter(self, info: Mapping[str, Any], timeout: float) -> None:
        if self.torn is not None and not self._torn_by_adapter:  # no adapter mends the weights
            raise self._refusal(ready=True)
        self._rpc("check_adapter", info["path"], info["checksum"], timeout=timeout)
        before = self.torn
        self.torn, self._torn_by_adapter = info["version"], True
        try:
            self._load_adapter(info["path"], info["version"], timeout)
        except EngineError as error:
            if not isinstance(error, EngineTimeoutError):  # one that is late may yet come, in place of the old one
                self.torn = before
            raise
        self._stamp(info["version"], timeout)
        self.version, self.torn = info["version"], None

    def _started_anew(self) -> None:
        """Forgets what an engine before had been given."""
        self.incarnation += 1
        self.version, self.torn, self._adapter, self._staged = 0, None, None, True
        self.asleep = False

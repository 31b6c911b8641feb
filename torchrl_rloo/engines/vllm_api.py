"""Settings, requests and outputs of vLLM."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchrl_rloo.engines.base import (
    EngineDeadError,
    EngineError,
    InFlight,
    Request,
    Sample,
)
from torchrl_rloo.functional.sampling import NEVER
from torchrl_rloo.images.store import ImageStore

if TYPE_CHECKING:
    from PIL import Image

WORKER = "torchrl_rloo.engines.vllm_worker.WeightWorker"
BACKEND = "torchrl_rloo"
ERROR_LOG = "TORCHRL_RLOO_ERROR_LOG"  # environment variable of a child: the file for its errors
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # its short name, "uni", starts one more process on CPU
SERVER_VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
PAUSE_MODES: dict[InFlight, str] = {"finish": "wait", "abort": "abort", "continue": "keep"}

# Warnings of vLLM that mean nothing here, by logger. The first is of layers without weights, at each update. The second
# is of a thread count that does not change
SILENCED_WARNINGS = {
    "vllm.model_executor.model_loader.reload.layerwise": "Failed to load weights",
    "vllm.v1.worker.cpu_worker": "torch.set_num_threads",
}

_INITIAL_VERSION = "default"  # vLLM's name of the weights that it started with
MIN_TEMPERATURE = 0.01  # vLLM's minimum above 0

_REPLICAS = "data_parallel_size"
_SET_HERE = {"logprobs_mode", "worker_extension_cls", "weight_transfer_config", "mm_processor_kwargs"}
_SET_HERE.add("structured_outputs_config")
_FINISH = {"stop": "stop", "length": "length", "abort": "abort", "error": "abort"}

# Environment variables that vLLM reads at import and when it starts a process. Values that the user set have priority
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
_ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads bound to cores starve when several engines share them
    "TORCHDYNAMO_DISABLE": "1",  # a compiled function of the sampler costs 20 s at the first call, and gains nothing
}
# glibc returns large freed blocks to the system, and the first touch of a new one takes longer than a copy into it
KEPT_MEMORY = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 40))


def process_variables(own_process: bool, threads: int | None = None) -> dict[str, str]:
    """Return the environment variables that vLLM requires and that are not set.

    ``threads`` is the number of OpenMP threads of an own process, which replaces the current one; None leaves it.
    """
    wanted = _ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_process))}
    if not torch.cuda.is_available():
        wanted |= _ON_CPU | (KEPT_MEMORY if own_process else {})
    if own_process:
        wanted |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # a fork of a process with threads may hang
    wanted = {name: value for name, value in wanted.items() if name not in os.environ}
    if own_process and threads is not None:
        wanted["OMP_NUM_THREADS"] = str(threads)
    return wanted


@contextmanager
def vllm_environment(own_process: bool, threads: int | None = None, **more: str) -> Iterator[None]:
    """Set :func:`process_variables` and ``more`` within the context, in which vLLM is imported or starts processes."""
    wanted = process_variables(own_process, threads) | more
    previous = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def silence_noise() -> None:
    """Drop the messages of :data:`SILENCED_WARNINGS` in this process."""
    for name, words in SILENCED_WARNINGS.items():
        logger = logging.getLogger(name)
        if not logger.filters:
            logger.addFilter(lambda record, words=words: words not in record.msg)


@contextmanager
def preserve_random_states() -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch after the context, since vLLM seeds and uses them."""
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def require_vllm() -> None:
    """Import vLLM, or raise an ImportError that says how to install it. Call it within :func:`vllm_environment`."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "this engine requires vllm; run pip install 'torchrl_rloo[vllm]' for GPUs, or see the README for CPU"
        ) from error


def complete_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the arguments of a vLLM engine, whose log-probs must be of the sampled distribution."""
    if clash := sorted(_SET_HERE & set(arguments)):
        raise ValueError(f"{clash[0]} is set by the toolkit and cannot be {arguments[clash[0]]!r}; remove it")
    if arguments.get("enable_return_routed_experts"):
        raise ValueError("enable_return_routed_experts=True has no effect: no scorer replays these routes; remove it")
    for name, value in arguments.items():
        if name.startswith("data_parallel") and value not in (None, False) and (name, value) != (_REPLICAS, 1):
            raise ValueError(
                f"{name}={value!r} is not supported, since weights would be confirmed by one replica only; make one "
                "engine per replica and put them in an EnginePool"
            )
    # Settings that the loss and the updater require, and fewer messages
    defaults = {
        "logprobs_mode": "processed_logprobs",  # log-probs of the sampled distribution, not of the plain softmax
        "worker_extension_cls": WORKER,
        "weight_transfer_config": {"backend": BACKEND},
        "structured_outputs_config": {"backend": "xgrammar"},  # the scorer's
        "mm_processor_kwargs": {"use_fast": False},  # images are read with PIL, as the trainer does
        "mm_processor_cache_gb": 1,  # of images in each of two processes; a group sends its images within seconds
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    # Settings for the CPU backend, whose cache shares the machine's memory
    if not torch.cuda.is_available():
        defaults |= {
            "enforce_eager": True,
            "block_size": 32,
            "kv_cache_memory_bytes": 256 << 20,
            "enable_chunked_prefill": False,  # a seeded request would kill the engine: a CPU generator cannot rewind
        }
    return defaults | dict(arguments)


def engine_arguments(model: str | PathLike, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return :func:`complete_arguments` in the form that vLLM's classes take."""
    from vllm.config import StructuredOutputsConfig, WeightTransferConfig

    plain = complete_arguments(arguments)
    return plain | {
        "model": os.fspath(model),
        "structured_outputs_config": StructuredOutputsConfig(**plain["structured_outputs_config"]),
        "weight_transfer_config": WeightTransferConfig(**plain["weight_transfer_config"]),
    }


def model_stop_ids(model_config: Any) -> tuple[int, ...]:
    """Return the ids that end a turn according to the model's generation config."""
    ids = model_config.try_get_generation_config().get("eos_token_id")
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def adapter_request(path: str, new: bool) -> Any:
    """Return vLLM's ``LoRARequest`` for the engine's adapter, which loads it if ``new``, and samples with it if not.

    There is one adapter under one name. It is replaced in place, so that frozen requests continue with the new one. The
    caller drops everything cached of the old one.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, path, load_inplace=new)


def sampling_arguments(request: Request) -> dict[str, Any]:
    """Return a request as arguments of vLLM's ``SamplingParams``, which its server also accepts.

    It refuses settings for which vLLM would sample another distribution than the scorer's. vLLM applies min-p and top-p
    in the other order, and raises a temperature below 0.01 to 0.01.
    """
    d = request.distribution
    # Refuse settings that vLLM applies differently
    if 0 < d.temperature < MIN_TEMPERATURE:
        raise EngineError(
            f"temperature={d.temperature} must be 0 or at least {MIN_TEMPERATURE}, to which vLLM would raise it; set 0 "
            "for greedy sampling"
        )
    if d.min_p > 0 and d.top_p < 1:
        raise EngineError(
            f"vLLM truncates by min_p={d.min_p} before top_p={d.top_p}, the scorer after it; set only one of the two"
        )
    return {
        "max_tokens": request.limit,
        "seed": request.seed,
        "temperature": d.temperature,
        "top_k": d.top_k or 0,
        "top_p": d.top_p,
        "min_p": d.min_p,
        "repetition_penalty": d.repetition_penalty,
        "presence_penalty": d.presence_penalty,
        "frequency_penalty": d.frequency_penalty,
        "min_tokens": min(d.min_new_tokens, request.limit),
        "bad_words": list(d.bad_words),
        "structured_outputs": None if d.structured is None else dict([d.structured]),
        "stop_token_ids": list(request.stop_ids),
        "stop": list(request.stop_strings),
        "ignore_eos": True,  # stop_token_ids has all ids that end a turn
        "detokenize": bool(request.stop_strings),
        "skip_special_tokens": False,  # a stop string may be a special token
        "spaces_between_special_tokens": False,
        "logprobs": 0,  # return the sampled token's only
        # The scorer's value, whose probability is exactly 0. vLLM adds it before all other steps but the penalty
        "logit_bias": dict(d.logit_bias) | dict.fromkeys(d.excluded, NEVER) or None,
    }


def sampling_params(arguments: Mapping[str, Any], **more: Any) -> Any:
    """Return vLLM's ``SamplingParams`` of :func:`sampling_arguments` or :func:`scoring_arguments`."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if (grammar := arguments.get("structured_outputs")) is not None:
        more["structured_outputs"] = StructuredOutputsParams(**grammar)
    return SamplingParams(**arguments | more)


def scoring_arguments(temperature: float) -> dict[str, Any]:
    """Return arguments of ``SamplingParams`` that score a prompt, which vLLM does at temperature 1 only."""
    if temperature != 1:
        raise EngineError(
            f"temperature={temperature} must be 1: vLLM returns log-probs of prompts without a temperature; score with "
            "a TransformersEngine"
        )
    return {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}


def prompt_scores(row: Sequence[int], entries: Sequence[Mapping[Any, Any] | None]) -> list[float]:
    """Return the log-probs of a row's ids from vLLM's entries by id, of objects or of JSON; 0 for the first."""
    found = [entry.get(token) or entry[str(token)] for token, entry in zip(row[1:], entries[1:], strict=True)]
    return [0.0, *(one["logprob"] if isinstance(one, dict) else one.logprob for one in found)]


def short_prompt(request: Request) -> list[int]:
    """Return the prompt as vLLM takes it, which replaces a placeholder by the tokens of each image."""
    prompt, done = [], 0
    for image in request.images:
        prompt += [*request.prompt[done : image.start], *image.placeholder]
        done = image.stop
    return [*prompt, *request.prompt[done:]]


def prompt_arguments(request: Request) -> dict[str, Any]:
    """Return the prompt of a request with its images, in the form that vLLM's classes take."""
    prompt: dict[str, Any] = {"prompt_token_ids": short_prompt(request)}
    if request.images:
        prompt["multi_modal_data"] = {"image": load_images(request)}
    return prompt


def load_images(request: Request) -> list[Image.Image]:
    """Return the images of a request as the trainer sees them."""
    return [ImageStore(Path(image.path).parent).load(image.path) for image in request.images]


def check_prompt(request: Request, ids: Sequence[int] | None) -> None:
    """Raise an EngineError unless vLLM sampled after the ids of the request, to which it expanded the images itself."""
    if request.images and list(ids or ()) != list(request.prompt):
        raise EngineError(
            f"vLLM expanded the {len(request.images)} images of a prompt to {len(ids or ())} ids, which differ from "
            f"the {len(request.prompt)} ids that are trained on; use the image processor and tokenizer of the model"
        )


def sample_from_output(request: Request, finished: Any) -> Sample:
    """Convert a finished ``RequestOutput`` of vLLM to a sample, unless its weights have no policy version."""
    check_prompt(request, finished.prompt_token_ids)
    output = finished.outputs[0]
    tokens = list(output.token_ids)
    log_probs = [entry[token].logprob for entry, token in zip(output.logprobs or (), tokens, strict=True)]
    spans = [(s.version, s.start, s.end) for s in output.weight_versions or ()]
    return _sample(request, tokens, log_probs, output.finish_reason, spans)


def sample_from_reply(request: Request, reply: Mapping[str, Any]) -> Sample:
    """Convert the reply of vLLM's server to a sample, unless its weights have no policy version."""
    check_prompt(request, reply.get("prompt_token_ids"))
    choice = reply["choices"][0]
    log_probs = [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or ()]
    spans = [(s["version"], s["start"], s["end"]) for s in choice["weight_versions"] or ()]
    return _sample(request, choice["token_ids"] or [], log_probs, choice["finish_reason"], spans)


def _sample(
    request: Request, tokens: list[int], log_probs: list[float], finish: str, spans: list[tuple[str, int, int]]
) -> Sample:
    if request.distribution.temperature == 0:
        log_probs = [0.0] * len(tokens)  # vLLM returns log-probs of the softmax at temperature 1
    unknown = [name for name, _, _ in spans if not name.isdecimal()]
    if unknown and unknown[0] == _INITIAL_VERSION:
        raise EngineDeadError(
            f"the engine was restarted: its weights are {unknown[0]!r}, not a policy version; call restart()"
        )
    if unknown:
        raise EngineError(
            f"another client named the engine's weights {unknown[0]!r}, which is no policy version; push weights again"
        )
    versions = [int(name) for name, start, end in spans for _ in range(start, end)]
    return Sample(tokens, log_probs, _FINISH.get(finish, finish), versions)

"""Helpers of the GPU suite: devices, timers, peak memory, models of published shapes with random weights, rows."""

from __future__ import annotations

import gc
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the helpers of all benchmarks

from common import word_tokenizer  # noqa: E402

# Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv 2505.09388) and Gemma 3 (arXiv 2503.19786); all tie their embeddings
_NAMES = (
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim"
).split()
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_NAMES, shape, strict=True))
    for name, shape in {
        "tiny": ("qwen2", 512, 64, 128, 2, 4, 2, 16),
        "tiny-qwen3": ("qwen3", 512, 64, 128, 2, 4, 2, 32),
        "0.5B": ("qwen2", 151_936, 896, 4864, 24, 14, 2, 64),
        "1.5B": ("qwen2", 151_936, 1536, 8960, 28, 12, 2, 128),
        "qwen3-0.6B": ("qwen3", 151_936, 1024, 3072, 28, 16, 8, 128),
        "qwen3-4B": ("qwen3", 151_936, 2560, 9728, 36, 32, 8, 128),
        "gemma3-270M": ("gemma3_text", 262_144, 640, 2048, 18, 4, 1, 256),
    }.items()
}
SHAPES["gemma3-270M"]["sliding_window"] = 512
# Dense bfloat16 operations per second of the data sheets, by a part of the device's name
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
PACKAGES = ("torch", "triton", "transformers", "torchrl", "tensordict", "trl", "vllm", "liger_kernel", "peft")


@dataclass(frozen=True)
class Setup:
    """Settings of a part.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        tiny: True takes sizes for a CPU, which show only that the part runs.
        keep: called with the results so far, which outlive a part that is stopped.
    """

    device: str
    tiny: bool
    keep: Callable[[dict[str, Any]], None] = lambda results: None

    @property
    def dtype(self) -> torch.dtype:
        """Data type of weights and activations: bfloat16 on GPUs."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def pick(self, full: Any, tiny: Any) -> Any:
        """Return the value for the full sizes or the tiny ones."""
        return tiny if self.tiny else full


def environment(device: str) -> dict[str, Any]:
    """Return the device, the versions of the packages and the machine."""
    found: dict[str, Any] = {"device": device, "python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return found


def synchronize(device: str) -> None:
    """Wait for the work of the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def clear(device: str) -> None:
    """Free unused memory of a GPU, and start a new measurement of the peak."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed_ms(function: Callable[[], Any], setup: Setup, warmup: int = 3, repeats: int = 10) -> float:
    """Return the median milliseconds of ``repeats`` calls after ``warmup`` others, by CUDA events on a GPU."""
    if setup.tiny:
        warmup, repeats = 1, 2
    for _ in range(warmup):
        function()
    synchronize(setup.device)
    times = []
    for _ in range(repeats):
        if setup.device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            function()
            times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def peak_bytes(function: Callable[[], Any], device: str) -> int | None:
    """Return the bytes that a call allocates at its peak beyond those allocated before; None on a CPU."""
    if device != "cuda":
        function()
        return None
    clear(device)
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def matmul_flops(setup: Setup) -> float:
    """Measure the operations per second of a large product of random matrices."""
    n = setup.pick(8192, 256)
    a, b = (torch.randn(n, n, device=setup.device, dtype=setup.dtype) for _ in range(2))
    return 2 * n**3 / (timed_ms(lambda: a @ b, setup) / 1000)


def peak_flops(setup: Setup) -> float:
    """Return dense bfloat16 operations per second of the data sheet, or of a product if the table lacks the device."""
    name = torch.cuda.get_device_name(0) if setup.device == "cuda" else ""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None) or matmul_flops(setup)


def build_config(size: str):
    """Build the configuration of a model of :data:`SHAPES`, which stops at no id that it can sample."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        **SHAPES[size],
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SHAPES[size]["vocab_size"],  # of word_tokenizer
        pad_token_id=0,
    )


def build_model(size: str, setup: Setup, dtype: torch.dtype | None = None):
    """Build a model with random weights on the device, in evaluation mode; None takes the data type of the setup."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(setup.device):
        return AutoModelForCausalLM.from_config(build_config(size), dtype=dtype or setup.dtype).eval()


def build_tokenizer(size: str):
    """Build the tokenizer of a model's vocabulary, whose end-of-turn id the model cannot sample."""
    return word_tokenizer(SHAPES[size]["vocab_size"])


def random_rows(lengths: Sequence[tuple[int, int]], vocab_size: int, group: int = 1):
    """Build rows of random ids on the CPU, as a replay buffer holds them.

    Args:
        lengths: tokens of the prompt and of the completion of each row.
        vocab_size: number of ids.
        group: rows that share a prompt.
    """
    from tensordict import TensorDict

    from torchrl_rloo.data import keys, stack_rows

    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocab_size, (p,), generator=generator) for p, _ in lengths[::group]]
    rows = []
    for number, (_, completion) in enumerate(lengths):
        prompt = prompts[number // group]
        ids = torch.cat([prompt, torch.randint(vocab_size, (completion,), generator=generator)])
        actions = torch.arange(len(ids)) >= len(prompt)
        row = {
            keys.TOKENS: ids,
            keys.ACTION_MASK: actions,
            keys.ATTENTION_MASK: torch.ones_like(actions),
            keys.LOG_PROBS: torch.where(actions, -math.log(vocab_size), 0.0),
            keys.ADVANTAGE: torch.randn(1, 1, generator=generator),
        }
        rows.append(TensorDict(row))
    return stack_rows(rows)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ``|found - expected| / |expected|`` in float64."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; return ``{"error": ...}`` instead if it fails, e.g. out of memory, so that others still run."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:500]}"}

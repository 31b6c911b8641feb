"""Part ``training``: model FLOPs utilization of the packed training pass, by two conventions, its waits and kernels.

:mod:`flops` has both formulas: ``mfu`` is of ``useful_flops``, ``mfu_6n`` of ``flops_6n``.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from typing import Any

import torch
from flops import flops_6n, read_matrices, useful_flops
from measure import (
    SHAPES,
    Setup,
    attempt,
    build_model,
    build_tokenizer,
    clear,
    matmul_flops,
    peak_bytes,
    peak_flops,
    random_rows,
    timed_ms,
)

from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.training import accumulate, optimizer_step

PROMPT = 128
KERNELS = 15  # in the table of the profile


def waits(function, device: str) -> dict[str, int]:
    """Count the waits of a call for the GPU, by the line of Python that waits."""
    if device != "cuda":
        function()
        return {}
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = (f"{re.sub(r'.*(site-packages|torchrl_rloo)/', '', w.filename)}:{w.lineno}" for w in caught)
    return dict(Counter(lines).most_common(20))


def slowest_kernels(function, device: str) -> list[dict[str, Any]]:
    """Return the kernels that take the most time of a call."""
    if device != "cuda":
        return []
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        function()
        torch.cuda.synchronize()
    events = [e for e in record.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: -e.self_device_time_total)
    return [{"kernel": e.key[:90], "ms": e.self_device_time_total / 1000, "calls": e.count} for e in events[:KERNELS]]


def measure(size: str, row_count: int, checkpointing: bool, peak: float, setup: Setup) -> dict[str, Any]:
    """Measure forward and backward of ``RLOOLoss`` on one packed pass."""
    clear(setup.device)
    model = build_model(size, setup)
    if checkpointing:
        model.gradient_checkpointing_enable()
    policy = TransformersWrapper(model, tokenizer=build_tokenizer(size), generate=False, packing="packed")
    loss_fn = RLOOLoss(policy)
    prompt, completion = setup.pick((PROMPT, 1024 - PROMPT), (4, 12))
    rows = random_rows([(prompt, completion)] * row_count, SHAPES[size]["vocab_size"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    with torch.no_grad():
        rows = policy(rows)  # ratios near 1, since clipped rows have gradients of 0, on which products are faster
    accumulate(loss_fn, rows)
    optimizer_step(model, optimizer)  # allocates the states

    def training_pass() -> None:
        optimizer.zero_grad()
        accumulate(loss_fn, rows)

    def score() -> None:
        with torch.no_grad():
            policy.score(rows)

    def step() -> None:
        training_pass()
        optimizer_step(model, optimizer, max_grad_norm=1.0)

    matrices, lengths = read_matrices(model), [prompt + completion] * row_count
    figures: dict[str, Any] = {"rows": row_count, "tokens": sum(lengths), "checkpointing": checkpointing}
    figures["parameters"] = model.num_parameters()
    figures["flops"] = useful_flops(matrices, lengths, row_count * completion)
    figures["flops_6n"] = flops_6n(matrices, lengths)
    figures["pass_ms"] = timed_ms(training_pass, setup)
    figures["forward_ms"] = timed_ms(score, setup)
    figures["step_ms"] = timed_ms(step, setup)
    figures["peak_bytes"] = peak_bytes(training_pass, setup.device)
    figures["tokens_per_s"] = 1000 * figures["tokens"] / figures["pass_ms"]
    figures["flops_per_s"] = 1000 * figures["flops"] / figures["pass_ms"]
    figures["mfu"] = figures["flops_per_s"] / peak
    figures["mfu_6n"] = 1000 * figures["flops_6n"] / figures["pass_ms"] / peak
    figures["waits"] = attempt(waits, training_pass, setup.device)
    figures["kernels"] = attempt(slowest_kernels, training_pass, setup.device)
    return figures


def run(setup: Setup) -> dict[str, Any]:
    """Measure each model with and without gradient checkpointing, with fewer rows where memory is short."""
    matmul, peak = matmul_flops(setup), peak_flops(setup)
    results: dict[str, Any] = {"peak_flops": peak, "matmul_flops": matmul}
    for size in setup.pick(("1.5B", "0.5B"), ("tiny",)):
        for checkpointing in (False, True):
            name = f"{size}, checkpointing" if checkpointing else size
            for row_count in setup.pick((16, 8, 4), (2,)):
                results[name] = attempt(measure, size, row_count, checkpointing, peak, setup)
                if "OutOfMemory" not in str(results[name].get("error", "")):
                    break
            if "flops_per_s" in results[name]:
                results[name]["share_of_matmul"] = results[name]["flops_per_s"] / matmul
            setup.keep(results)
    return results

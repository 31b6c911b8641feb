"""Part ``long_rows``: a training step over two rows of 16,384 and of 65,536 tokens, next to prime-rl's figures.

Settings are those of prime-rl's benchmark. Weights, gradients and states have float32, products bfloat16. All layers
are recomputed, and nothing is offloaded. A micro-batch has one row, whose tokens are all in the loss. A step includes
clipping and AdamW. Theirs also compiles the layers and takes FlashAttention 3.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from flops import Matrices, flops_6n, read_matrices, useful_flops
from measure import Setup, attempt, build_model, build_tokenizer, clear, peak_flops, random_rows, synchronize

from torchrl_rloo.modules import TransformersWrapper, add_adapter
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.training import accumulate, make_optimizer, optimizer_step

ROWS = 2
LORA = {"r": 16, "target_modules": "all-linear"}
PEAK = 989e12  # of the peer's H100
# By model and adapter, then tokens of a row: seconds of a step, tokens per second, MFU by 6N, reserved GiB. Source:
# benchmarks/baselines/benchmark-1xh100-*-rl-*-Recompute-*.json of prime-rl, one H100 80GB HBM3, 2026-01-15.
# Their tokens per second cover the time between steps, in which full fine-tuning wrote the weights to a disk.
PRIME_RL = {
    ("qwen3-0.6B", False): {16_384: (1.992, 11_896, 0.11082, 12.53), 65_536: (12.176, 10_147, 0.26805, 19.56)},
    ("qwen3-4B", True): {16_384: (5.260, 6_229, 0.21671, 23.30), 65_536: (31.492, 4_164, 0.37373, 41.99)},
}


def build(size: str, lora: bool, setup: Setup):
    """Build a model that recomputes its layers, with an adapter or without."""
    model = build_model(size, setup, torch.float32)
    model.gradient_checkpointing_enable()
    return add_adapter(model, LORA) if lora else model


def figures(matrices: Matrices, row_tokens: int, step: float, peak: float) -> dict[str, float]:
    """Return the speed of a step whose tokens are all in the loss, by both conventions."""
    lengths = [row_tokens] * ROWS
    return {
        "tokens/s": sum(lengths) / step,
        "MFU 6N": flops_6n(matrices, lengths) / step / peak,
        "MFU": useful_flops(matrices, lengths, sum(lengths)) / step / peak,
    }


def compare(ours: dict[str, Any], matrices: Matrices, row_tokens: int, published: tuple[float, ...]) -> dict[str, Any]:
    """Return our figures, each followed by prime-rl's; those of its step alone are computed from its sizes."""
    step, tokens_per_s, mfu_6n, gib = published
    own = figures(matrices, row_tokens, step, PEAK)
    theirs = {"step s": step, "tokens/s": tokens_per_s, "MFU 6N": mfu_6n, "MFU": own["MFU"], "GiB": gib}
    line = {k: v for name in theirs for k, v in ((name, ours.get(name)), (f"prime-rl, {name}", theirs[name]))}
    return line | {"prime-rl, MFU 6N of the step": own["MFU 6N"], "error": ours.get("error")}


def measure(model, size: str, row_tokens: int, repeats: int, peak: float, setup: Setup) -> dict[str, Any]:
    """Measure steps by the wall clock; the first of several warms up."""
    clear(setup.device)
    rows = random_rows([(1, row_tokens - 1)] * ROWS, model.config.vocab_size)
    tokenizer = build_tokenizer(size)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate=False, packing="packed", precision="bfloat16")
    # Without a ratio no row is clipped, whatever its old log-probs
    loss_fn = RLOOLoss(policy, ratio="none", aggregation="token_mean")
    optimizer, seconds = make_optimizer(model, lr=1e-6, fused=True), []
    for _ in range(repeats):
        begin = time.perf_counter()
        accumulate(loss_fn, rows, micro_batch_size=1)
        optimizer_step(model, optimizer, max_grad_norm=1.0)
        synchronize(setup.device)
        seconds.append(time.perf_counter() - begin)
    step = statistics.median(seconds[1:] or seconds)
    memory = torch.cuda.max_memory_reserved() / 2**30 if setup.device == "cuda" else None
    return {"step s": step, "GiB": memory, **figures(read_matrices(model), row_tokens, step, peak)}


def run(setup: Setup) -> dict[str, Any]:
    """Measure both models at both lengths; the short rows of a model warm up its long ones."""
    results: dict[str, Any] = {"peak_flops": peak_flops(setup), "table": []}
    for (size, lora), peers in PRIME_RL.items():
        model, shape = None, setup.pick(size, "tiny-qwen3")  # free the last model first
        clear(setup.device)
        model = build(shape, lora, setup)
        matrices = read_matrices(build(size, lora, Setup("meta", False)))
        for (row_tokens, published), repeats in zip(peers.items(), (3, 1 if lora else 2), strict=True):
            tokens = setup.pick(row_tokens, row_tokens // 1024)
            ours = attempt(measure, model, shape, tokens, repeats, results["peak_flops"], setup)
            line = {"model": shape + (", LoRA 16" if lora else ", full"), "row tokens": tokens}
            results["table"].append(line | compare(ours, matrices, row_tokens, published))
            setup.keep(results)
    return results

"""Expectations for one H100 of 80 GB: memory, seconds and tokens per second by arithmetic, none of it measured.

    python benchmarks/gpu/expect.py

Memory is that of ``torchrl-rloo plan``. Times follow from counted operations and bytes, and from data sheet rates.
A step trains 128 rows of 256 prompt and 768 completion tokens, 16 rows in a pass. Full fine-tuning has float32 weights,
LoRA bfloat16 ones. Products, sampling weights and the key-value cache have bfloat16.
"""

from __future__ import annotations

from typing import Any

from flops import read_matrices, useful_flops
from measure import PEAK_FLOPS, Setup, build_config
from part_long_rows import LORA, build

from common import print_table  # isort: skip  # from the folder that measure adds
from torchrl_rloo.diagnostics import MemorySettings, plan_memory, read_shape

PEAK, BANDWIDTH, MEMORY = PEAK_FLOPS["H100"], 3.35e12, 80e9
ROWS, PROMPT, COMPLETION, PASS_ROWS = 128, 256, 768, 16
CASES = {"gemma3-270M": False, "qwen3-0.6B": False, "qwen3-4B": True}  # True trains an adapter
UTILIZATIONS, LINES = (10, 25, 40), (1, 64, 256)
PARTS = {name: name for name in ("weights", "gradients", "optimizer states", "activations")} | {"head": "logits tile"}


def memory(size: str, lora: bool, recompute: bool) -> dict[str, Any]:
    """Return the planner's GiB of a training pass by part, and of the phase that needs the most."""
    settings = MemorySettings(
        rows=ROWS,
        row_tokens=PROMPT + COMPLETION,
        prompt_tokens=PROMPT,
        packing="packed",
        micro_batch_size=PASS_ROWS,
        dtype="bfloat16" if lora else "float32",
        precision="bfloat16",
        gradient_checkpointing=recompute,
        sampled_lines=ROWS,
        cache_dtype="bfloat16",
        device="cuda",
        device_bytes=int(MEMORY),
    )
    plan = plan_memory(read_shape(build_config(size), LORA if lora else None), settings)
    gib = {phase: {name: n / 2**30 for name, n in parts.items()} for phase, parts in plan.phases.items()}
    parts = {PARTS[name]: gib["train"].get(name) for name in PARTS}  # at its largest moment
    return parts | {f"sum, {phase}": sum(sizes.values()) for phase, sizes in gib.items()} | {"fits": plan.fits}


def speed(size: str, lora: bool) -> dict[str, Any]:
    """Return the seconds of a training step by utilization, and sampled tokens per second by lines at once."""
    matrices, shape = read_matrices(build(size, lora, Setup("meta", False))), read_shape(build_config(size))
    flops = useful_flops(matrices, [PROMPT + COMPLETION] * ROWS, ROWS * COMPLETION)
    line: dict[str, Any] = {"PFLOP of a step": flops / 1e15}
    line |= {f"s at MFU {share} %": flops / (PEAK * share / 100) for share in UTILIZATIONS}
    # Each token reads all weights once for all lines, and keys and values of what precedes it, on average
    context = PROMPT + COMPLETION // 2
    cache = 2 * 2 * shape.key * sum(min(context, window or context) for window in matrices.windows)
    for lines in LINES:
        line[f"tokens/s, {lines} lines"] = lines * BANDWIDTH / (2 * shape.numel + lines * cache)
    return line


def tables() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of both tables."""
    names = {size: f"{size}, {'LoRA 16' if lora else 'full'}" for size, lora in CASES.items()}
    passes = [(size, lora, recompute) for size, lora in CASES.items() for recompute in (False, True)]
    return {
        "GiB, planned": [{"model": names[c[0]], "recompute": c[2], **memory(*c)} for c in passes],
        "speed, at most": [{"model": names[size], **speed(size, lora)} for size, lora in CASES.items()],
    }


if __name__ == "__main__":
    for title, rows in tables().items():
        print_table(f"{title} (arithmetic, not measured)", rows)

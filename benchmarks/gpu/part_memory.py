"""Part ``memory``: peak memory of training steps on the GPU, compared with the planner's estimate."""

from __future__ import annotations

from typing import Any

import torch
from measure import SHAPES, Setup, attempt, build_config, build_model, build_tokenizer, clear, random_rows

from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.training import accumulate, optimizer_step

GROUP = 4
STEPS = 2  # the second has the states of the optimizer


def measured(size: str, sizes: dict[str, int], packing: str, checkpointing: bool, setup: Setup) -> dict[str, Any]:
    """Take training steps, and return the bytes that were allocated and reserved at the peak of the last."""
    clear(setup.device)
    model = build_model(size, setup)
    if checkpointing:
        model.gradient_checkpointing_enable()
    policy = TransformersWrapper(model, tokenizer=build_tokenizer(size), generate=False, packing=packing)
    loss_fn, optimizer = RLOOLoss(policy), torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    lengths = [(sizes["prompt_tokens"], sizes["row_tokens"] - sizes["prompt_tokens"])] * sizes["rows"]
    rows = random_rows(lengths, SHAPES[size]["vocab_size"], group=GROUP)
    for _ in range(STEPS):
        clear(setup.device)
        accumulate(loss_fn, rows, micro_batch_size=sizes["micro_batch_size"])
        optimizer_step(model, optimizer, max_grad_norm=1.0)
    if setup.device != "cuda":
        return {"allocated_bytes": None, "reserved_bytes": None}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "outside_bytes": total - free - torch.cuda.memory_reserved(),  # context, libraries, other processes
    }


def planned(size: str, sizes: dict[str, int], packing: str, checkpointing: bool, setup: Setup) -> dict[str, Any]:
    """Return the planner's bytes of the same steps, by phase and part."""
    from torchrl_rloo.diagnostics import MemorySettings, plan_memory, read_shape

    settings = MemorySettings(
        **sizes,
        group=GROUP,
        packing=packing,
        dtype=str(setup.dtype).removeprefix("torch."),
        gradient_checkpointing=checkpointing,
        device=setup.device,
    )
    plan = plan_memory(read_shape(build_config(size)), settings)
    return {"bytes": plan.peak, "phase": plan.peak_phase, "parts": plan.phases[plan.peak_phase]}


def compare(*case: Any) -> dict[str, Any]:
    """Return both, and the plan divided by the measured peak outside and inside the allocator."""
    figures = {"measured": attempt(measured, *case), "planned": attempt(planned, *case)}
    peak, plan = figures["measured"].get("reserved_bytes"), figures["planned"].get("bytes")
    if peak and plan:
        figures["ratio"] = plan / (peak + figures["measured"]["outside_bytes"])
    return figures


def run(setup: Setup) -> dict[str, Any]:
    """Compare the plan with steps of several layouts, with and without gradient checkpointing."""
    full = {"rows": 16, "row_tokens": 1024, "prompt_tokens": 256, "micro_batch_size": 8}
    tiny = {"rows": 4, "row_tokens": 12, "prompt_tokens": 4, "micro_batch_size": 4}
    sizes = setup.pick(full, tiny)
    return {
        f"{size}, {packing}{', checkpointing' if checkpointing else ''}": compare(
            size, sizes, packing, checkpointing, setup
        )
        for size in setup.pick(("0.5B", "1.5B"), ("tiny",))
        for packing in ("none", "packed")
        for checkpointing in (False, True)
    } | {"sizes": sizes}

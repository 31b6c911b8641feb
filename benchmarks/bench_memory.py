"""Peak memory of a training step on each rank, and the planner's estimate of it.

    python benchmarks/bench_memory.py                         # 11M and 110M parameters, four ways to train
    python benchmarks/bench_memory.py --sizes 11M --modes none fsdp
    python benchmarks/bench_memory.py --modes ddp fsdp --ranks 4

Each rank is a separate process, joined by gloo. The figure is the growth of its resident set over that after the
imports: the largest one during a step after the first ones, which has optimizer states. The estimate has no process in
it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import OFFLINE, ONE_THREAD, print_result, print_table

SIZES = {  # tied embeddings, as in small models
    "11M": {"vocab_size": 8192, "hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 7},
    "110M": {"vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12},
}
MODES = ("none", "ddp", "fsdp", "fsdp_checkpointing")
ROWS = {"11M": 32, "110M": 16}
PROMPT, ANSWER, GROUP = 64, 128, 4
# Return freed blocks to the system at once, so that the resident set is what is in use
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def make_config(size: str):
    """Return the configuration of a Llama model of a size."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **SIZES[size], num_attention_heads=SIZES[size]["hidden_size"] // 64, tie_word_embeddings=True, pad_token_id=0
    )


def make_settings(size: str, mode: str, packing: str, passes: int, world: int):
    """Return the planner's settings of a measurement on ``world`` ranks."""
    from torchrl_rloo.diagnostics import MemorySettings

    return MemorySettings(
        rows=ROWS[size],
        row_tokens=PROMPT + ANSWER,
        prompt_tokens=PROMPT,
        group=GROUP,
        packing=packing,
        micro_batch_size=ROWS[size] // world // passes,
        parallel=mode.partition("_")[0],
        ranks=world,
        load_shards=True,
        gradient_checkpointing=mode.endswith("checkpointing"),
    )


def make_rows(size: str):
    """Return rows of random tokens with random advantages."""
    import torch
    from tensordict import TensorDict

    from torchrl_rloo.data import keys, stack_rows

    draw = torch.Generator().manual_seed(0)
    rows = []
    for i in range(ROWS[size]):
        if i % GROUP == 0:
            prompt = torch.randint(1, SIZES[size]["vocab_size"], (PROMPT,), generator=draw)
        answer = torch.randint(1, SIZES[size]["vocab_size"], (ANSWER,), generator=draw)
        mask = torch.arange(PROMPT + ANSWER) >= PROMPT
        row = TensorDict({keys.TOKENS: torch.cat([prompt, answer]), keys.ACTION_MASK: mask})
        row[keys.LOG_PROBS] = torch.full((len(mask),), -9.0) * mask
        row[keys.ADVANTAGE] = torch.randn(1, 1, generator=draw)
        row[keys.GROUP_ID] = torch.tensor(i // GROUP)
        rows.append(row)
    return stack_rows(rows)


def memory(field: str) -> int:
    """Return a figure of this process's status in bytes: ``VmRSS``, the resident set, or ``VmHWM``, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def measure(size: str, mode: str, packing: str, passes: int, world: int) -> None:
    """Train for a few steps as one of the ranks, and print the peak of the last as JSON."""
    import torch
    from transformers import AutoModelForCausalLM

    from torchrl_rloo.embedded import build_tokenizer
    from torchrl_rloo.modules import TransformersWrapper
    from torchrl_rloo.objectives import RLOOLoss
    from torchrl_rloo.runtime.ranks import Ranks
    from torchrl_rloo.training import accumulate, optimizer_step, shard_model

    # Train a tiny model once, so that everything is imported and every kernel has run
    settings = make_settings(size, mode, packing, passes, world)
    rows, tokenizer = make_rows(size), build_tokenizer()
    torch.manual_seed(0)
    with Ranks.from_environment() as ranks:

        def make_step(config):
            model = AutoModelForCausalLM.from_config(config).eval()
            if settings.gradient_checkpointing:
                model.gradient_checkpointing_enable()
            shard_model(model, ranks, settings.parallel)
            policy = TransformersWrapper(model, tokenizer=tokenizer, generate=False, packing=packing)
            loss_fn, optimizer = RLOOLoss(policy), torch.optim.AdamW(model.parameters())

            def step(rows):
                accumulate(loss_fn, rows, micro_batch_size=settings.micro_batch_size, ranks=ranks)
                optimizer_step(model, optimizer, max_grad_norm=1.0)

            return step

        tiny = make_config(size)
        tiny.hidden_size, tiny.num_hidden_layers, tiny.num_attention_heads, tiny.num_key_value_heads = 64, 1, 1, 1
        make_step(tiny)(rows[:4])
        gc.collect()
        base = memory("VmRSS")
        # Train the model, and reset the peak once all that lasts is there. DDP builds its buckets again in step 2
        step = make_step(make_config(size))
        for _ in range(2 if settings.parallel == "ddp" else 1):
            step(rows)
        gc.collect()
        between = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        step(rows)
        print(json.dumps({"between": between - base, "peak": memory("VmHWM") - base, "base": base}), flush=True)


def run_ranks(size: str, mode: str, packing: str, passes: int, world: int) -> list[dict[str, Any]]:
    """Run the ranks of a measurement, and return their figures."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--child", size, mode, packing, str(passes), str(world)]
    shared = os.environ | ONE_THREAD | OFFLINE | MALLOC | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            command,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{' '.join(command)} failed")
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


def estimate(size: str, mode: str, packing: str, passes: int, world: int):
    """Return the planner's plan of a measurement."""
    from torchrl_rloo.diagnostics import plan_memory, read_shape

    return plan_memory(read_shape(make_config(size)), make_settings(size, mode, packing, passes, world))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--packings", nargs="+", default=["none"], help="none, packed, shared_prefix")
    parser.add_argument("--passes", type=int, nargs="+", default=[1], help="passes of a step on each rank")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of all modes but none")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        size, mode, packing, passes, world = args.child
        return measure(size, mode, packing, int(passes), int(world))
    # Measure one configuration after the other
    rows = []
    cases = [
        (size, mode, packing, passes, 1 if mode == "none" else args.ranks)
        for size, packing, passes, mode in itertools.product(args.sizes, args.packings, args.passes, args.modes)
    ]
    for case in cases:
        figures = run_ranks(*case)
        plan = estimate(*case)
        peak = max(figure["peak"] for figure in figures) / 2**20
        phase = max(("train", "optimize"), key=lambda name: sum(plan.phases[name].values()))
        parts = {name: size / 2**20 for name, size in plan.phases[phase].items() if name != "process"}
        planned = sum(parts.values())
        rows.append(
            dict(zip(("size", "mode", "packing", "passes", "ranks"), case, strict=True))
            | {
                "between, MiB": max(figure["between"] for figure in figures) / 2**20,
                "peak, MiB": peak,
                "planned, MiB": planned,
                "planned / peak": round(planned / peak, 3),
                "parts, MiB": ", ".join(f"{name} {size:.0f}" for name, size in parts.items()),
            }
        )
        print_table("so far", rows[-1:])
    print_table("Peak memory of a training step on a rank, over a process after its imports", rows)
    print_result(
        {f"{r['size']} {r['mode']} {r['packing']} {r['passes']} {r['ranks']}": r["planned / peak"] for r in rows}
    )


if __name__ == "__main__":
    main()

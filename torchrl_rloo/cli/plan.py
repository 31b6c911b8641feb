"""Command ``torchrl-rloo plan``: memory of a run from its settings, before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrl_rloo.cli.config import keeps_copy
from torchrl_rloo.cli.fields import known_settings, non_null_fields
from torchrl_rloo.cli.recipe import import_recipe

GIB = 2**30
PROMPT_TOKENS = 512  # assumed length of a prompt, if nothing limits it
VLLM_SHARE = 0.9  # share of a GPU that vLLM takes by default
_TRAIN = (
    "packing",
    "micro_batch_tokens",
    "parallel",
    "shard_size",
    "load_shards",
    "precision",
    "offload",
)
_TITLES = {"none": "padded", "packed": "packed", "shared_prefix": "shared prefix"}


def load_recipe(file: Path) -> Any:
    """Import a recipe without running it, and return its module."""
    recipe = import_recipe(file, "planned_recipe")
    config = getattr(recipe, "Config", None)
    if config is None or "algorithm" not in known_settings(config):
        raise ValueError(f"{file.name} has no algorithm, so no plan, check or server of it; use rloo or a copy")
    return recipe


def print_plan(cfg: Any, *, ranks: int = 1, gpu_memory: float | None = None, prompt_tokens: int | None = None) -> None:
    """Print the memory of a run, and whether it fits."""
    from torchrl_rloo.diagnostics import plan_memory, read_shape

    # Describe the model and the run
    config = model_config(cfg)
    model = read_shape(config, cfg.lora, train_vision=cfg.model.train_vision)
    settings, notes = memory_settings(cfg, config, ranks, gpu_memory, prompt_tokens)
    plan = plan_memory(model, settings)
    print(_heading(cfg, model, settings), *notes, sep="\n")
    # Print the table and the verdict
    print(f"\n{_phase_table(plan)}")
    if (engine := _engine_line(cfg, model, settings)) is not None:
        print(f"\n{engine}")
    limit = settings.device_bytes
    if limit is None:
        print(f"\npeak: {_gib(plan.peak)} GiB in phase {plan.peak_phase}; --gpu-memory GIB checks whether it fits")
        return
    verdict = "fits" if plan.fits else "does not fit"
    print(f"\n{verdict}: {_gib(plan.peak)} of {_gib(limit)} GiB, in phase {plan.peak_phase}")


def model_config(cfg: Any) -> Any:
    """Return the configuration of the model, of a local directory or the hub."""
    from transformers import AutoConfig

    from torchrl_rloo.envs.tasks.base import EMBEDDED
    from torchrl_rloo.modules import local_model
    from torchrl_rloo.runtime.lookup import HUB_KWARGS

    # The built-in model has no directory before its first run
    name = cfg.model.name
    if name == EMBEDDED:
        from torchrl_rloo.embedded.warm_start import build_untrained

        return build_untrained(cfg.task.name, seed=0)[0].config
    # An adapter lacks the shapes of its base
    if (Path(name).expanduser() / "adapter_config.json").is_file():
        raise ValueError(
            f"model.name={name} is an adapter; name its base model, and set lora to the adapter's settings"
        )
    name = local_model(name, log=print)
    try:
        return AutoConfig.from_pretrained(name, **{k: v for k, v in cfg.model.kwargs.items() if k in HUB_KWARGS})
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(f"model.name={name} has no configuration that can be read: {reason}") from error


def memory_settings(
    cfg: Any, config: Any, ranks: int, gpu_memory: float | None, prompt_tokens: int | None
) -> tuple[Any, list[str]]:
    """Return the settings that decide the memory of a run, and lines about what was assumed."""
    from torchrl_rloo.diagnostics import MemorySettings

    # Refuse what a run would refuse. Settings that this version does not have keep their defaults
    train = {name: getattr(cfg.train, name) for name in _TRAIN if hasattr(cfg.train, name)}
    parallel, shards = train.get("parallel", "none"), train.get("shard_size")
    if ranks < 1 or (ranks > 1 and parallel == "none"):
        raise ValueError(f"--ranks {ranks} cannot be combined with train.parallel=none; set it to ddp or fsdp")
    if shards is not None and (parallel != "fsdp" or ranks % shards):
        raise ValueError(f"train.shard_size={shards} requires train.parallel=fsdp and must divide --ranks {ranks}")
    for name in ("tensor_parallel", "context_parallel"):
        if (getattr(cfg.train, name, None) or 1) != 1:
            raise ValueError(f"train.{name}={getattr(cfg.train, name)} cannot be planned; plan without it")
    # Find the longest row, and the device
    lengths, notes = _lengths(cfg, config, prompt_tokens)
    device_bytes = None if gpu_memory is None else round(gpu_memory * GIB)
    device = "cpu" if gpu_memory is None and cfg.model.device == "cpu" else "cuda"
    if device == "cuda" and device_bytes is None:
        import torch

        device_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    # Collect the rest
    rows = cfg.plan.prompts_per_step * cfg.plan.num_generations
    settings = MemorySettings(
        rows=math.ceil(rows / cfg.plan.minibatches),
        **lengths,
        group=cfg.plan.num_generations,
        micro_batch_size=cfg.plan.micro_batch_size,
        ranks=ranks,
        dtype=cfg.model.dtype,
        gradient_checkpointing=cfg.model.gradient_checkpointing,
        quantization=getattr(cfg.model, "quantization", None),
        optimizer=getattr(cfg.optimizer, "name", "adamw"),
        optimizer_kwargs=getattr(cfg.optimizer, "kwargs", {}),
        reference=keeps_copy(cfg.lora) and _has_reference(cfg),
        copy_dtype=None if cfg.sampler.share_weights else cfg.sampler.dtype or cfg.model.dtype,
        sampled_lines=_sampled_lines(cfg),
        cache_dtype=cfg.sampler.dtype or cfg.model.dtype,
        engine_bytes=_engine_bytes(cfg, device, device_bytes),
        engine_sleeps=cfg.inference.sleep,
        device=device,
        device_bytes=device_bytes,
        **{name: tuple(value) if isinstance(value, list) else value for name, value in train.items()},
    )
    return settings, notes


def _lengths(cfg: Any, config: Any, prompt_tokens: int | None) -> tuple[dict[str, int], list[str]]:
    """Return the tokens of the longest row and of its prompt, and lines about assumptions."""
    from torchrl_rloo.embedded import resolve_task

    # The prompt
    notes, prompt = [], prompt_tokens or cfg.data.max_prompt_length
    if prompt is None:
        prompt = PROMPT_TOKENS
        notes.append(f"assumed: prompts of up to {prompt} tokens; set --prompt-tokens or data.max_prompt_length")
    # The turns, each of which may sample as much as it can
    environment, task = cfg.environment, resolve_task(**non_null_fields(cfg.task))
    turns = environment.max_turns or task.limits.get("max_turns", 1)
    turn = min(cfg.generate.max_new_tokens, task.limits.get("max_turn_tokens") or cfg.generate.max_new_tokens)
    if turns > 1:
        notes.append(f"assumed: {turns} turns, without the tokens of feedback; environment.max_tokens bounds them")
    row = prompt + turns * turn
    # Bounds of the whole row
    bounds = [environment.max_tokens, getattr(config, "max_position_embeddings", None)]
    row = min([row, *(bound for bound in bounds if bound is not None)])
    if row <= prompt:
        raise ValueError(f"prompts of {prompt} tokens leave none of the {row} of a row; set --prompt-tokens lower")
    return {"row_tokens": row, "prompt_tokens": prompt}, notes


def _has_reference(cfg: Any) -> bool:
    """Return whether the method has a KL to a copy of the initial model."""
    from torchrl_rloo.objectives import make_method

    plan = {"prompts_per_step": cfg.plan.prompts_per_step, "num_generations": cfg.plan.num_generations}
    plan["max_new_tokens"] = cfg.generate.max_new_tokens
    return make_method(cfg.algorithm, kl=non_null_fields(cfg.kl), **plan).kl is not None


def _sampled_lines(cfg: Any) -> int:
    """Return the lines that Transformers samples at the same time, in training or in evaluation; 0 with an engine."""
    if cfg.inference.engine is not None:
        return 0
    evaluated = min(cfg.eval.batch_size, cfg.data.eval_size)
    lines = max(cfg.plan.prompts_per_step * cfg.plan.num_generations, evaluated)
    return min(lines, cfg.collector.max_batch_size or lines)


def _engine_bytes(cfg: Any, device: str, device_bytes: int | None) -> int:
    """Return what an engine takes of the device that trains: its share, or nothing on other devices."""
    engine = cfg.inference.engine
    if engine is None or device == "cpu" or engine.get("devices") is not None or "url" in engine:
        return 0
    return round(engine.get("gpu_memory_utilization", VLLM_SHARE) * (device_bytes or 0))


def _engine_line(cfg: Any, model: Any, settings: Any) -> str | None:
    """Return a line about the share of vLLM: its weights, and the rows that its cache holds."""
    engine = cfg.inference.engine
    if engine is None or "url" in engine or settings.device_bytes is None:
        return None
    from torchrl_rloo.runtime.lookup import parse_dtype

    # Split weights and cache over the engine's GPUs
    share, size = engine.get("gpu_memory_utilization", VLLM_SHARE), engine.get("tensor_parallel_size", 1)
    item = 2 if engine.get("dtype") in (None, "auto") else parse_dtype(engine["dtype"]).itemsize
    weights = model.numel * item / size
    left = share * settings.device_bytes - weights
    rows = max(0, int(left / (2 * model.layers * model.key * item / size * settings.row_tokens)))
    place = f"GPUs {engine['devices']}" if engine.get("devices") is not None else "the GPU that trains"
    line = f"engine on {place}: {_gib(share * settings.device_bytes)} GiB each, of which weights {_gib(weights)}"
    return f"{line} and a cache for {rows} full rows" if rows else f"{line}: no room for a cache of one full row"


def _heading(cfg: Any, model: Any, settings: Any) -> str:
    from torchrl_rloo.diagnostics.plan import count

    ranks = "1 rank" if settings.ranks == 1 else f"{settings.ranks} ranks, {settings.parallel}"
    return (
        f"{cfg.model.name}: {model.numel:,} parameters, {model.trained:,} trained, on {ranks} ({settings.device})\n"
        f"rows of up to {settings.row_tokens:,} tokens, {settings.prompt_tokens:,} of the prompt; "
        f"{settings.rows:,} in a minibatch\nlargest pass: {settings.pass_rows} rows, "
        f"{settings.pass_tokens:,} positions, {_TITLES[settings.packing]}; "
        f"{count(settings.passes, 'pass', 'passes')} of a rank in an optimizer step"
    )


def _phase_table(plan: Any) -> str:
    """Return the pieces of all phases as a table."""
    names = list(dict.fromkeys(name for parts in plan.phases.values() for name in parts))
    rows = [["GiB on a rank", *plan.phases]]
    rows += [[name, *(_gib(parts[name]) if name in parts else "" for parts in plan.phases.values())] for name in names]
    rows.append(["sum", *(_gib(sum(parts.values())) for parts in plan.phases.values())])
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return lines of aligned cells: the first column to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 or not _is_number(rows[-1][i]) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _is_number(cell: str) -> bool:
    return cell.replace(".", "").isdigit()


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"

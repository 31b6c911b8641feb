"""Command ``torchrl-rloo plan --cluster``: engines and trainer GPUs of a cluster, simulated before it is rented."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_rloo.cli.cluster_options import ClusterOptions
from torchrl_rloo.cli.plan import PROMPT_TOKENS, VLLM_SHARE, _has_reference, _table, load_fake_model
from torchrl_rloo.cli.schema import non_null_fields
from torchrl_rloo.runtime.lookup import did_you_mean

GB = 1e9


class Paper(NamedTuple):
    """Figures of a model on a GPU, from which clusters are made.

    Attributes:
        load: the conversations.
        averages: their means.
        speed: speed of an engine.
        engine_gpus: GPUs of an engine.
        train_rate: tokens per second of one trainer GPU.
        push: seconds of sending weights, and of an engine's standing still.
    """

    load: Any
    averages: Any
    speed: Any
    engine_gpus: int
    train_rate: float
    push: tuple[float, float]


def print_cluster(
    cfg: Any, options: ClusterOptions, *, prompt_tokens: int | None = None, picture: str | Path | None = None
) -> None:
    """Print simulated splits and modes of a cluster, and recommend one.

    Args:
        cfg: settings of the recipe.
        options: settings of the cluster.
        prompt_tokens: mean tokens of a prompt. None takes ``data.max_prompt_length``, else 512.
        picture: PNG file of the recommended cluster's timeline. None draws none.

    Raises:
        ValueError: if a setting is out of range.
        FileNotFoundError: if the model's configuration or the file of lengths is missing.
    """
    from torchrl_rloo.diagnostics.cluster_split import advise_cluster

    # Compute speeds on paper
    paper, notes = put_on_paper(cfg, options, prompt_tokens)
    print(_heading(cfg, options, paper), *notes, sep="\n")
    # Search the split, unless the engines are given
    make = partial(make_cluster, cfg, options, paper)
    splits = _splits(make, paper.engine_gpus, options, 6)
    best = max(splits, key=lambda split: split.result.tokens_per_second)
    print(f"\n{_split_table(splits)}")
    # Compare the modes, and other sizes
    print(f"\n{_mode_table(make, best, paper.engine_gpus, options)}")
    if options.sizes:
        print(f"\n{_size_table(make, paper.engine_gpus, options)}")
    # Recommend
    busy = f"engines {_share(best.result.engine_busy)} and trainer {_share(best.result.trainer_busy)} busy"
    print(
        f"\nrecommended: {_engines(best.engines, paper.engine_gpus)} and {best.trainer_gpus} trainer GPUs, "
        f"{best.engines * paper.engine_gpus / best.trainer_gpus:.2g} engine GPUs per trainer GPU ({busy}); "
        f"{advise_cluster(best.result)}"
    )
    if picture is not None:
        from torchrl_rloo.diagnostics.cluster_picture import plot_cluster

        recorded = _run(make(best.engines, best.trainer_gpus), options, record=True)
        print(f"picture: {plot_cluster(recorded, picture)}")


def put_on_paper(cfg: Any, options: ClusterOptions, prompt_tokens: int | None) -> tuple[Paper, list[str]]:
    """Return the speeds of engines and trainer, and lines about what was assumed.

    Raises:
        ValueError: if the GPU is unknown, or its memory too small.
    """
    from torchrl_rloo.diagnostics import cluster_hardware as hardware
    from torchrl_rloo.diagnostics.cluster_engine import EngineSpeed, table_rate

    if options.gpu not in hardware.GPUS:
        names = ", ".join(hardware.GPUS)
        raise ValueError(
            f"cluster.gpu={options.gpu} is unknown{did_you_mean(options.gpu, hardware.GPUS)}; valid: {names}"
        )
    gpu, engine = hardware.GPUS[options.gpu], cfg.inference.engine or {}
    active = None if options.active_parameters is None else 1e9 * options.active_parameters
    model = hardware.ModelCost.of(load_fake_model(cfg), active)
    share = engine.get("gpu_memory_utilization", VLLM_SHARE)
    efficiency = hardware.Efficiency(options.bandwidth_use, options.flops_use, options.mfu, share)
    # The engine: GPUs, then speed at the mean context
    load, notes = make_load(cfg, options, prompt_tokens)
    averages = load.averages()
    gpus = options.engine_gpus or engine.get("tensor_parallel_size")
    gpus = gpus or hardware.smallest_engine(model, gpu, averages.row, efficiency)
    speed = hardware.engine_speed(model, gpu, gpus, averages.context, efficiency)
    if options.rates:
        speed = EngineSpeed(table_rate(options.rates), speed.prefill, speed.cache_tokens, speed.max_running)
    # The trainer and the weight updates
    passes = int(cfg.lora is None and _has_reference(cfg))
    rate = hardware.train_rate(
        model, gpu, averages.row, efficiency, forward_passes=passes, epochs=cfg.plan.epochs_per_batch
    )
    push = hardware.push_seconds(model, gpus, GB * options.push_gigabytes, GB * options.load_gigabytes)
    return Paper(load, averages, speed, gpus, rate, push), notes


def make_load(cfg: Any, options: ClusterOptions, prompt_tokens: int | None) -> tuple[Any, list[str]]:
    """Return the conversations of a run, and lines about what was assumed."""
    from torchrl_rloo.diagnostics.cluster_load import Distribution, Load, read_values
    from torchrl_rloo.embedded import resolve_task

    notes, most = [], cfg.generate.max_new_tokens
    if options.lengths is not None:
        tokens = Distribution(values=read_values(options.lengths), maximum=most)
    else:
        mean = options.mean_tokens or most / 4
        if options.mean_tokens is None:
            notes.append(f"assumed: {mean:.0f} tokens a turn on average; set cluster.mean_tokens or cluster.lengths")
        p99 = options.p99_tokens or max(mean, min(most, 14 * mean))
        tokens = Distribution(mean, p99, maximum=most)
    prompt = prompt_tokens or cfg.data.max_prompt_length
    if prompt is None:
        prompt = PROMPT_TOKENS
        notes.append(f"assumed: prompts of {prompt} tokens; set --prompt-tokens or data.max_prompt_length")
    task = resolve_task(**non_null_fields(cfg.task))
    turns = options.turns or cfg.environment.max_turns or task.limits.get("max_turns", 1)
    tools = Distribution(options.tool_seconds, options.tool_p99)
    return Load(tokens, Distribution(prompt), Distribution(turns), tools, Distribution(options.feedback_tokens)), notes


def make_cluster(cfg: Any, options: ClusterOptions, paper: Paper, engines: int, trainer_gpus: int) -> Any:
    """Return the cluster of a number of engines and of trainer GPUs."""
    from torchrl_rloo.diagnostics.cluster_runner import ProcessCosts
    from torchrl_rloo.diagnostics.cluster_simulation import ClusterSettings, modes

    background = options.background_push and options.mode != "sync"
    costs = ProcessCosts(
        group_seconds=options.group_ms / 1e3, turn_seconds=options.turn_ms / 1e3, workers=options.workers or engines
    )
    return ClusterSettings(
        load=paper.load,
        engines=engines,
        speed=paper.speed,
        groups_per_batch=cfg.plan.prompts_per_step,
        group_size=cfg.plan.num_generations,
        train_rate=trainer_gpus * paper.train_rate,
        transfer_seconds=paper.push[0],
        still_seconds=paper.push[1],
        mode=replace(modes(options.max_staleness)[options.mode], background_push=background),
        costs=costs,
        max_in_flight=options.max_in_flight,
    )


def _splits(make: Any, engine_gpus: int, options: ClusterOptions, simulations: int) -> list[Any]:
    """Return simulated splits, or the one that the settings give.

    Raises:
        ValueError: if the given engines leave no GPU for the trainer.
    """
    from torchrl_rloo.diagnostics.cluster_split import Split, search_split

    if options.engines is None:
        return search_split(make, options.gpus, engine_gpus, steps=options.steps, max_simulations=simulations)
    trainers = options.gpus - options.engines * engine_gpus
    if trainers < 1:
        raise ValueError(
            f"cluster.engines={options.engines} of {engine_gpus} GPUs leave none of cluster.gpus={options.gpus} for "
            "the trainer; lower cluster.engines"
        )
    return [Split(options.engines, trainers, _run(make(options.engines, trainers), options))]


def _run(cluster: Any, options: ClusterOptions, record: bool = False) -> Any:
    from torchrl_rloo.diagnostics.cluster_simulation import simulate

    return simulate(cluster, options.steps, warmup=2, record=record)


def _heading(cfg: Any, options: ClusterOptions, paper: Paper) -> str:
    averages, speed = paper.averages, paper.speed
    rows = max(1, min(speed.max_running, int(speed.cache_tokens / max(1.0, averages.context))))
    return (
        f"{cfg.model.name} on {options.gpus} {options.gpu}; {cfg.plan.prompts_per_step} groups of "
        f"{cfg.plan.num_generations} in a step; conversations of {averages.turns:.3g} turns, {averages.sampled:,.0f} "
        f"sampled tokens, {averages.row:,.0f} in a row\n"
        f"engine of {paper.engine_gpus} GPU: cache for {speed.cache_tokens:,.0f} tokens; {speed.rate(1):,.0f} tokens/s "
        f"of 1 request, {speed.rate(rows):,.0f} of {rows:,}; reads {speed.prefill:,.0f} tokens/s\n"
        f"trainer GPU: {paper.train_rate:,.0f} tokens/s; weight update: {paper.push[0]:.2f} s on the way, "
        f"{paper.push[1]:.2f} s of standing still"
    )


_COLUMNS = (
    "steps/h",
    "tokens/s",
    "engines busy",
    "running",
    "still",
    "trainer busy",
    "waits",
    "driver",
    "staleness",
    "masked",
)


def _cells(result: Any) -> list[str]:
    return [
        f"{result.steps_per_hour:.1f}",
        f"{result.tokens_per_second:.0f}",
        _share(result.engine_busy),
        f"{result.running:.0f}",
        _share(result.engine_still),
        _share(result.trainer_busy),
        _share(result.trainer_waiting + result.trainer_pushing),
        _share(result.driver_busy),
        f"{result.mean_staleness:.2f}",
        _share(result.masked_tokens / max(1, result.tokens)),
    ]


def _split_table(splits: Any) -> str:
    return _table(
        [
            ["engines + trainer GPUs", *_COLUMNS],
            *([f"{s.engines} + {s.trainer_gpus}", *_cells(s.result)] for s in splits),
        ]
    )


def _mode_table(make: Any, best: Any, engine_gpus: int, options: ClusterOptions) -> str:
    """Return the four modes, each on its best split unless the engines are given."""
    from torchrl_rloo.diagnostics.cluster_simulation import modes
    from torchrl_rloo.diagnostics.cluster_split import Split

    rows, first = [["mode", "engines + trainer GPUs", *_COLUMNS, "speed"]], None

    def add(name: str, split: Any) -> None:
        nonlocal first
        first = first or split.result
        speed = split.result.tokens_per_second / first.tokens_per_second
        rows.append([name, f"{split.engines} + {split.trainer_gpus}", *_cells(split.result), f"{speed:.2f}"])

    def make_sync(engines: int, trainer_gpus: int) -> Any:
        return replace(make(engines, trainer_gpus), mode=modes()["sync"])

    # All GPUs sample, then all train: the sleeping engine's memory is the trainer's
    most = options.gpus // engine_gpus
    add("sync, same GPUs", Split(most, options.gpus, _run(make_sync(most, options.gpus), options)))
    for name, mode in modes(options.max_staleness).items():
        mode = replace(mode, background_push=options.background_push and name != "sync")
        if name == options.mode:
            add(name, best)
            continue
        splits = _splits(lambda e, t, mode=mode: replace(make(e, t), mode=mode), engine_gpus, options, 3)
        add(name, max(splits, key=lambda split: split.result.tokens_per_second))
    return _table(rows)


def _size_table(make: Any, engine_gpus: int, options: ClusterOptions) -> str:
    from torchrl_rloo.diagnostics.cluster_split import bottleneck, search_split

    rows = [["GPUs", "engines + trainer GPUs", *_COLUMNS, "limit"]]
    for gpus in options.sizes:
        splits = search_split(make, gpus, engine_gpus, steps=options.steps, max_simulations=3)
        best = max(splits, key=lambda split: split.result.tokens_per_second)
        rows.append([str(gpus), f"{best.engines} + {best.trainer_gpus}", *_cells(best.result), bottleneck(best.result)])
    return _table(rows)


def _engines(count: int, gpus: int) -> str:
    return f"{count} engine{'s' * (count > 1)} of {gpus} GPU{'s' * (gpus > 1)}"


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"
